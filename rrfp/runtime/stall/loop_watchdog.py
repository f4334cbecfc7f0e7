"""Prints the stacks of a process whose own event loop does not run.

The loop sets a beat. When it misses it for too long, a thread logs the Python stacks of all threads, by name. A call
that keeps the interpreter's lock stops that thread too; then `faulthandler`'s timer, which needs no lock, prints the
stacks to the standard error stream. A process has one such timer, and Python cannot report whether it is in use: so
the caller can forbid its use.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from rrfp.compute.tracebacks import all_stacks
from rrfp.core import timeouts
from rrfp.log import get_logger

logger = get_logger(__name__)

#: Beats in the time that may pass without one.
_BEATS = 4

#: The file descriptor of the standard error stream.
_STDERR = 2


class _StackTimer:
    """Shares the one timer of the process among the loops of it: it fires for the first that is late."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: dict[int, float] = {}

    def set(self, user: int, due: float) -> None:
        """Fire at ``due``, a time of ``time.monotonic()``, unless ``user`` sets another time before."""
        with self._lock:
            self._due[user] = due
            self._arm()

    def drop(self, user: int) -> None:
        """Do not fire for ``user``."""
        with self._lock:
            if self._due.pop(user, None) is not None:
                self._arm()

    def _arm(self) -> None:
        now = time.monotonic()
        to_come = [due for due in self._due.values() if due > now]  # it has fired for the others
        if to_come:
            with suppress(ValueError, OSError, RuntimeError):  # no such stream, or no further thread
                faulthandler.dump_traceback_later(min(to_come) - now, file=_STDERR)
        else:
            faulthandler.cancel_dump_traceback_later()

    def forget(self) -> None:
        """In a forked child nothing of it is there."""
        self._lock = threading.Lock()
        self._due = {}


_timer = _StackTimer()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_timer.forget)


class LoopWatchdog:
    """Watches the loop that `start` is called on.

    Args:
        name: the display names of the ranks that run there.
        limit: seconds without a beat after which stacks are printed; at least `ANSWER_S`.
        use_timer: print with `faulthandler`'s timer where the interpreter's lock is not free.
        abort_after: seconds without a beat after which `give_up` is called; None: never.
        matters: whether a loop that does not run is a problem now; called on another thread.
        give_up: called with the seconds for which the loop has not run, on another thread.
        stalled: called with one line that says so, on another thread.
    """

    def __init__(
        self,
        name: str,
        limit: float,
        *,
        use_timer: bool = True,
        abort_after: float | None = None,
        matters: Callable[[], bool] = lambda: True,
        give_up: Callable[[float], None] = lambda seconds: None,
        stalled: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._name = name
        self._limit = max(limit, timeouts.ANSWER_S)
        self._use_timer = use_timer
        self._abort_after = abort_after
        self._matters = matters
        self._give_up = give_up
        self._stalled = stalled
        self._pause = self._limit / _BEATS
        self._beat_at = 0.0
        self._loop_thread = 0
        self._beating: asyncio.Task[None] | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rrfp-loop-watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._loop_thread = threading.get_ident()
        self._beat()
        self._beating = asyncio.create_task(self._beat_on(), name="rrfp-beat")
        self._thread.start()

    def close(self) -> None:
        """End; never waits. May be called twice, and on any thread; on the loop's own the beat ends at once."""
        self._done.set()
        _timer.drop(id(self))
        if self._beating is not None and threading.get_ident() == self._loop_thread:
            self._beating.cancel()

    def _beat(self) -> None:
        self._beat_at = time.monotonic()
        if self._use_timer and not self._done.is_set():
            _timer.set(id(self), self._beat_at + self._limit + timeouts.ANSWER_S)

    async def _beat_on(self) -> None:
        try:
            while True:
                await asyncio.sleep(self._pause)
                self._beat()
        finally:  # the loop ends too: a loop that ran again after it was given up is closed without a call of `close`
            self._done.set()
            _timer.drop(id(self))

    # On the thread.

    def _watch(self) -> None:
        logged = given_up_on = looked_at = 0.0
        while not self._done.wait(self._pause):
            now, beat_at = time.monotonic(), self._beat_at
            # If this thread overslept too, the whole process stood still, and the loop gets its chance first.
            overslept, looked_at = now - looked_at > 2 * self._pause and looked_at > 0, now
            if overslept or not self._matters():
                continue
            if now - beat_at >= self._limit and beat_at != logged:
                logged = beat_at
                self._log(now - beat_at)
            if self._abort_after is not None and now - beat_at >= self._abort_after and beat_at != given_up_on:
                given_up_on = beat_at
                self._give_up(now - beat_at)

    def _log(self, seconds: float) -> None:
        text = f"{self._name} (pid {os.getpid()}): its event loop has not run for {seconds:.1f} s"
        logger.error("%s; the Python stacks of its threads:\n%s", text, all_stacks(self._loop_thread))
        self._stalled(text)
        _timer.drop(id(self))  # logged; the next beat sets it anew
