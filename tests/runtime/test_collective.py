"""Training between real processes over gloo edges: gradients are the references'."""

from __future__ import annotations

from pathlib import Path

import pytest
from batches import long
from compute.gloo_ranks import GOOD, outcomes
from fork_server import fork_server

__all__ = ["fork_server"]


@pytest.mark.parametrize("case", ["four_stages", long("two_stages_of_two_replicas"), long("two_stages_of_two_members")])
def test_gradients_over_collective_are_the_references(case: str, tmp_path: Path) -> None:
    found = outcomes("runtime.collective_cases", [case], 4, tmp_path)[case]
    assert found == [GOOD] * 4, "\n".join(found)
