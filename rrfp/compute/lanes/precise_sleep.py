"""Sleeping to a point in time, to a few microseconds, with the CPU idle until shortly before.

Linux lets a timer fire up to 50 us late to save wake-ups, a thread's "timer slack". The slack of the calling thread is
lowered once; the thread yields for the rest of the time to the deadline.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time

#: Seconds before the deadline at which the sleep ends; about the time in which a thread wakes up.
_MARGIN_S = 50e-6

_PR_SET_TIMERSLACK = 29

_this_thread = threading.local()


def sleep_until(deadline: float) -> None:
    """Return as soon as possible after ``deadline``, a time of ``time.monotonic()``; at once if it has passed."""
    if not getattr(_this_thread, "has_low_slack", False):
        _lower_timer_slack()
        _this_thread.has_low_slack = True
    remaining = deadline - time.monotonic()
    if remaining > _MARGIN_S:
        time.sleep(remaining - _MARGIN_S)
    while time.monotonic() < deadline:
        time.sleep(0)  # releases the GIL and the core, for which the event loop may be waiting


def _lower_timer_slack() -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
