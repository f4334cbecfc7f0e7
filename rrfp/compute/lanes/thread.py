"""A lane for calls that are complete when they return: one daemon thread, fed by a queue.

The thread knows nothing of tasks. It is a daemon and never joined, so a hanging call cannot keep the process alive.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from rrfp.compute.lanes.base import Execution, Lane, OfferSlot, as_exception
from rrfp.compute.tracebacks import stack_of
from rrfp.plain import whole
from rrfp.threads import ending

T = TypeVar("T")

#: A call and its future; without a future the call is the lane's own.
_Call = tuple[Callable[[], Any], asyncio.Future[Any] | None]

#: The lowest priority of a thread on Linux.
LOWEST_NICE = 19


def lane_is_closed() -> bool:
    return threading.current_thread() in ending


class ThreadLane(Lane):
    """Runs calls on one daemon thread. Complete means returned, so ``depth`` is 1; it takes offers.

    The clock is ``time.monotonic()``, which the processes of one host share on Linux.

    Args:
        name: name of the thread.
        nice: 0..19, added to the thread's nice value on Linux (ignored elsewhere). If the event loop shares cores with
            computing threads, 10 keeps it fast: it wakes at once instead of after the lane's time slice. Threads that
            torch starts in a call inherit the value. Lowering it again needs privileges.
    """

    depth = 1
    #: Not a method of its own: each event of the core asks for the time.
    now = staticmethod(time.monotonic)

    def __init__(self, name: str = "rrfp-lane", *, nice: int = 0) -> None:
        self._name = name
        self._nice = whole("nice", nice, 0, LOWEST_NICE)
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self.offers: OfferSlot | None = OfferSlot()
        #: On the thread: the offered call that comes next.
        self._taken: _Call | None = None
        #: What is called when the lane is closed.
        self._last: _Call | None = None

    def start(self) -> None:
        if self._loop is not None:
            raise RuntimeError("the lane was started before")
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._serve, args=(self._loop,), name=self._name, daemon=True)
        self._thread.start()

    def enqueue(self, call: Callable[[], T]) -> asyncio.Future[Execution[T]]:
        """See :meth:`Lane.enqueue`; errors as `as_exception` makes them."""
        if self._loop is None or self._closed:
            raise RuntimeError(f"the lane is {'closed' if self._closed else 'not started'}")
        future: asyncio.Future[Execution[T]] = self._loop.create_future()
        self._calls.put((call, future))
        return future

    def stack(self) -> str:
        return "" if self._thread is None else stack_of(self._thread.ident)

    def core_wait(self) -> float | None:
        thread = None if self._thread is None else self._thread.native_id
        with suppress(OSError, ValueError, IndexError):
            return int(Path(f"/proc/self/task/{thread}/schedstat").read_bytes().split()[1]) / 1e9
        return None

    @property
    def is_over(self) -> bool:
        return self._closed and (self._thread is None or not self._thread.is_alive())

    def close(self, last: Callable[[], object] | None = None) -> None:
        """See :meth:`Lane.close` and `CopyLane.close`. May be called twice, and on any thread."""
        if last is not None and self._loop is not None and not self._closed:
            future: asyncio.Future[Any] = self._loop.create_future()
            future.add_done_callback(lambda done: done.exception())  # which nobody waits for
            self._last = last, future
        self._closed = True
        self._calls.put(None)
        if self.offers is not None:
            self.offers.withdraw()
        if self._thread is not None:
            ending.add(self._thread)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        _lower_priority(self._nice)
        while (item := self._next_call()) is not None:
            self._run(*item, loop)
            del item  # otherwise the last call and its closure would live until the next one
        if (item := self._last) is not None:
            self._last = None
            self._run(*item, loop)

    def _next_call(self) -> _Call | None:
        taken, self._taken = self._taken, None
        item = self._calls.get() if taken is None else taken
        return None if self._closed else item

    def _run(
        self, call: Callable[[], T], future: asyncio.Future[Execution[T]] | None, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Make one call and complete its future. No local of the call outlives it."""
        assert future is not None
        started = time.monotonic()
        execution: Execution[T] | None = None
        failure: Exception | None = None
        try:
            execution = Execution(call(), started, time.monotonic())
        except BaseException as error:
            failure = as_exception(error)
        else:
            self._take_offer()  # before the loop hears of the end, and withdraws it
        try:
            settle(loop, future, execution, failure)
        finally:
            # A failure's traceback holds this frame, so the frame must not hold the failure, nor the future with it.
            del call, future, execution, failure

    def _take_offer(self) -> None:
        """A call has returned: an offered one comes next if none is enqueued."""
        if self.offers is not None and self._calls.empty() and not self._closed:
            self._taken = self.offers.pop()


def settle(
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future[Execution[T]],
    execution: Execution[T] | None,
    failure: Exception | None,
) -> None:
    """Complete ``future`` on its loop. On any thread."""
    try:
        loop.call_soon_threadsafe(complete, future, execution, failure)
    except RuntimeError:
        if not loop.is_closed():
            raise
    finally:
        del future, execution, failure  # as in `ThreadLane._run`


def complete(future: asyncio.Future[Execution[T]], execution: Execution[T] | None, failure: Exception | None) -> None:
    """As `settle`, on the loop."""
    if future.done():  # cancelled in the meantime
        return
    if failure is not None:
        future.set_exception(failure)
    else:
        assert execution is not None
        future.set_result(execution)


def _lower_priority(nice: int) -> None:
    if nice == 0 or sys.platform != "linux":
        return
    thread = threading.get_native_id()  # on Linux priorities belong to threads, though the call speaks of processes
    os.setpriority(os.PRIO_PROCESS, thread, min(LOWEST_NICE, os.getpriority(os.PRIO_PROCESS, thread) + nice))
