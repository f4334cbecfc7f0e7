"""A loop in its own thread, so that the caller's code cannot delay receiving, heartbeats or an abort."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from rrfp import timeouts
from rrfp.log import get_logger
from rrfp.plain import one_of

logger = get_logger(__name__)

T = TypeVar("T")

#: ``"own"``: a loop in its own thread. ``"caller"``: the loop that enters the pipeline (async only).
LoopChoice = Literal["own", "caller"]


def check_loop(loop: LoopChoice) -> None:
    one_of(get_args(LoopChoice), "loop", loop)


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


def begin(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], outcome: Future[T]) -> None:
    """Run ``coroutine`` on ``loop``, this thread's; cancelling ``outcome``, on any thread, cancels it."""
    task = loop.create_task(coroutine)
    task.add_done_callback(partial(_pass_on, outcome))
    outcome.add_done_callback(partial(_pass_on_cancelling, loop, task))


def _pass_on(outcome: Future[T], task: asyncio.Task[T]) -> None:
    """Complete ``outcome`` as ``task`` did, unless that was given up before."""
    error = None if task.cancelled() else task.exception()  # read in any case, or asyncio would log that no one has
    with suppress(InvalidStateError):
        if task.cancelled():
            outcome.cancel()
        elif error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(task.result())


def _pass_on_cancelling(loop: asyncio.AbstractEventLoop, task: asyncio.Task[T], outcome: Future[T]) -> None:
    if outcome.cancelled():
        with suppress(RuntimeError):  # the loop has ended, and its tasks with it
            loop.call_soon_threadsafe(task.cancel)


class AwaitedFutures:
    """Futures that are not complete, which fail should the loop run no more. Methods may be called on any thread.

    Each future refers to this object, and a result that a caller keeps to its future: so nothing here may refer to the
    pipeline.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: set[Future[Any]] = set()
        self._error: BaseException | None = None

    def add(self, future: Future[Any]) -> None:
        """Fail ``future`` should the loop run no more, or if it does not already."""
        with self._lock:
            error = self._error
            if error is None:
                self._pending.add(future)
        if error is not None:
            _fail(future, error)
        future.add_done_callback(self._forget)

    def fail(self, error: BaseException) -> None:
        """The loop does not run any more: all of them fail with ``error``. Later ones too, with the first error."""
        with self._lock:
            self._error = self._error or error
            pending = list(self._pending)
        for future in pending:
            _fail(future, error)

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._pending.discard(future)


def _fail(future: Future[Any], error: BaseException) -> None:
    with suppress(InvalidStateError):  # it completed meanwhile
        future.set_exception(error)
