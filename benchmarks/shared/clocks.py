"""Processor time of one step: of each of this process's threads, and of the whole machine. Linux only."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shared.load import machine_busy_s

_TASKS = Path("/proc/self/task")

MAIN, LOOP, LANE, COPIER, ZMQ, GLOO, REST = "main", "loop", "lane", "copier", "zmq", "gloo", "rest"
#: The groups of threads.
GROUPS = (MAIN, LOOP, LANE, COPIER, ZMQ, GLOO, REST)

#: A thread's group by its name: in Python where Python started it, else the system's.
_PATTERNS: Mapping[str, re.Pattern[str]] = {
    MAIN: re.compile("MainThread"),
    LOOP: re.compile(r"rrfp-\d+"),
    LANE: re.compile(r"rrfp-lane.*"),
    COPIER: re.compile(r"rrfp-.*copies.*"),
    ZMQ: re.compile("ZMQbg.*"),
    GLOO: re.compile("(pt_)?gloo.*"),
}


def group_of(name: str) -> str:
    """The group of the thread ``name``."""
    return next((group for group, pattern in _PATTERNS.items() if pattern.fullmatch(name)), REST)


@dataclass(frozen=True, slots=True)
class Reading:
    """Processor time so far, in seconds.

    Attributes:
        process: of all threads, also those that have ended.
        threads: by number, of those that there are.
        machine: of all processes; None where it is not known.
    """

    process: float
    threads: Mapping[int, float]
    machine: float | None

    @classmethod
    def now(cls) -> Reading:
        """Read the clocks."""
        return cls(time.process_time(), _by_thread(), machine_busy_s())

    def by_group(self, before: Reading) -> dict[str, float]:
        """The seconds of each group of threads since ``before``."""
        groups = dict.fromkeys(GROUPS, 0.0)
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        for number, seconds in self.threads.items():
            groups[group_of(names.get(number) or _system_name(number))] += seconds - before.threads.get(number, 0.0)
        groups[REST] += self.process - before.process - sum(groups.values())  # threads that have ended
        return groups


def _by_thread() -> dict[int, float]:
    seconds = {}
    for number in map(int, os.listdir(_TASKS)):
        try:
            seconds[number] = time.clock_gettime(_clock_of(number))
        except OSError:
            continue  # it has just ended
    return seconds


def _clock_of(thread: int) -> int:
    """Linux's number of the clock of a thread's processor time, as pthread_getcpuclockid makes it."""
    per_thread, of_scheduler = 4, 2
    return (~thread << 3) | per_thread | of_scheduler


def _system_name(thread: int) -> str:
    try:
        return (_TASKS / str(thread) / "comm").read_text().strip()
    except OSError:
        return ""
