"""Hints that stop their rank's event loop."""

from __future__ import annotations

import ctypes
import logging
import threading
import time

import rrfp

#: What a hint waits for that blocks until it is let go.
RELEASE = threading.Event()

#: What is logged when it begins.
BLOCKING = "the hint blocks from now on"


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def sleep_with_the_lock(seconds: float) -> None:
    """One call into C that keeps the interpreter's lock, and that no signal cuts short."""
    libc = ctypes.PyDLL(None)  # other than CDLL it keeps the lock
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    until = time.time() + seconds
    libc.pthread_mutex_timedlock(mutex, ctypes.byref(_TimeSpec(int(until), int(until % 1 * 1e9))))


class Blocks(rrfp.Hint):
    """Waits on some stages, once they have enqueued some tasks.

    Args:
        stages: where.
        seconds: how long; None: until `RELEASE`.
        keeps_lock: the wait is one call into C that keeps the interpreter's lock.
    """

    def __init__(self, *stages: int, seconds: float | None = None, keeps_lock: bool = False) -> None:
        self._stages = stages
        self._seconds = seconds
        self._keeps_lock = keeps_lock

    def choose(self, ready: rrfp.ReadySet, view: rrfp.View) -> rrfp.Task | None:
        if view.stage in self._stages and view.num_enqueued_total == 3:
            logging.getLogger("tests").warning(BLOCKING)
            self.block_here()
        return next(iter(ready))

    def block_here(self) -> None:
        if self._seconds is None:
            RELEASE.wait(50)
        elif self._keeps_lock:
            sleep_with_the_lock(self._seconds)
        else:
            time.sleep(self._seconds)


class BlocksAtOnce(Blocks):
    """Waits when a step opens, whatever the stages before have sent until then."""

    def open_step(self, view: rrfp.View) -> None:
        if view.stage in self._stages:
            logging.getLogger("tests").warning(BLOCKING)
            self.block_here()

    def choose(self, ready: rrfp.ReadySet, view: rrfp.View) -> rrfp.Task | None:
        return next(iter(ready))
