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
from pathlib import Path

#: Environment variable that marks the processes of one test.
MARK = "RRFP_TEST_MARK"

#: How multiprocessing starts the one process of its own that stays until this process ends.
_OF_ALL_TESTS = re.compile(r"from multiprocessing\.resource_tracker import main;main\(\d+\)$")

#: Seconds that threads and processes which are on their way out are given.
GRACE_S = 2.0

_serial = itertools.count()


class LeakGuard:
    """What ran before a test, and a mark for what the test starts."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._mark = f"{os.getpid()}.{next(_serial)}"
        os.environ[MARK] = self._mark
        self._processes = set(self._find_processes())

    def leaks(self) -> list[str]:
        """Wait for stragglers, kill the processes that remain, and describe everything that was left."""
        deadline_s = time.monotonic() + GRACE_S
        while (self._new_threads() or self._new_processes()) and time.monotonic() < deadline_s:
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
        found = self._find_processes().items()
        return {pid: line for pid, line in found if pid not in self._processes and not _OF_ALL_TESTS.search(line)}

    def _find_processes(self) -> dict[int, str]:
        """Living descendants and marked processes, by id, with their command lines."""
        parents: dict[int, int] = {}
        marked: set[int] = set()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it may end at any moment, or belong to somebody else
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state in "ZX":
                    continue
                parents[int(entry.name)] = int(parent)
                if f"{MARK}={self._mark}\0".encode() in (entry / "environ").read_bytes():
                    marked.add(int(entry.name))
        own = os.getpid()
        found = {pid for pid in parents if own in _ancestors(pid, parents)} | marked
        return {pid: _command(pid) for pid in found - {own}}


def _ancestors(pid: int, parents: dict[int, int]) -> set[int]:
    chain: set[int] = set()
    while pid in parents and pid not in chain:
        chain.add(pid)
        pid = parents[pid]
    return chain


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "(ended)"
