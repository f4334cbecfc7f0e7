"""The arbiter on an event loop: it decides when it is kicked, and takes in first all that has happened."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from arbiter.test_arbiter import Lane
from core_script import Script

from rrfp.arbiter.loop import run_arbiter
from rrfp.model.graph import TaskGraph


@asynccontextmanager
async def running(lane: Lane) -> AsyncIterator[None]:
    task = asyncio.create_task(run_arbiter(lane.arbiter))
    try:
        await turns()
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled()


async def turns() -> None:
    """Let whatever can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_it_decides_nothing_before_something_happened() -> None:
    lane = Lane(Script(TaskGraph.chain(1)))
    async with running(lane):
        assert (lane.started, lane.waits) == ([], [])
        lane.arbiter.kick()
        await turns()
        assert (lane.started, lane.waits) == (["F0@0"], [])


async def test_a_kick_before_the_loop_runs_is_not_lost() -> None:
    lane = Lane(Script(TaskGraph.chain(1)))
    lane.arbiter.kick()
    async with running(lane):
        assert lane.started == ["F0@0"]


async def test_events_that_come_together_are_all_applied_before_it_decides() -> None:
    """F1 is heard of first, and F0 goes first: the decision waits until both callbacks have had their turn."""
    lane = Lane(Script(TaskGraph.chain(2), stage=1))
    async with running(lane):
        loop = asyncio.get_running_loop()
        loop.call_soon(lane.arrived, "F1@0")
        loop.call_soon(lane.arrived, "F0@0")
        await turns()
        assert lane.started == ["F0@1"]
