"""Drives an arbiter on an event loop.

Events that arrive together are all applied before it decides, because it only runs once the callbacks and coroutines
that were runnable before it have had their turn. On a loop with a virtual clock it also waits until nothing else is
runnable at that instant, so that everything which happens at one instant counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, runtime_checkable

from rrfp.arbiter.arbiter import Arbiter


@runtime_checkable
class SettlingLoop(Protocol):
    """An event loop that can tell when an instant is over, as `rrfp.lab.virtual_clock.VirtualClockLoop` can."""

    def settled(self) -> Awaitable[None]:
        """Wait until nothing else is runnable now."""
        ...


async def run_arbiter(arbiter: Arbiter, settled: Callable[[], Awaitable[None]] | None = None) -> None:
    """Let ``arbiter`` decide whenever that is due, until cancelled.

    ``settled`` is awaited before each decision: it returns when all that happens at this instant has been applied. None
    on a loop whose time passes by itself, where there is no such moment.
    """
    kicked = asyncio.Event()
    arbiter.on_kick = kicked.set
    if arbiter.is_due:
        kicked.set()
    while True:
        await kicked.wait()
        if settled is not None:
            await settled()
        kicked.clear()
        arbiter.decide_once()
