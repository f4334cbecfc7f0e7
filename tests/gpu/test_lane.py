"""The lane in front of the device keeps the contract of lanes, at each depth."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu.target import Target
from rrfp.testing.lane_checks import ALL_CHECKS, Check, SkippedError
from rrfp.testing.lanes import lanes_named

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: str(check.__name__))
async def test_the_lane_keeps_its_contract(check: Check, depth: int, target: Target, record_property: Any) -> None:
    make_lane = lanes_named("cuda" if target.is_cuda else "double")[f" (depth {depth})"]
    try:
        await check(make_lane)
    except SkippedError as lack:  # on CUDA, of the checks that need a device that fails on request
        record_property("skipped without", str(lack))
        pytest.skip(str(lack))
