"""The arbiter coroutine: hands the lane what the core decides, whenever something has happened.

It knows no policy. Whoever reports an event to the core calls `kick`; the arbiter then asks the core until the lane is
full or nothing is ready. Events that arrive together are all applied before it asks, because it only runs once the
callbacks and coroutines that were runnable before it have had their turn. On a loop with a virtual clock it moreover
waits until nothing else is runnable at that instant, so that everything which happens at one instant counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, runtime_checkable

from rrfp.core.stage_core import StageCore
from rrfp.core.tasks import Task
from rrfp.core.usage import WaitCause


@runtime_checkable
class SettlingLoop(Protocol):
    """An event loop that can tell when an instant is over, as `rrfp.sim.virtual.clock.VirtualClockLoop` can."""

    def settled(self) -> Awaitable[None]:
        """Wait until nothing else is runnable now."""
        ...


class Arbiter:
    """Dispatches the tasks of one stage.

    Args:
        core: decides.
        depth: how many tasks may be enqueued and not complete.
        dispatch: hands a task to the lane and reports `Enqueued` to the core.
        waiting: told the cause each time the lane is left with nothing to do.
    """

    def __init__(
        self, core: StageCore, depth: int, dispatch: Callable[[Task], None], waiting: Callable[[WaitCause], None]
    ) -> None:
        self._core = core
        self._depth = depth
        self._dispatch = dispatch
        self._waiting = waiting
        self._kicked = asyncio.Event()

    def kick(self) -> None:
        """Something happened: decide soon."""
        self._kicked.set()

    def decide(self) -> None:
        """Dispatch what is ready now, and what follows from that: what `run` does at one instant, without a loop."""
        self.kick()
        while self._kicked.is_set():
            self._kicked.clear()
            self._dispatch_ready()

    async def run(self, settled: Callable[[], Awaitable[None]] | None = None) -> None:
        """Dispatch until cancelled.

        Args:
            settled: awaited before each decision; returns when all that happens at this instant has been applied. None
                on a loop whose time passes by itself, where there is no such moment.
        """
        while True:
            await self._kicked.wait()
            if settled is not None:
                await settled()
            self._kicked.clear()
            self._dispatch_ready()

    def _dispatch_ready(self) -> None:
        """Fill the lane with what is ready now."""
        while len(self._core.in_flight) < self._depth:
            decision = self._core.decide()
            if decision is None:
                break
            self._dispatch(decision.task)
        if not self._core.in_flight:
            self._waiting(self._core.wait_cause())
