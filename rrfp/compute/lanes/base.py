"""The contract of a lane: where a rank computes.

A lane runs one task at a time, in the order in which tasks were enqueued. Enqueued and complete are two moments: on a
CPU lane a task is complete when its call returns; on a CUDA lane the call only puts kernels on a stream, and the task
is complete when the stream has run them. So a task that depends on another one *on the same lane* may be enqueued
behind it at once, while a result that leaves the rank waits for completion.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rrfp.errors import StageError
from rrfp.model.record import record

if TYPE_CHECKING:
    from torch import Tensor

    from rrfp.devices.base import Device


T = TypeVar("T")


@record
class Execution(Generic[T]):
    """A completed call.

    Attributes:
        result: the return value of the call.
        started: when the lane began the call's work, seconds of the lane's clock.
        ended: when that work was complete, on the same clock.
        launched: when the call returned, on the same clock, if its work went on afterwards; else None.
    """

    result: T
    started: float
    ended: float
    launched: float | None = None


class Lane(ABC):
    """Runs the calls of one rank, one at a time, in the order in which they were enqueued.

    All calls run on one thread. A call begins when the one before it *returned*, which may be before that one is
    complete. A call may therefore use what an earlier call left in the rank's memory (a saved graph, an output for the
    next chunk), but must look it up when it runs: the earlier call's future gets its result only on completion.

    Attributes:
        depth: how many tasks may be enqueued and not complete. 1 if the lane is free only after completion.
        device: the device on whose stream its work runs; None on a CPU.
        offers: where the loop may put a call that the lane makes next, without waiting for the loop; None if the lane
            takes none, as with a depth of 2 or more, where the next call is enqueued already. When a call has returned,
            and not raised, and no further one is enqueued, an open lane takes the offered one out of the slot, and
            makes it.
    """

    depth: int = 1
    device: Device | None = None
    offers: OfferSlot | None = None

    @abstractmethod
    def start(self) -> None:
        """Start the lane. Called once, on the event loop of all later futures."""

    @abstractmethod
    def enqueue(self, call: Callable[[], T]) -> asyncio.Future[Execution[T]]:
        """Run a call after all calls enqueued before it. Called on the loop of `start`.

        Args:
            call: a function without arguments.

        Returns:
            A future that gets the result, or fails with the exception that ``call`` raised. The lane never cancels it,
            and cancelling it does not stop the call.
        """

    @abstractmethod
    def now(self) -> float:
        """The lane's clock in seconds; comparable between the ranks of one host."""

    def fence(self) -> None:  # noqa: B027 - optional
        """Run calls enqueued from now on behind the work that the calling thread has issued to the lane's device.

        Called on the caller's thread before each step, so that a step sees the inputs and parameters that its caller
        has computed. Where calls are complete when they return, there is nothing to do.
        """

    def adopt(self, tensors: Iterable[Tensor]) -> None:  # noqa: B027 - optional
        """Use ``tensors``, which other threads or streams have allocated, in this call and later ones.

        Called on the lane's thread, inside a call. Their memory is not reused before the calls that were issued when
        the last reference is dropped are complete.

        Args:
            tensors: on any device; those on another one than the lane's are left alone.
        """

    def hand_over(self, tensors: Iterable[Tensor]) -> None:  # noqa: B027 - optional
        """Let the caller use ``tensors``, which calls of the lane have made, during later calls.

        Called on the caller's thread. Their memory is not reused before the work that the caller has issued when it
        drops the last reference is complete.

        Args:
            tensors: as for `adopt`.
        """

    def stack(self) -> str:
        """The Python stack of the running call, for reports; empty if none runs. Called on any thread."""
        return ""

    def core_wait(self) -> float | None:
        """Seconds since `start` for which the thread of the calls could run and had no core; None where unknown."""
        return None

    @property
    def is_over(self) -> bool:
        """Whether a closed lane runs no call any more, and its device has completed their work. Read on any thread.

        By default False: the lane does not know.
        """
        return False

    @abstractmethod
    def close(self) -> None:
        """Start no further call, offered ones included, without waiting for a running one.

        Futures of calls not begun stay pending.
        """


def as_exception(error: BaseException) -> Exception:
    """The exception for the future of a call that raised ``error``.

    That is ``error`` itself, or a :class:`StageError` caused by it: asyncio refuses ``StopIteration`` in a future, and
    an exception that is no ``Exception`` (``SystemExit``, ``CancelledError``) would stop the loop or the waiting task.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = StageError(f"the stage program raised {type(error).__name__}: {error}".removesuffix(": "))
    wrapped.__cause__ = error
    return wrapped


OfferT = TypeVar("OfferT")


class OfferSlot:
    """Holds one call at most. See `Lane.offers` for when a lane takes it."""

    def __init__(self) -> None:
        self._offered: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()

    def offer(self, call: Callable[[], OfferT]) -> asyncio.Future[Execution[OfferT]]:
        """Let the lane make a call when the running one has returned. Called on the loop of the lane's `start`.

        Args:
            call: a function without arguments.

        Returns:
            A future as `Lane.enqueue` returns it. It stays pending if the call is withdrawn, or never made.

        Raises:
            RuntimeError: if a call is offered already.
        """
        if self._offered:
            raise RuntimeError("a call is offered already, which must be withdrawn first")
        future: asyncio.Future[Execution[OfferT]] = asyncio.get_running_loop().create_future()
        self._offered.append((call, future))
        return future

    def withdraw(self) -> bool:
        """Take the offered call back.

        Returns:
            False if there is none: after an `offer` that means that the lane has begun the call, or is about to.
        """
        return self.pop() is not None

    def pop(self) -> tuple[Callable[[], Any], asyncio.Future[Any]] | None:
        """For the lane, on any thread: the offered call with its future, which is offered no more; None without one."""
        try:
            return self._offered.popleft()
        except IndexError:
            return None
