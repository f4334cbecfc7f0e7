"""The coroutines of one rank, in one TaskGroup: none is forgotten, and no exception is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from rrfp.errors import LocalError
from rrfp.model.tasks import Task

Background = Coroutine[Any, Any, None]


class TaskSupervisor:
    """Runs coroutines until stopped; an exception of one goes to ``on_error`` instead of ending the others.

    ``on_error`` must not raise. It is called with the exception, unless that was raised while stopping, and with the
    task that the coroutine is for.
    """

    def __init__(self, on_error: Callable[[BaseException, Task | None], None]) -> None:
        self._on_error = on_error
        self._stopping = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._spawned: set[asyncio.Task[None]] = set()
        self._serving: asyncio.Task[None] | None = None

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    async def start(self, *permanent: Background) -> None:
        """Run ``permanent`` until stopped; `spawn` works from here on."""
        entered = asyncio.Event()
        self._serving = asyncio.create_task(self._serve(permanent, entered))
        await entered.wait()

    def spawn(self, coroutine: Background, task: Task | None = None) -> None:
        """Run ``coroutine``, which is for ``task``, beside the others; dropped unless running."""
        if self._group is None or self._stopping.is_set():
            coroutine.close()
            return
        self._spawned.add(self._launch(self._group, coroutine, task))

    async def stop(self) -> None:
        """End the permanent coroutines; returns when the spawned ones have ended."""
        self._stopping.set()
        if self._serving is not None:
            await self._serving

    def cancel(self) -> None:
        self._stopping.set()
        for spawned in self._spawned:
            spawned.cancel()

    async def _serve(self, permanent: tuple[Background, ...], entered: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            running = [self._launch(group, coroutine) for coroutine in permanent]
            entered.set()
            await self._stopping.wait()
            for each in running:
                each.cancel()
        self._group = None

    def _launch(self, group: asyncio.TaskGroup, coroutine: Background, task: Task | None = None) -> asyncio.Task[None]:
        launched = group.create_task(self._guard(coroutine, task))
        launched.add_done_callback(partial(self._ended, coroutine))
        return launched

    def _ended(self, coroutine: Background, launched: asyncio.Task[None]) -> None:
        self._spawned.discard(launched)
        # Cancelled before its first turn, the guard never awaits the coroutine; closing one that ended does nothing.
        coroutine.close()

    async def _guard(self, coroutine: Background, task: Task | None) -> None:
        try:
            await coroutine
        except BaseException as error:
            if (failure := failure_on_loop(error)) is None:
                raise
            if not self._stopping.is_set():
                self._on_error(failure, task)


def failure_on_loop(error: BaseException) -> BaseException | None:
    """The failure of the pipeline that ``error``, just raised on the loop, is; None where it only ends a coroutine.

    Plugged-in code, such as a hint, may raise anything: SystemExit would end the loop, and CancelledError the coroutine
    that called it, without a word.
    """
    if isinstance(error, GeneratorExit):
        return None
    if not isinstance(error, asyncio.CancelledError):
        return error
    current = asyncio.current_task()
    is_cancelled = current is not None and current.cancelling() > 0
    return None if is_cancelled else LocalError("plugged-in code raised CancelledError on the loop")
