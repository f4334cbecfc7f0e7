"""An event loop whose time jumps to the next timer, so that real coroutines run in virtual time, exactly and at once.

Time stands still while anything can run. One instant goes like this:

1. Whatever is runnable runs, timers that are due included, until nothing is left.
2. All coroutines that wait for `VirtualClockLoop.settled` are released together; then 1 again.
3. When nothing is runnable and no coroutine waits so, time becomes the time of the earliest timer: that very float. All
   timers of that instant fire, in the order in which they were set.

In virtual time nothing comes from outside. Threads and file descriptors are not waited for and calls that need them are
refused. If nothing is runnable, no coroutine waits so and no timer is set, nothing will ever happen again: the loop
raises `DeadlockError` and does not hang. Two programs still run forever. One that sets a timer again and again keeps
time moving; an ``asyncio.timeout`` around it ends that. One that spins on ``asyncio.sleep(0)`` stops time.

It knows nothing of pipelines. What it hooks into is public: asyncio lets a loop be given its selector, whose ``select``
is called once a turn, with 0 when something is runnable and with None when there is nothing to wait for but the
outside. Timers are kept here and not by asyncio, whose own fire early by its clock's resolution.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import math
import selectors
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from typing import Any, NoReturn, TypeVar, TypeVarTuple

from rrfp.errors import DeadlockError

T = TypeVar("T")
Args = TypeVarTuple("Args")

#: (when, order of setting, handle, callback, arguments, context): the order makes the heap total, and ties first come,
#: first served.
_Timer = tuple[float, int, asyncio.TimerHandle, Callable[..., object], tuple[Any, ...], contextvars.Context]

#: Cancelled timers are swept out when there are this many timers, and again whenever as many as were left have joined.
_FIRST_SWEEP = 64


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` in virtual time, which begins at 0.

    Args:
        main: what to run.

    Returns:
        What it returns.

    Raises:
        DeadlockError: if it waits for something that will never happen; names what is pending.
    """
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose time jumps to the next timer.

    Args:
        start: the time at which it begins, in seconds.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._timers: list[_Timer] = []
        self._num_set = 0
        self._sweep_at = _FIRST_SWEEP
        self._waiters: list[asyncio.Future[None]] = []
        self._home = threading.get_ident()
        selector = _NothingOutside(self._turn)
        super().__init__(selector)
        selector.is_sealed = True  # what asyncio itself needed is registered

    def time(self) -> float:
        return self._now

    def settled(self) -> asyncio.Future[None]:
        """Wait until nothing else is runnable at this instant and no timer is due at it.

        All callers that wait at one instant are released together, in the order of the calls, before anything that
        one of them makes runnable.

        Returns:
            A future of the caller's own; cancelling it concerns no other caller.
        """
        waiter: asyncio.Future[None] = self.create_future()
        self._waiters.append(waiter)
        return waiter

    def call_at(
        self, when: float, callback: Callable[[*Args], object], *args: *Args, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """As the base class's; infinity never comes."""
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        if math.isnan(when):
            raise ValueError("when is not a number")
        when = float(when)
        context = contextvars.copy_context() if context is None else context
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if when < math.inf:
            if len(self._timers) >= self._sweep_at:
                self._sweep()
            heapq.heappush(self._timers, (when, self._num_set, handle, callback, args, context))
            self._num_set += 1
        return handle

    def run_forever(self) -> None:
        """Run until stopped, on this thread."""
        self._home = threading.get_ident()
        super().run_forever()

    def close(self) -> None:
        """Free everything. Timers that are set never fire."""
        super().close()
        self._timers.clear()
        self._waiters.clear()

    # What would let something in from outside.

    def call_soon_threadsafe(
        self, callback: Callable[[*Args], object], *args: *Args, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """As ``call_soon``; a call from another thread, at whatever virtual time, is refused."""
        if threading.get_ident() != self._home:
            _refuse("call_soon_threadsafe from another thread")
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Args], T], *args: *Args) -> asyncio.Future[T]:
        """Refused in virtual time; so is ``asyncio.to_thread``."""
        _refuse("run_in_executor")

    def add_signal_handler(self, sig: int, callback: Callable[[*Args], object], *args: *Args) -> None:
        """Refused in virtual time; Ctrl-C raises `KeyboardInterrupt` as everywhere."""
        _refuse("add_signal_handler")

    # Time.

    def _turn(self, timeout: float | None) -> None:
        """A turn begins; something is runnable already if ``timeout`` is 0."""
        if self._fire_due() or timeout == 0 or self._let_waiters_go():
            return
        if not self._timers:
            raise DeadlockError(self._report())
        self._now = self._timers[0][0]
        self._fire_due()

    def _fire_due(self) -> bool:
        """Make this instant's timers runnable; returns whether there were any."""
        timers, any_fired = self._timers, False
        while timers and (timers[0][0] <= self._now or timers[0][2].cancelled()):
            _, _, handle, callback, args, context = heapq.heappop(timers)
            if not handle.cancelled():
                self.call_soon(_fire, handle, callback, args, context=context)
                any_fired = True
        return any_fired

    def _let_waiters_go(self) -> bool:
        """Release the waiters of this instant; returns whether there were any."""
        waiters, self._waiters = self._waiters, []
        waiting = [waiter for waiter in waiters if not waiter.done()]
        for waiter in waiting:
            waiter.set_result(None)
        return bool(waiting)

    def _sweep(self) -> None:
        self._timers = [timer for timer in self._timers if not timer[2].cancelled()]
        heapq.heapify(self._timers)
        self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._timers))

    def _report(self) -> str:
        head = (
            f"deadlock at {self._now:g} s of virtual time: nothing is runnable and no timer is set "
            "(threads and file descriptors are not waited for); pending:"
        )
        return "\n".join([head, *sorted(f"  {_describe(task)}" for task in asyncio.all_tasks(self))])


class _NothingOutside(selectors.BaseSelector):
    """Watches nothing. Where a loop would wait for the operating system, ``turn`` is called."""

    def __init__(
        self,
        # Receives the time-out of every ``select``, in seconds.
        turn: Callable[[float | None], None],
    ) -> None:
        self._turn = turn
        self._keys: dict[Any, selectors.SelectorKey] = {}
        #: Whether further file descriptors are refused.
        self.is_sealed = False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Never blocks and never finds anything."""
        self._turn(timeout)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Keep a file descriptor without ever looking at it; refused once sealed."""
        if self.is_sealed:
            _refuse("waiting for a file descriptor")
        key = selectors.SelectorKey(fileobj, fileobj if isinstance(fileobj, int) else fileobj.fileno(), events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """What was registered."""
        return self._keys


def _fire(handle: asyncio.TimerHandle, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
    """A timer's turn, unless another callback of the same instant cancelled it."""
    if not handle.cancelled():
        callback(*args)


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(f"{what} has no place in virtual time: VirtualClockLoop waits for nothing but its own timers")


def _describe(task: asyncio.Task[Any]) -> str:
    coroutine = task.get_coro()
    name = getattr(coroutine, "__qualname__", type(coroutine).__name__)
    frames = task.get_stack(limit=1)
    where = f", {frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else ""
    return f"{task.get_name()} ({name}{where})"
