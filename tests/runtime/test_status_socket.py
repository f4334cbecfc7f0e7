"""The socket at which a job is looked at: what other programs do to it never harms the job."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop
from cli.shell import rrfp as run_rrfp
from fork_server import fork_server  # noqa: F401 - a fixture
from runtime.looking import reads, reads_without_asking_who_listens, seen_by_another_user, sockets
from runtime.toys import data, loss_fn, stages

import rrfp
from rrfp import timeouts
from rrfp.errors import ProtocolError
from rrfp.runtime.stall.status import JobStatus, RankAnswer, RankStatus
from rrfp.runtime.status_socket import (
    MOST_READERS,
    JobEnded,
    JobReport,
    RunningJob,
    SocketFile,
    StatusServer,
    read_report,
    sockets_in,
)

BATCH = data(2)
REPORT = JobReport(1, "2 stages", failure="x" * 900_000)  # more than a connection holds that is not read

NewLoop = Callable[[], asyncio.AbstractEventLoop]

on_both_loops = pytest.mark.parametrize(
    "new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def folder() -> Iterator[Path]:
    """One with a short name: the path of a Unix socket has 107 bytes at most."""
    path = Path(tempfile.mkdtemp(prefix="rrfp-"))
    yield path
    shutil.rmtree(path)


async def the_same() -> JobReport:
    return REPORT


def serve(
    folder: Path,
    look: Callable[[StatusServer], Awaitable[None]],
    report: Callable[[], Awaitable[JobReport]] = the_same,
    new_loop: NewLoop = asyncio.new_event_loop,
) -> None:
    """Make a server, and look at it."""

    async def run() -> None:
        server = StatusServer(folder, "a job", 0, report)
        server.start()
        try:
            await look(server)
        finally:
            await server.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


@on_both_loops
def test_a_file_has_a_listener_and_goes_with_it(new_loop: NewLoop, folder: Path) -> None:
    jobs = list[RunningJob]()

    async def look(server: StatusServer) -> None:
        jobs.append(RunningJob([server.file]))
        assert os.listdir(folder) == [server.file.path.name]
        began = time.monotonic()
        for _ in range(4):
            assert await asyncio.to_thread(read_report, server.file) == REPORT
        assert time.monotonic() - began > 3 * timeouts.STATUS_PAUSE_S

    serve(folder, look, new_loop=new_loop)
    assert not list(folder.iterdir())
    with pytest.raises(JobEnded):
        jobs[0].read()


@on_both_loops
def test_a_loop_that_ends_before_the_server_was_closed_leaves_no_listener(new_loop: NewLoop, folder: Path) -> None:
    server = StatusServer(folder, "a job", 0, the_same)

    async def run() -> None:
        server.start()
        assert await asyncio.to_thread(read_report, server.file) == REPORT

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())
    assert not server.file.has_listener()


def connect_and_write(sock: socket.socket, path: str) -> None:
    """Waits for room in the backlog; nothing of it is ever read."""
    sock.connect(path)
    with suppress(OSError):  # it has been left already
        sock.send(b"\0" * 4096)


@on_both_loops
def test_programs_that_do_not_read_are_few_and_are_left_in_time(
    new_loop: NewLoop, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "STATUS_READ_S", 0.3)

    async def look(server: StatusServer) -> None:
        with ExitStack() as stack:
            silent = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2 * MOST_READERS)]
            began = time.monotonic()
            for sock in silent:
                await asyncio.to_thread(connect_and_write, sock, os.fspath(server.file.path))
            silent.pop().close()
            assert await asyncio.to_thread(read_report, server.file) == REPORT
            # All the others came before, and it had its turn once the first of them had been left.
            assert time.monotonic() - began > timeouts.STATUS_READ_S

    serve(folder, look, new_loop=new_loop)


def test_a_report_that_fails_is_logged_and_the_next_one_is_made(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    failing = [ValueError("a hint does not know")]

    async def report() -> JobReport:
        if failing:
            raise failing.pop()
        return REPORT

    async def look(server: StatusServer) -> None:
        with pytest.raises(ConnectionResetError):
            await asyncio.to_thread(read_report, server.file)
        assert await asyncio.to_thread(read_report, server.file) == REPORT

    serve(folder, look, report)
    assert caplog.messages == ["the status of the job could not be reported: ValueError('a hint does not know')"]


@needs_root
@pytest.mark.parametrize(
    ("modes", "call", "outcome"),
    [
        ((0o700, 0o777), reads, "PermissionError: [Errno 13] Permission denied"),
        ((0o711, 0o777), reads, "RrfpError: PATH: the process that listens there belongs to user 0"),
        ((0o711, 0o777), reads_without_asking_who_listens, "user 12345 may not look at a job of user 0"),
    ],
)
def test_another_user_is_refused(
    modes: tuple[int, int], call: Callable[[str], str], outcome: str, folder: Path
) -> None:
    async def look(server: StatusServer) -> None:
        path = server.file.path
        os.chmod(folder, modes[0])
        os.chmod(path, modes[1])
        assert await asyncio.to_thread(seen_by_another_user, call, str(path)) == outcome.replace("PATH", str(path))

    serve(folder, look)


def test_files_of_ended_processes_are_removed_and_no_others(folder: Path) -> None:
    no_process = 2**22 + 1
    names = [f"{job * 12}.0.{no_process}.sock" for job in "01"]
    gone, elsewhere = (SocketFile.read(folder / name) for name in names)
    assert gone is not None
    assert elsewhere is not None
    note = folder / "notes.txt"
    note.touch()
    with socket.socket(socket.AF_UNIX) as ended, socket.socket(socket.AF_UNIX) as living:
        ended.bind(os.fspath(gone.path))
        ended.close()
        living.bind(os.fspath(elsewhere.path))  # as of a container, which has process ids of its own
        living.listen()

        async def look(server: StatusServer) -> None:
            assert sorted(os.listdir(folder)) == sorted(each.name for each in (server.file.path, elsewhere.path, note))
            assert set(sockets_in(folder)) == {server.file, elsewhere}

        serve(folder, look)


@pytest.mark.parametrize("content", [b"", b"hello\n", b"{}\n", b"[1]\n", b"\xff\n", b'{"pid": 1}\n'])
def test_a_line_of_something_else_is_refused(content: bytes) -> None:
    with pytest.raises(ProtocolError, match="the line of a status socket"):
        JobReport.read(content)


STATUS = RankStatus(0, 1, 1, "F0@0", 3.0, False, 5, 2, 2)
ANSWER = RankAnswer(0, 0, "stage 0", STATUS, "")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        (b'"' + b"x" * (1 << 20) + b'"', "more than 1048576 bytes"),
        (JobReport(1, "", JobStatus(1, (ANSWER,))).line(), "asker is 1, of 1 ranks"),
        (JobReport(1, "", JobStatus(-1, (ANSWER,))).line(), "asker is -1, of 1 ranks"),
        (JobReport(1, "", JobStatus(0, ())).line(), "asker is 0, of 0 ranks"),
    ],
    ids=["deep", "long", "asker", "negative asker", "no rank"],
)
def test_no_line_raises_another_error(content: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=f"the line of a status socket cannot be read: .*{reason}"):
        JobReport.read(content)


def test_the_line_of_a_large_job_lacks_the_stacks() -> None:
    status = replace(STATUS, stack="x" * 8000)
    survey = JobStatus(3, tuple(replace(ANSWER, rank=rank, status=status) for rank in range(200)))
    read = JobReport.read(JobReport(1, "", survey).line())
    assert read.survey is not None
    assert [answer.rank for answer in read.survey.answers] == [*range(200)]
    assert {answer.status for answer in read.survey.answers} == {STATUS}


def local(**options: Any) -> rrfp.LocalPipeline:
    return rrfp.local(stages(2), **{"loss_fn": loss_fn, **options})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("0", None),
        ("top", "RRFP_TOP is 'top', must be 0 (no sockets) or the absolute path of a folder"),
        ("/proc/1/rrfp", "No such file"),
        ("OPEN", "has mode 755, must have 700"),
        ("OPEN/file", "is not a folder"),
        (f"OPEN/{'x' * 100}", "path too long"),
    ],
)
def test_a_job_runs_without_a_socket_and_says_why(
    value: str, reason: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rrfp.pipeline.local_ranks")
    folder.chmod(0o755)
    (folder / "file").touch()
    monkeypatch.setenv("RRFP_TOP", value.replace("OPEN", str(folder)))
    with local().blocking() as pipe:
        pipe.step(BATCH.inputs, BATCH.targets)
    lines = [record for record in caplog.records if record.name == "rrfp.pipeline.local_ranks"]
    if reason is None:
        assert not lines
    else:
        (line,) = lines
        assert line.levelno == logging.INFO
        assert line.getMessage().startswith("stage 0: rrfp top cannot look at this process: ")
        assert reason in line.getMessage()


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("0", "RRFP_TOP is '0', which turns status sockets off; pass the path of one"),
        ("top", "RRFP_TOP is 'top', must be 0"),
        ("OPEN", "jobs cannot be found: "),
    ],
)
def test_the_command_says_why_it_finds_no_job(
    value: str, error: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.chmod(0o755)
    monkeypatch.setenv("RRFP_TOP", value.replace("OPEN", str(folder)))
    result = run_rrfp("top")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"rrfp: {error}")


def test_two_pipelines_of_one_process_are_chosen_by_their_sockets() -> None:
    with local().blocking(), local().blocking():
        files = sockets()
        assert [file.pid for file in files] == [os.getpid()] * 2
        result = run_rrfp("top")
        assert result.exit_code == 2
        paths = ", ".join(str(file.path) for file in files)
        assert result.stderr == f"rrfp: 2 pipelines run in one process, choose one by its socket: {paths}\n"
        assert run_rrfp("top", "--once", str(files[0].path)).exit_code == 0
    assert not sockets()
    result = run_rrfp("top", str(files[0].path))
    assert result.exit_code == 2
    assert result.stderr.endswith("must be the id of a process or the path of its status socket\n")


def test_an_aborted_job_says_so() -> None:
    def fail(output: object, target: object) -> object:
        raise ValueError("out of luck")

    with local(loss_fn=fail).blocking() as pipe:
        with pytest.raises(rrfp.PipelineAborted):
            pipe.step(BATCH.inputs, BATCH.targets)
        result = run_rrfp("top", "--once")
    assert result.exit_code == 1
    assert result.stderr.startswith("rrfp: the job cannot be looked at any more: aborted by stage 1, task F0@1: ")
    assert not sockets()


async def test_a_job_on_the_callers_loop_is_looked_at_and_leaves_nothing() -> None:
    async with local(loop="caller") as pipe:
        await pipe.step(BATCH.inputs, BATCH.targets)
        (file,) = sockets()
        survey = (await asyncio.to_thread(read_report, file)).survey
        assert survey is not None
        statuses = [answer.status for answer in survey.answers]
        assert [status is not None and (status.steps_ended, status.step) for status in statuses] == [(1, None)] * 2
    assert not sockets()
    assert {task.get_name() for task in asyncio.all_tasks()}.isdisjoint({"rrfp-status"})
