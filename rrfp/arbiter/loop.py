"""Drives an arbiter on an event loop.

Events that arrive together are all applied before it decides, because it only runs once the callbacks and coroutines
that were runnable before it have had their turn. On a loop with a virtual clock it also waits until nothing else is
runnable at that instant, so that everything which happens at one instant counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from rrfp.arbiter.arbiter import Arbiter, ignore_kick


@dataclass(frozen=True, slots=True)
class LoopTime:
    """The time of an event loop: real, or virtual as that of `rrfp.lab.virtual_clock.VirtualClockLoop`."""

    #: Waits until nothing else is runnable at this instant; None in real time, which passes by itself.
    settled: Callable[[], Awaitable[None]] | None = None

    @classmethod
    def of_running_loop(cls) -> LoopTime:
        """The time of the loop that runs in this thread: virtual if the loop has a method ``settled``."""
        return cls(getattr(asyncio.get_running_loop(), "settled", None))

    @property
    def is_virtual(self) -> bool:
        """Whether the clock jumps to the next timer, and nothing but the loop's callbacks happens in it."""
        return self.settled is not None


async def run_arbiter(arbiter: Arbiter, settled: Callable[[], Awaitable[None]] | None = None) -> None:
    """Let ``arbiter`` decide whenever that is due, until cancelled.

    ``settled`` is awaited before each decision: it returns when all that happens at this instant has been applied. None
    on a loop whose time passes by itself, where there is no such moment.
    """
    decisions = _in_callbacks(arbiter) if settled is None else _when_settled(arbiter, settled)
    try:
        await decisions
    finally:
        arbiter.on_kick = ignore_kick


async def _in_callbacks(arbiter: Arbiter) -> None:
    """Decide in callbacks of the loop: a task that is woken for each decision costs several times as much."""
    loop = asyncio.get_running_loop()
    failed: asyncio.Future[None] = loop.create_future()

    def decide() -> None:
        if failed.done():  # or cancelled
            return
        try:
            arbiter.decide_once()
        except StopIteration as error:  # which no future may carry; in a coroutine it would be this error too
            failure = RuntimeError("plugged-in code raised StopIteration")
            failure.__cause__ = error
            failed.set_exception(failure)
        except BaseException as error:  # SystemExit of a hint would end the loop here
            failed.set_exception(error)

    arbiter.on_kick = partial(loop.call_soon, decide)
    if arbiter.is_due:
        arbiter.on_kick()
    await failed


async def _when_settled(arbiter: Arbiter, settled: Callable[[], Awaitable[None]]) -> None:
    kicked = asyncio.Event()
    arbiter.on_kick = kicked.set
    if arbiter.is_due:
        kicked.set()
    while True:
        await kicked.wait()
        await settled()
        kicked.clear()
        arbiter.decide_once()
