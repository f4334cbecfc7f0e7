"""Threads that call C++ and must end before the interpreter does.

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
import weakref
from collections.abc import Callable

from rrfp import timeouts

#: Threads that have nothing more to do than what they are at.
ending: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start_thread(serve: Callable[[], None], name: str) -> None:
    """Run ``serve`` on a daemon thread, which alone refers to it then, and for which the end of the process waits."""
    thread = threading.Thread(target=serve, name=name, daemon=True)
    ending.add(thread)
    thread.start()


@atexit.register
def _wait() -> None:
    deadline_s = time.monotonic() + timeouts.EXIT_GRACE_S
    # Again and again: a thread that ends may have started another one, which frees what it made.
    while (alive := [thread for thread in list(ending) if thread.is_alive()]) and time.monotonic() < deadline_s:
        alive[0].join(deadline_s - time.monotonic())
