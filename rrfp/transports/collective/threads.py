"""Threads that call C++, which end before the interpreter does.

Python 3.11 ends a daemon thread by pthread_exit when it asks for the interpreter's lock while the interpreter is taken
down. torch's bindings ask for it in a destructor, when a call returns or an object is freed; C++ does not let a thread
end there, and ends the process instead ("terminate called without an active exception", SIGABRT). So the end of the
process waits for these threads, for a moment. One that stays in C++ for longer does no harm unless it returns in the
last moments of the interpreter.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

from rrfp import timeouts


class _CallingThread(threading.Thread):
    """Python lists it until it has also freed what its function refers to."""


def start_thread(serve: Callable[[], None], name: str) -> None:
    """Run ``serve`` on a daemon thread, which alone refers to it then."""
    _CallingThread(target=serve, name=name, daemon=True).start()


@atexit.register
def end_threads() -> None:
    """Wait for all threads, for a moment."""
    deadline_s = time.monotonic() + timeouts.EXIT_GRACE_S
    # Again and again: a thread that ends may have started another one, which frees what it made.
    while (threads := _alive()) and (left_s := deadline_s - time.monotonic()) > 0:
        threads[0].join(left_s)


def _alive() -> list[_CallingThread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, _CallingThread)]
