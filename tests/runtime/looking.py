"""Jobs to look at, and `rrfp top` in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fork_server import context

from rrfp.model.tasks import Task
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.runtime.stall.status import JobStatus
from rrfp.runtime.status_socket import JobReport, SocketFile, chosen_folder, read_report, sockets_in

#: The first forward of stage 0 has begun; it ends when the test says so.
BEGUN, RELEASE = threading.Event(), threading.Event()

#: A step before is over, see `step_unevenly_until_released`.
IS_SECOND = threading.Event()


def first_is_held(task: Task) -> float:
    """What an emulated task takes: F0@0 until `RELEASE`, the others nothing."""
    if str(task) == "F0@0":
        BEGUN.set()
        RELEASE.wait(50)
    return 0.0


def step_until_released(rank: int, pipe: BlockingPipeline, connection: Connection) -> None:
    """Run a step: send "begun" once F0@0 has begun, and let it end when the test answers."""

    def release() -> None:
        if rank == 0:
            BEGUN.wait(50)
        connection.send("begun")
        connection.recv()
        RELEASE.set()

    threading.Thread(target=release, daemon=True).start()
    pipe.step(microbatches=2)


def uneven_until_held(task: Task) -> float:
    """What an emulated task takes: microbatches differ in the first step; in the next F0@0 waits for `RELEASE`."""
    if IS_SECOND.is_set():
        return first_is_held(task)
    return 0.05 if task.microbatch % 2 else 0.0


def step_unevenly_until_released(rank: int, pipe: BlockingPipeline, connection: Connection) -> None:
    """As `step_until_released`, after a step whose microbatches differ."""
    _ = pipe.step(microbatches=4).slots  # waits for the reports, which decide on the next limits
    IS_SECOND.set()
    step_until_released(rank, pipe, connection)


def sockets() -> list[SocketFile]:
    """Those of all jobs of this test process and of the processes that it started."""
    folder = chosen_folder()
    assert folder is not None
    return sockets_in(folder)


def survey_when(file: SocketFile, holds: Callable[[JobStatus], bool]) -> JobStatus:
    """The first survey of the process at ``file`` of which something holds."""
    deadline = time.monotonic() + 20
    while True:
        survey = read_report(file).survey
        assert survey is not None
        if holds(survey):
            return survey
        assert time.monotonic() < deadline, survey


def top(*arguments: str, **streams: Any) -> subprocess.Popen[str]:
    """`rrfp top` in a process of its own; what it prints comes line by line."""
    command = [sys.executable, "-m", "rrfp", "top", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **streams}
    return subprocess.Popen(command, **pipes)


def as_other_user(call: Callable[[str], str], path: str, connection: Connection) -> None:
    """In a process of root's that becomes another user."""
    os.setgid(12345)
    os.setuid(12345)
    try:
        connection.send(call(path))
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")


def seen_by_another_user(call: Callable[[str], str], path: str) -> str:
    ours, theirs = context().Pipe()
    with ours, theirs:
        process: Any = context().Process(target=as_other_user, args=(call, path, theirs))
        process.start()
        assert ours.poll(30)
        said: str = ours.recv()
        process.join(10)
    return said


def reads(path: str) -> str:
    return read_report(SocketFile("", 0, 0, Path(path))).failure


def reads_without_asking_who_listens(path: str) -> str:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        return JobReport.read(sock.recv(1 << 16)).failure
