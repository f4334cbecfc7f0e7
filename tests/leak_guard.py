"""Finds threads and processes that a test started and left behind.

A process counts when it descends from this one, or when it carries the mark that `LeakGuard` puts into the environment:
so a grandchild whose parent was killed is still found. Linux only, by /proc; elsewhere only threads are found.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

#: Environment variable that marks the processes of one test.
MARK = "RRFP_TEST_MARK"

#: How multiprocessing starts the one process of its own that stays until this process ends.
_OF_ALL_TESTS = re.compile(r"from multiprocessing\.resource_tracker import main;main\(\d+\)$")

#: Seconds that threads and processes which are on their way out are given.
GRACE_S = 2.0

#: States of processes that have ended: zombies and the dead.
_ENDED = "ZX"

#: The parent of the kernel's own threads.
_KERNEL = 2

_serial = itertools.count()


class LeakGuard:
    """What ran before a test, and a mark for what the test starts."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._mark = f"{os.getpid()}.{next(_serial)}"
        os.environ[MARK] = self._mark
        self._processes = _processes()

    def leaks(self) -> list[str]:
        """Wait for stragglers, kill the processes that remain, and describe everything that was left."""
        deadline_s = time.monotonic() + GRACE_S
        while self._new_threads() or self._new_processes() or self._one_begins():
            if time.monotonic() >= deadline_s:
                break
            time.sleep(0.02)
        found = [f"thread {thread.name!r} (daemon={thread.daemon})" for thread in self._new_threads()]
        for pid, command in self._new_processes().items():
            found.append(f"process {pid}: {command}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.environ.pop(MARK, None)
        return found

    def _new_threads(self) -> list[threading.Thread]:
        # A dummy is a foreign thread (C++) that once ran Python; nothing removes it from the list.
        return [
            thread
            for thread in threading.enumerate()
            if thread not in self._threads and not isinstance(thread, threading._DummyThread)
        ]

    def _new_processes(self) -> dict[int, str]:
        """Living descendants and marked processes that did not run before, by id, with their command lines."""
        found = {pid: _command(pid) for pid in _processes() - self._processes if self._is_of_the_test(pid)}
        return {pid: line for pid, line in found.items() if not _OF_ALL_TESTS.search(line)}

    def _one_begins(self) -> bool:
        """Whether a new process has no environment yet: in the middle of exec it has none, and nobody's mark."""
        for pid in _processes() - self._processes:
            state, parent = _state_and_parent(pid)
            with contextlib.suppress(OSError):
                if state not in _ENDED and parent != _KERNEL and not Path(f"/proc/{pid}/environ").read_bytes():
                    return True
        return False

    def _is_of_the_test(self, pid: int) -> bool:
        state, _ = _state_and_parent(pid)
        if state in _ENDED:
            return False
        with contextlib.suppress(OSError):  # it may end at any moment, or belong to somebody else
            if f"{MARK}={self._mark}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                return True
        return os.getpid() in _ancestors(pid)


def _processes() -> set[int]:
    """The ids of all processes. They are handed out in turn: none comes again while one test runs."""
    try:
        return {int(name) for name in os.listdir("/proc") if name.isdecimal()}
    except OSError:
        return set()


def _state_and_parent(pid: int) -> tuple[str, int]:
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "X", 0
    return state, int(parent)


def _ancestors(pid: int) -> Iterator[int]:
    while pid:
        _, pid = _state_and_parent(pid)
        yield pid


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "(ended)"
