"""Threads that call C++, which end before the interpreter does.

Python 3.11 ends a daemon thread by pthread_exit when it asks for the interpreter's lock while the interpreter is taken
down. torch's bindings ask for it in a destructor, when a call returns or an object is freed; C++ does not let a thread
end there, and ends the process instead ("terminate called without an active exception", SIGABRT). So at the end of
the process the wires that are left are aborted, and all threads waited for. One that stays in C++ for longer than
that is left alone: it does no harm unless it returns in the last moments of the interpreter.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

from rrfp import timeouts


class _Wire(Protocol):
    def abort(self) -> None: ...


class _CallingThread(threading.Thread):
    """Python lists it until it has also freed what its function refers to."""


_wires: WeakSet[_Wire] = WeakSet()
_owner = os.getpid()


def start_thread(serve: Callable[[], None], name: str) -> None:
    """Run ``serve`` on a daemon thread, which alone refers to it when this has returned."""
    _CallingThread(target=serve, name=name, daemon=True).start()


def abort_at_exit(wire: _Wire) -> None:
    """Abort ``wire`` at the end of the process, if it is alive then."""
    global _owner
    if _owner != os.getpid():  # a fork's wires are its own; the parent's connections are not to be touched
        _owner = os.getpid()
        _wires.clear()
    _wires.add(wire)


@atexit.register
def end_threads() -> None:
    """Abort all wires of this process and wait for all threads, for a moment."""
    if _owner == os.getpid():
        for wire in list(_wires):
            wire.abort()
    deadline_s = time.monotonic() + timeouts.EXIT_GRACE_S
    # Again and again: a thread that ends may have started another one, which frees what it made.
    while (threads := _alive()) and (left_s := deadline_s - time.monotonic()) > 0:
        threads[0].join(left_s)


def _alive() -> list[_CallingThread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, _CallingThread)]
