"""Seeds in batches: the first ones run in every test run, all of them in the long one."""

from __future__ import annotations

import pytest


def batches(seeds: int, size: int, quick: int) -> list[object]:
    """Parameters of a test: the first seed of each batch of ``size``; those from ``quick`` on are marked long."""
    return [pytest.param(first, marks=pytest.mark.long if first >= quick else ()) for first in range(0, seeds, size)]
