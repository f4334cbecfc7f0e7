"""A loop in its own thread, so that the caller's code cannot delay receiving, heartbeats or an abort."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from rrfp import timeouts
from rrfp.errors import ConfigError
from rrfp.log import get_logger

logger = get_logger(__name__)

T = TypeVar("T")

#: ``"own"``: a loop in its own thread. ``"caller"``: the loop that enters the pipeline (async only).
LoopChoice = Literal["own", "caller"]


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's loop where it is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class LoopThread:
    """Owns a loop and the daemon thread ``name``, which runs it."""

    def __init__(self, name: str) -> None:
        self.loop = new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run ``coroutine`` on the loop; cancelling the future cancels it. Called on any thread."""
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        self.loop.call_soon_threadsafe(self._begin, coroutine, outcome)
        return outcome

    def _begin(self, coroutine: Coroutine[Any, Any, T], outcome: concurrent.futures.Future[T]) -> None:
        task = self.loop.create_task(coroutine)
        task.add_done_callback(partial(_pass_on, outcome))
        outcome.add_done_callback(partial(self._pass_on_cancelling, task))

    def _pass_on_cancelling(self, task: asyncio.Task[T], outcome: concurrent.futures.Future[T]) -> None:
        if outcome.cancelled():
            with suppress(RuntimeError):  # the loop has ended, and its tasks with it
                self.loop.call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        """Stop the loop, cancel its tasks and join the thread.

        A callback that never ends (a hint in an endless loop) is left running after `JOIN_S`: the thread is a daemon
        and does not keep the process from ending.
        """
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(timeouts.JOIN_S)
            if self._thread.is_alive():
                logger.warning("thread %s does not end: something blocks its loop", self._thread.name)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            pending = asyncio.all_tasks(self.loop)
            for task in pending:
                task.cancel()
            if pending:
                self.loop.run_until_complete(asyncio.wait(pending))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()


def _pass_on(outcome: concurrent.futures.Future[T], task: asyncio.Task[T]) -> None:
    """Complete ``outcome`` as ``task`` did, unless that was given up before."""
    error = None if task.cancelled() else task.exception()  # read in any case, or asyncio would log that no one has
    with suppress(concurrent.futures.InvalidStateError):
        if task.cancelled():
            outcome.cancel()
        elif error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(task.result())


def check_loop(loop: LoopChoice) -> None:
    """Refuse a ``loop`` that is none of its values."""
    if loop not in get_args(LoopChoice):
        raise ConfigError(f"loop is {loop!r}, must be one of: {', '.join(get_args(LoopChoice))}")
