"""Makers of the lanes that come with RRFP, and of those that a factory makes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import torch

from rrfp.compute.lanes.base import Lane
from rrfp.compute.lanes.stream import StreamLane
from rrfp.compute.lanes.thread import ThreadLane
from rrfp.devices.cuda import CudaDevice
from rrfp.errors import ConfigError
from rrfp.testing.lane_checks.subject import MakeLane, Subject

#: A lane in front of a device is checked at these depths.
DEPTHS = (1, 2, 3)

#: Cycles of a GPU's clock that take longer than 20 ms on any.
SLOW_CYCLES = 100_000_000


@asynccontextmanager
async def started_lane(subject: Subject) -> AsyncIterator[Subject]:
    """Start the lane of ``subject``, and close it in the end."""
    subject.lane.start()
    try:
        yield subject
    finally:
        subject.lane.close()


@asynccontextmanager
async def thread_lane() -> AsyncIterator[Subject]:
    """The lane of a rank on a CPU."""
    async with started_lane(Subject(ThreadLane())) as subject:
        yield subject


def cuda_lane(depth: int = 2) -> MakeLane:
    """The lane in front of a device, over a GPU; a ConfigError if there is none."""
    if not torch.cuda.is_available():
        raise ConfigError("lane is 'cuda', but torch finds no CUDA device here; 'double' needs none")

    @asynccontextmanager
    async def make() -> AsyncIterator[Subject]:
        device = CudaDevice()
        lane = StreamLane(device, depth=depth)
        async with started_lane(Subject(lane, device=device, delay=_delay)) as subject:
            yield subject

    return make


def thread_lanes() -> Mapping[str, MakeLane]:
    """The lane of a rank on a CPU."""
    return {"": thread_lane}


def cuda_lanes() -> Mapping[str, MakeLane]:
    """Lanes over a GPU, one for each depth; a ConfigError if there is none."""
    return {f" (depth {depth})": cuda_lane(depth) for depth in DEPTHS}


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
        async with started_lane(subject) as started:
            yield started

    return make


def _delay() -> None:
    torch.cuda._sleep(SLOW_CYCLES)  # type: ignore[no-untyped-call]
