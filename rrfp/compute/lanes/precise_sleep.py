"""Sleeping to a point in time, to a few microseconds, with the CPU idle until shortly before.

Linux lets a timer fire up to 50 us late to save wake-ups, a thread's "timer slack". The slack of the calling thread is
lowered once; what then remains of the way to the deadline is spent yielding.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time

#: Seconds before the deadline at which the sleep is planned to end; about what a thread takes to wake up.
_MARGIN_S = 50e-6

_PR_SET_TIMERSLACK = 29

_this_thread = threading.local()


def sleep_until(deadline: float) -> None:
    """Return as soon as possible after ``deadline``.

    Args:
        deadline: a time of ``time.monotonic()``, in seconds; one that has passed returns at once.
    """
    if not getattr(_this_thread, "is_punctual", False):
        _lower_timer_slack()
        _this_thread.is_punctual = True
    remaining = deadline - time.monotonic()
    if remaining > _MARGIN_S:
        time.sleep(remaining - _MARGIN_S)
    while time.monotonic() < deadline:
        time.sleep(0)  # lets go of the GIL and of the core, or the event loop would wait for us


def _lower_timer_slack() -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
