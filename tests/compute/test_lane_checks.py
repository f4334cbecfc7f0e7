"""All lanes keep the contract of lanes, and the checks catch lanes that do not."""

from __future__ import annotations

from typing import Any

import pytest

from rrfp.testing.lane_checks import ALL_CHECKS, Check, SkippedError
from rrfp.testing.lanes import lanes_named

MAKERS: dict[str, Any] = {
    name + suffix: make_lane
    for name in ("thread", "timer", "double")
    for suffix, make_lane in lanes_named(name).items()
}

STOPS_THE_LOOP = "check_offered_call_follows_without_the_loop"
CHECKS = [
    pytest.param(check, marks=pytest.mark.allow_blocking("the check stops the loop"))
    if check.__name__ == STOPS_THE_LOOP
    else check
    for check in ALL_CHECKS
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("make_lane", MAKERS.values(), ids=MAKERS.keys())
async def test_lanes_keep_their_contract(make_lane: Any, check: Check) -> None:
    try:
        await check(make_lane)
    except SkippedError as error:
        pytest.skip(str(error))


@pytest.mark.gpu
@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__)
async def test_the_lane_of_a_gpu_keeps_its_contract(check: Check) -> None:
    try:
        await check(lanes_named("cuda")[" (depth 2)"])
    except SkippedError as error:
        pytest.skip(str(error))
