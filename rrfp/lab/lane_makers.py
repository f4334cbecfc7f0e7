"""Makers of the laboratory's lanes, for the lanes' conformance suite."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from rrfp.compute.lanes.stream import StreamLane
from rrfp.lab.device_double import DoubleDevice
from rrfp.lab.timer_lane import TimerLane
from rrfp.testing.lane_checks.makers import DEPTHS, started_lane
from rrfp.testing.lane_checks.subject import MakeLane, Subject

#: How long the double takes for each block.
SLOW_S = 0.03


def timer_lanes() -> Mapping[str, MakeLane]:
    """Lanes of virtual time."""
    return {"": timer_lane(), " (takes offers)": timer_lane(takes_offers=True)}


def double_lanes() -> Mapping[str, MakeLane]:
    """Lanes in front of the device double, one for each depth."""
    return {f" (depth {depth})": double_lane(depth) for depth in DEPTHS}


def timer_lane(*, takes_offers: bool = False) -> MakeLane:
    """The lane of virtual time. Its calls run on the loop."""

    @asynccontextmanager
    async def make() -> AsyncIterator[Subject]:
        async with started_lane(Subject(TimerLane(takes_offers=takes_offers), may_block=False)) as subject:
            yield subject

    return make


def double_lane(depth: int = 2) -> MakeLane:
    """The lane in front of a device, over the device double.

    Args:
        depth: of the lane.
    """

    @asynccontextmanager
    async def make() -> AsyncIterator[Subject]:
        device = DoubleDevice(SLOW_S)
        lane = StreamLane(device, depth=depth)
        subject = Subject(lane, device=device, break_next=device.fail, problems=lambda: device.problems)
        try:
            async with started_lane(subject):
                yield subject
        finally:
            await asyncio.to_thread(device.close)

    return make
