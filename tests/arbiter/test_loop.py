"""The arbiter over a real core: it takes in all that has happened, fills the lane, and says why it is left empty."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from core_script import Script, T

from rrfp.arbiter.loop import Arbiter
from rrfp.core.graph import Graph
from rrfp.core.tasks import Task
from rrfp.core.usage import WaitCause


class Lane:
    """A lane that takes tasks and completes none by itself."""

    def __init__(self, script: Script, depth: int = 1) -> None:
        self.script = script
        self.started: list[str] = []
        self.waits: list[WaitCause] = []
        self.arbiter = Arbiter(script.core, depth, self._dispatch, self.waits.append)

    def _dispatch(self, task: Task) -> None:
        self.script.enqueued(str(task))
        self.started.append(str(task))

    def arrived(self, task: str) -> None:
        self.script.arrived(task)
        self.arbiter.kick()

    def completed(self, task: str) -> None:
        self.script.completed(task)
        self.arbiter.kick()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.arbiter.run())
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
    lane = Lane(Script(Graph.chain(1)))
    async with lane.running():
        assert (lane.started, lane.waits) == ([], [])
        lane.arbiter.kick()
        await turns()
        assert (lane.started, lane.waits) == (["F0@0"], [])


async def test_it_keeps_as_many_tasks_enqueued_as_the_lane_is_deep() -> None:
    lane = Lane(Script(Graph.chain(1), microbatches=3), depth=2)
    async with lane.running():
        lane.arbiter.kick()
        await turns()
        assert lane.started == ["F0@0", "B0@0"]
        lane.completed("F0@0")
        await turns()
        assert lane.started == ["F0@0", "B0@0", "F1@0"]
    assert lane.script.core.in_flight == (T("B0@0"), T("F1@0"))


async def test_events_that_come_together_are_all_applied_before_it_decides() -> None:
    """F1 is heard of first, and F0 goes first: the decision waits until both callbacks have had their turn."""
    lane = Lane(Script(Graph.chain(2), stage=1))
    async with lane.running():
        loop = asyncio.get_running_loop()
        loop.call_soon(lane.arrived, "F1@0")
        loop.call_soon(lane.arrived, "F0@0")
        await turns()
        assert lane.started == ["F0@1"]


async def test_it_tells_the_cause_when_the_lane_is_left_empty_and_only_then() -> None:
    lane = Lane(Script(Graph.chain(2), limit=1))
    async with lane.running():
        lane.arbiter.kick()
        await turns()
        assert (lane.started, lane.waits) == (["F0@0"], [])
        lane.completed("F0@0")
        await turns()
        assert lane.waits == [WaitCause.MEMORY]
        lane.arrived("B0@1")
        await turns()
        assert (lane.started, lane.waits) == (["F0@0", "B0@0"], [WaitCause.MEMORY])
