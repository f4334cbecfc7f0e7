"""A lane without a thread: each call declares its duration, and a timer of the loop completes it.

On a loop with a virtual clock this is exact: a call that began at s and takes t ends at the float s + t, and no real
time passes. On any other loop it is as precise as the loop's timers. Calls run on the loop, so they must not block.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from rrfp.compute.lanes.base import Execution, Lane, OfferSlot, as_exception

T = TypeVar("T")


class TimerLane(Lane):
    """Runs each call when its turn comes, and is busy for as long as the call declares with `spend`.

    A call that declares nothing takes no time. Complete means that the time has passed, so ``depth`` is 1. The clock is
    the loop's.

    Args:
        takes_offers: whether it takes offers, as a lane on a thread does; see `Lane.offers`. In virtual time a loop is
            never late. Without offers each decision knows all that happened until then.
    """

    depth = 1

    def __init__(self, *, takes_offers: bool = False) -> None:
        self.offers = OfferSlot() if takes_offers else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._is_busy = False
        self._closed = False
        #: When the running call ends, by its declarations so far; None outside calls.
        self._until: float | None = None

    def start(self) -> None:
        if self._loop is not None:
            raise RuntimeError("the lane was started before")
        self._loop = asyncio.get_running_loop()

    def enqueue(self, call: Callable[[], T]) -> asyncio.Future[Execution[T]]:
        """See :meth:`Lane.enqueue`. A call that raises fails when the time that it has declared is over."""
        if self._loop is None or self._closed:
            raise RuntimeError(f"the lane is {'closed' if self._closed else 'not started'}")
        future: asyncio.Future[Execution[T]] = self._loop.create_future()
        self._calls.append((call, future))
        if not self._is_busy:
            self._is_busy = True
            self._loop.call_soon(self._begin)
        return future

    def spend(self, seconds: float) -> None:
        """Declare that the running call takes ``seconds``; several declarations add up."""
        if self._until is None:
            raise RuntimeError("spend() was called outside a call on the lane")
        if not seconds >= 0:
            raise ValueError(f"seconds is {seconds}, must be a number >= 0")
        self._until += seconds

    def now(self) -> float:
        """Seconds of the loop's clock; 0 before the start."""
        return 0.0 if self._loop is None else self._loop.time()

    def close(self) -> None:
        """See :meth:`Lane.close`. May be called twice."""
        self._closed = True
        self._calls.clear()
        if self.offers is not None:
            self.offers.withdraw()

    def _begin(self) -> None:
        assert self._loop is not None
        self._is_busy = bool(self._calls)
        if not self._is_busy:
            return
        call, future = self._calls.popleft()
        started = self._until = self._loop.time()
        result, failure = None, None
        try:
            result = call()
        except (KeyboardInterrupt, SystemExit):  # this is the loop's thread, so they must end the loop
            raise
        except BaseException as error:
            failure = as_exception(error)
        ended, self._until = self._until, None
        self._end_at(ended, partial(self._complete, future, result, failure, started))
        del call, future, result, failure  # a failure's traceback holds this frame, so the frame must not hold it

    def _end_at(self, ended: float, complete: Callable[[], None]) -> None:
        assert self._loop is not None
        self._loop.call_at(ended, complete)

    def _complete(self, future: asyncio.Future[Any], result: Any, failure: Exception | None, started: float) -> None:
        assert self._loop is not None
        if failure is None:
            self._take_offer()
        if not future.done():  # else it was cancelled in the meantime
            if failure is not None:
                future.set_exception(failure)
            else:
                future.set_result(Execution(result, started, self._loop.time()))
        self._begin()

    def _take_offer(self) -> None:
        """An offered call comes next if none is enqueued."""
        if self.offers is not None and not self._calls and not self._closed and (taken := self.offers.pop()):
            self._calls.append(taken)
