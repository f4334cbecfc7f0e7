"""A device double whose work does not end by itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import Tensor

from rrfp.lab.device_double import DoubleDevice

#: Longer than any test: work that is not complete until `close`, which runs it at once.
FOREVER_S = 1e6


@pytest.fixture
def device() -> Iterator[DoubleDevice]:
    """One that completes nothing before it is closed."""
    with DoubleDevice(FOREVER_S) as device:
        yield device


def is_garbage(tensor: Tensor) -> bool:
    return bool(tensor.isnan().all()) if tensor.is_floating_point() else bool((tensor == -1).all())
