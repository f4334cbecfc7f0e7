"""Makers of the lanes that come with RRFP, and of those that a factory makes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import torch

from rrfp.compute.devices.cuda import CudaDevice
from rrfp.compute.lanes.base import Lane
from rrfp.compute.lanes.stream import StreamLane
from rrfp.compute.lanes.thread import ThreadLane
from rrfp.compute.lanes.timer import TimerLane
from rrfp.errors import ConfigError
from rrfp.testing.device_double import DoubleDevice
from rrfp.testing.lane_checks.subject import MakeLane, Subject

#: How long the double takes for each block.
SLOW_S = 0.03

#: The names of lanes that come with RRFP.
LANES = ("thread", "timer", "double", "cuda")

#: A lane in front of a device is checked at these depths.
DEPTHS = (1, 2, 3)

#: Cycles of a GPU's clock that take longer than 20 ms on any.
SLOW_CYCLES = 100_000_000


@asynccontextmanager
async def _started(subject: Subject) -> AsyncIterator[Subject]:
    subject.lane.start()
    try:
        yield subject
    finally:
        subject.lane.close()


@asynccontextmanager
async def thread_lane() -> AsyncIterator[Subject]:
    """The lane of a rank on a CPU."""
    async with _started(Subject(ThreadLane())) as subject:
        yield subject


def timer_lane(*, takes_offers: bool = False) -> MakeLane:
    """The lane of virtual time. Its calls run on the loop."""

    @asynccontextmanager
    async def make() -> AsyncIterator[Subject]:
        async with _started(Subject(TimerLane(takes_offers=takes_offers), may_block=False)) as subject:
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
            async with _started(subject):
                yield subject
        finally:
            await asyncio.to_thread(device.close)

    return make


def cuda_lane(depth: int = 2) -> MakeLane:
    """The lane in front of a device, over a GPU.

    Raises:
        ConfigError: if there is none.
    """
    if not torch.cuda.is_available():
        raise ConfigError("lane is 'cuda', but torch finds no CUDA device here; 'double' needs none")

    @asynccontextmanager
    async def make() -> AsyncIterator[Subject]:
        device = CudaDevice()
        lane = StreamLane(device, depth=depth)
        async with _started(Subject(lane, device=device, delay=_delay)) as subject:
            yield subject

    return make


def lanes_named(name: str) -> Mapping[str, MakeLane]:
    """The makers of a lane that comes with RRFP, by suffixes that tell them apart: one for each depth or option.

    Raises:
        ConfigError: if there is no such lane, or no such device here.
    """
    if name in ("double", "cuda"):
        of_depth = double_lane if name == "double" else cuda_lane
        return {f" (depth {depth})": of_depth(depth) for depth in DEPTHS}
    if name == "timer":
        return {"": timer_lane(), " (takes offers)": timer_lane(takes_offers=True)}
    if name == "thread":
        return {"": thread_lane}
    raise ConfigError(f"lane is {name!r}, must be one of: {', '.join(LANES)}, or module:attribute, file.py:attribute")


def made_by(factory: Callable[[int], object]) -> MakeLane:
    """The lane of stage 0 of a factory, as the option ``lane=`` takes it.

    The factory may return a `Subject` instead, which says what the checks of device work need. Its lane is not started.

    Args:
        factory: of the lane; called for each check with the number of a stage, 0.

    Raises:
        ConfigError: if ``factory`` cannot be called; the maker, if it returns neither.
    """
    if not callable(factory):
        raise ConfigError(f"lane is {factory!r}, must be a factory: lane(stage)")

    @asynccontextmanager
    async def make() -> AsyncIterator[Subject]:
        made = factory(0)
        subject = Subject(made) if isinstance(made, Lane) else made
        if not isinstance(subject, Subject):
            raise ConfigError(f"the factory returned {made!r}, must return a Lane or a Subject")
        async with _started(subject) as started:
            yield started

    return make


def _delay() -> None:
    torch.cuda._sleep(SLOW_CYCLES)  # type: ignore[no-untyped-call]
