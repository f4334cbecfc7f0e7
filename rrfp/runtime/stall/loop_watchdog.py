"""Prints the stacks of a process whose own event loop does not run.

The loop sets a beat. When it misses it for too long, a thread logs the Python stacks of all threads, by name. A call
that keeps the interpreter's lock stops that thread too; then a second process has them printed to the standard error
stream, see `kept_lock`.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from rrfp import timeouts
from rrfp.compute.tracebacks import all_stacks
from rrfp.log import get_logger
from rrfp.runtime.stall.kept_lock import LockWatch

logger = get_logger(__name__)

#: Beats in the time that may pass without one.
_BEATS = 4


class LoopWatchdog:
    """Watches the loop that `start` is called on; its thread calls ``matters``, ``give_up`` and ``stalled``.

    Stacks are printed after ``limit`` seconds without a beat (`ANSWER_S` at least), ``give_up`` is called after
    ``abort_after``, while the loop ``matters``. Whatever the loop does, the thread wakes up ``awake_every`` so often.
    """

    def __init__(
        self,
        name: str,
        limit: float,
        *,
        awake_every: float = math.inf,
        watch_lock: bool = False,
        abort_after: float | None = None,
        matters: Callable[[], bool] = lambda: True,
        give_up: Callable[[float], None] = lambda seconds: None,
        stalled: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._name = name
        self._limit = max(limit, timeouts.ANSWER_S)
        self._abort_after = abort_after
        self._matters = matters
        self._give_up = give_up
        self._stalled = stalled
        self._pause = min(self._limit / _BEATS, awake_every)
        self._lock_watch = LockWatch(name, self._pause, self._limit + timeouts.ANSWER_S) if watch_lock else None
        self._beat_at = 0.0
        self._loop_thread = 0
        self._beating: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rrfp-loop-watch", daemon=True)

    def start(self) -> None:
        self._loop_thread, self._loop = threading.get_ident(), asyncio.get_running_loop()
        self._beat()
        self._thread.start()
        self._beating = asyncio.create_task(self._beat_on(), name="rrfp-beat")

    async def close(self) -> None:
        """End, and wait until the thread and the second process have, `JOIN_S` at most."""
        self._done.set()
        if self._beating is not None:
            self._beating.cancel()
            with suppress(TimeoutError):  # a handler of the log may block the thread
                async with asyncio.timeout(timeouts.JOIN_S):
                    await self._over.wait()

    def _beat(self) -> None:
        self._beat_at = time.monotonic()

    async def _beat_on(self) -> None:
        try:
            while True:
                await asyncio.sleep(self._pause)
                self._beat()
        finally:  # the loop ends too: a loop that ran again after it was given up is closed without a call of `close`
            self._done.set()

    # On the thread.

    def _watch(self) -> None:
        try:
            self._watch_on()
        finally:
            if self._lock_watch is not None:
                self._lock_watch.close()
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._over.set)

    def _watch_on(self) -> None:
        logged = given_up_on = 0.0
        looked_at = time.monotonic()
        if not self._done.is_set():
            self._beat_of_lock()
        while not self._done.wait(self._pause):
            self._beat_of_lock()
            now, beat_at = time.monotonic(), self._beat_at
            # If this thread overslept too, the whole process stood still, and the loop gets its chance first.
            overslept, looked_at = now - looked_at > self._limit / 2, now
            if overslept or not self._matters():
                continue
            if now - beat_at >= self._limit and beat_at != logged:
                logged = beat_at
                self._log(now - beat_at)
            if self._abort_after is not None and now - beat_at >= self._abort_after and beat_at != given_up_on:
                given_up_on = beat_at
                self._give_up(now - beat_at)

    def _beat_of_lock(self) -> None:
        if self._lock_watch is not None:
            try:
                self._lock_watch.beat(self._loop_thread)
            except Exception as error:  # whatever keeps it from starting, the loop is watched
                logger.info("%s: calls that keep the interpreter's lock cannot be watched: %s", self._name, error)
                self._lock_watch.close()
                self._lock_watch = None

    def _log(self, seconds: float) -> None:
        text = f"{self._name} (pid {os.getpid()}): its event loop has not run for {seconds:.1f} s"
        logger.error("%s; the Python stacks of its threads:\n%s", text, all_stacks(self._loop_thread))
        self._stalled(text)
