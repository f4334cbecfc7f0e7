"""The threads of wires, which end before the interpreter does.

A thread that returns from C++ into an interpreter which is being taken down ends the process by SIGABRT. So at the end
of the process the wires that are left are aborted, and their threads waited for.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

from rrfp.core import timeouts


class _Wire(Protocol):
    def abort(self) -> None: ...


_threads: set[threading.Thread] = set()
_wires: WeakSet[_Wire] = WeakSet()
_owner = os.getpid()


def start_thread(serve: Callable[[], None], name: str) -> None:
    """Run ``serve`` on a daemon thread."""

    def run() -> None:
        try:
            serve()
        finally:
            _threads.discard(threading.current_thread())

    thread = threading.Thread(target=run, name=name, daemon=True)
    _threads.add(thread)
    thread.start()


def abort_at_exit(wire: _Wire) -> None:
    """Abort ``wire`` at the end of the process, if it is alive then."""
    global _owner
    if _owner != os.getpid():  # a fork's wires are its own; the parent's connections are not to be touched
        _owner = os.getpid()
        _wires.clear()
    _wires.add(wire)


@atexit.register
def end_wires() -> None:
    """Abort all wires of this process and wait for their threads, for a moment."""
    if _owner != os.getpid():
        return
    for wire in list(_wires):
        wire.abort()
    deadline_s = time.monotonic() + timeouts.EXIT_GRACE_S
    for thread in list(_threads):
        thread.join(max(0.0, deadline_s - time.monotonic()))
