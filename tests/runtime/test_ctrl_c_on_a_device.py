"""Ctrl-C in real processes that compute on the device double: in mid-step, and while the device never ends its work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rrfp import timeouts

TESTS = Path(__file__).parents[1]

#: The most that may pass until the caller gets the interrupt, in seconds.
SOON_S = 3.0

#: Seconds that a piece of work takes on the device: as long as some steps, and longer than any test.
LONG_S, STUCK_S = 0.3, 3600.0

TASKS, COPIES = "rrfp-lane-1", "rrfp-copies-1-send"

#: How a rank ends because rank 1 was interrupted.
ABORTED = "rrfp.errors.PipelineAborted: aborted by stage 1: KeyboardInterrupt"


class Program:
    """The script `interrupted.py` in a process of its own, whose arguments these are."""

    def __init__(self, who: str, lane: str, seconds: float, store: Path) -> None:
        paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / "runtime/interrupted.py"), who, lane, str(seconds), str(store)],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        """What it prints next."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def interrupt(self) -> float:
        """Press Ctrl-C once the device is busy; returns the time."""
        assert self.line() == "the device is busy\n"
        self.process.send_signal(signal.SIGINT)
        return time.monotonic()

    def end(self, since: float) -> tuple[str, str]:
        """Wait for the end, which comes soon after ``since``; returns what is left, and the errors printed."""
        assert self.line() == "interrupted\n"
        assert time.monotonic() - since < SOON_S
        rest = self.line()
        _, errors = self.process.communicate(timeout=timeouts.ENDED_S)
        assert time.monotonic() - since < timeouts.ENDED_S
        return rest, errors


Start = Callable[..., Program]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    programs: list[Program] = []

    def launch(who: str, seconds: float, lane: str = TASKS) -> Program:
        programs.append(Program(who, lane, seconds, tmp_path / "store"))
        return programs[-1]

    yield launch
    for program in programs:
        program.process.kill()
        program.process.communicate()


def left(*threads: str) -> str:
    """What a program prints about the rest, if ``threads`` are stuck, and their watchers."""
    names = [name + part for name in threads for part in ("", "-watcher")] + ["rrfp-device-double"] * bool(threads)
    return f"left: 0 sockets, {' '.join(sorted(names))}\n"


def check(errors: str, last: str, tracebacks: int = 1) -> None:
    """They end with the exception, and nothing else went wrong."""
    assert errors.endswith(f"\n{last}\n"), errors
    assert errors.splitlines().count("Traceback (most recent call last):") == tracebacks, errors


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("lane", [TASKS, pytest.param(COPIES, marks=pytest.mark.long)])
def test_ctrl_c_ends_a_program_whose_device_is_stuck(lane: str, start: Start) -> None:
    program = start("local", STUCK_S, lane)
    rest, errors = program.end(program.interrupt())
    assert rest == left(lane)
    assert program.process.returncode == -signal.SIGINT
    check(errors, "KeyboardInterrupt")
    assert "concurrent/futures" not in errors, "the last frames are the caller's"


@pytest.mark.long
@pytest.mark.timeout(60)
def test_ctrl_c_in_mid_step_leaves_nothing(start: Start) -> None:
    program = start("local", LONG_S)
    rest, errors = program.end(program.interrupt())
    assert rest == left()
    assert program.process.returncode == -signal.SIGINT
    check(errors, "KeyboardInterrupt")


@pytest.mark.long
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("seconds", "lanes"), [(LONG_S, []), (STUCK_S, [TASKS])])
def test_ctrl_c_in_an_async_program(seconds: float, lanes: list[str], start: Start) -> None:
    """asyncio.run cancels the program, then raises: a traceback of two parts."""
    program = start("async", seconds)
    rest, errors = program.end(program.interrupt())
    assert rest == left(*lanes)
    assert program.process.returncode == -signal.SIGINT
    check(errors, "KeyboardInterrupt", tracebacks=2)


@pytest.mark.long
@pytest.mark.timeout(60)
def test_ctrl_c_in_mid_step_ends_all_processes(start: Start) -> None:
    """A terminal signals all. The ranks are connected by zmq; one may be told by the other first."""
    first, second = start("0", LONG_S), start("1", LONG_S)
    since = second.interrupt()
    first.process.send_signal(signal.SIGINT)
    rest, errors = second.end(since)
    assert rest == left()
    check(errors, "KeyboardInterrupt")
    rest, errors = first.end(time.monotonic())
    assert rest == left()
    assert errors.splitlines()[-1] in ("KeyboardInterrupt", ABORTED)


@pytest.mark.long
@pytest.mark.timeout(60)
def test_ctrl_c_on_a_rank_whose_device_is_stuck_is_named_on_the_others(start: Start) -> None:
    other, stuck = start("0", STUCK_S), start("1", STUCK_S)
    since = stuck.interrupt()
    rest, errors = other.end(since)
    assert rest == left()
    assert other.process.returncode == 1
    check(errors, ABORTED)
    rest, errors = stuck.end(time.monotonic())
    assert rest == left(TASKS)
    assert stuck.process.returncode == -signal.SIGINT
    check(errors, "KeyboardInterrupt")
