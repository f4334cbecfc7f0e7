"""`topology=` and `mesh=` of a pipeline: any other object is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import rrfp
from rrfp.errors import ConfigError


@pytest.mark.parametrize("place", [3, (0, 2), rrfp.Topology], ids=["int", "tuple", "the class itself"])
def test_an_object_that_is_no_topology_is_refused(place: Any) -> None:
    kind = type(place).__name__
    with pytest.raises(ConfigError, match=f"^topology is of type {kind}, must be an rrfp.Topology$"):
        rrfp.Pipeline(nn.Identity(), topology=place)
