"""`rrfp top` looks at jobs of real processes."""

from __future__ import annotations

import json
import os
import pty
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import runtime.processes as programs
from cli.shell import rrfp
from fork_server import fork_server  # noqa: F401 - a fixture
from runtime.looking import (
    first_is_held,
    sockets,
    step_unevenly_until_released,
    step_until_released,
    survey_when,
    top,
    uneven_until_held,
)
from runtime.processes import Processes
from runtime.stuck_hints import Blocks

from rrfp import timeouts
from rrfp.model.mesh import Mesh
from rrfp.runtime.stall.status import JobStatus
from rrfp.runtime.status_socket import SocketFile


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Any]:
    """Starts a job of emulated stages, by name."""
    running: list[Processes] = []

    def start(count: int, program: programs.Program, **options: Any) -> Processes:
        (folder := tmp_path / str(len(running))).mkdir()
        settings = {"mesh": Mesh((("pp", count),)), "stall_after": 60.0, "patience": 20.0, **options}
        running.append(Processes(folder, count, program, **settings))
        return running[-1]

    yield start
    for processes in running:
        processes.kill()


@pytest.fixture
def held(launch: Any) -> Processes:
    """A job of two stages in whose first task stage 0 is."""
    job: Processes = launch(2, step_until_released, seconds=first_is_held)
    for rank in range(2):
        assert job.hear(rank) == "begun"
    survey_when(sockets()[0], is_waiting)
    return job


def is_waiting(survey: JobStatus) -> bool:
    """Whether stage 1 is in its step."""
    status = survey.answers[1].status
    return status is not None and status.waits_for == "input"


def release(job: Processes) -> None:
    for connection in job.connections:
        connection.send("go on")
    for rank in range(2):
        assert job.end(rank).error == ""


def test_each_stage_runs_or_waits_for_the_task_that_another_owes(held: Processes) -> None:
    with top("--once", "--json") as process:
        output, errors = process.communicate(timeout=50)
    assert (process.returncode, errors) == (0, "")
    report = json.loads(output)
    assert report["pid"] == held.pid(0)
    assert report["pipeline"] == "stage 0 of 2, hint slot-aware-pyramid, limit 2n"
    first, second = report["ranks"]
    assert [(rank["state"], rank["running"]) for rank in (first, second)] == [("running", "F0@0"), ("waiting", None)]
    assert (second["cause"], second["waits_for"]) == ("input", "F0@1 (F0@0 owed by stage 0)")
    assert second["seconds"] > 0
    assert first["seconds"] > 0
    assert [rank["process"].split()[-1] for rank in (first, second)] == [str(held.pid(0)), str(held.pid(1))]
    keys = ("stage", "step", "mode", "enqueued", "tasks", "held", "limit", "ready", "received", "tasks_per_s")
    assert [first[key] for key in keys] == [0, 0, "train", 1, 4, 1, 4, 1, 0, None]
    assert [second[key] for key in keys] == [1, 0, "train", 0, 4, 0, 4, 0, 0, None]
    release(held)


def test_a_limit_that_follows_is_that_of_the_step(launch: Any) -> None:
    job = launch(2, step_unevenly_until_released, seconds=uneven_until_held, limit="auto")
    for rank in range(2):
        assert job.hear(rank) == "begun"
    survey_when(sockets()[0], is_waiting)
    result = rrfp("top", "--once", "--json", str(job.pid(0)))
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["pipeline"] == "stage 0 of 2, hint slot-aware-pyramid, limit auto"
    # 2 and 1 in the first step, and as many again: half of its microbatches took no time.
    assert [rank["limit"] for rank in report["ranks"]] == [2 + 2, 1 + 1]
    release(job)


def test_any_rank_sees_all_and_is_chosen_by_process_or_socket(held: Processes) -> None:
    for job, asked in ((str(held.pid(1)), 0), (str(sockets()[1].path), 1)):
        result = rrfp("top", "--once", job)
        assert result.exit_code == 0, result.output
        head, _, first, second = result.stdout.splitlines()
        process = held.pid(asked)
        assert head == f"stage {asked} of 2, hint slot-aware-pyramid, limit 2n; process {process}, step 0"
        assert first.split()[:4] == ["0", "0", "1/4", "F0@0"]
        assert second.split()[:4] == ["1", "0", "0/4", "waiting"]
        assert "F0@1 (F0@0 owed by stage 0)" in second
    release(held)


def test_looks_go_on_until_the_job_ends(held: Processes) -> None:
    with top("--interval", "0.1", "--json") as process:
        assert process.stdout is not None
        looks = [json.loads(process.stdout.readline()) for _ in range(2)]
        assert [rank["tasks_per_s"] for rank in looks[1]["ranks"]] == [0, 0]
        release(held)
        _, errors = process.communicate(timeout=50)
    assert process.returncode == 0
    assert errors == "rrfp top: the job has ended\n"
    assert not sockets()


@pytest.mark.parametrize("on_terminal", [True, False], ids=["terminal", "pipe"])
def test_ctrl_c_ends_the_look_alone(held: Processes, on_terminal: bool) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "130", "LINES": "40"}
    streams: dict[str, Any] = {"stdout": theirs} if on_terminal else {}
    with top("--interval", "0.1", env=environment, **streams) as process:
        descriptor = ours if process.stdout is None else process.stdout.fileno()
        shown = b""
        while shown.count(b"owed by stage 0") < 2:
            shown += os.read(descriptor, 1 << 16)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=50)
    os.close(ours)
    os.close(theirs)
    assert (process.returncode, errors) == (0, "")
    assert (b"\x1b" in shown) == on_terminal
    release(held)


def blocked_in(file: SocketFile, rank: int) -> list[tuple[str, bool]]:
    """Each rank's absence, and whether it answered, once ``rank`` does not any more."""
    survey = survey_when(file, lambda survey: survey.answers[rank].status is None)
    return [(answer.absent, answer.status is not None) for answer in survey.answers]


def test_a_rank_whose_loop_does_not_run_is_named_and_not_waited_for(
    launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tree of four ranks: 1 and 2 below 0, 3 below 1."""
    launch(4, programs.emulated_steps_for_ever, hint=Blocks(1))
    behind = "cannot be reached: stage 1 does not answer"
    deadline = time.monotonic() + 20
    while len(files := sockets()) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert blocked_in(files[0], 1) == [("", True), ("does not answer", False), ("", True), (behind, False)]
    assert blocked_in(files[3], 1) == [(behind, False), ("does not answer", False), (behind, False), ("", True)]
    monkeypatch.setattr(timeouts, "STATUS_S", 0.5)
    result = rrfp("top", "--once", str(files[1].path))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"rrfp: no process of the job on this host answers: the event loops of {files[1].pid} do not run\n"
    )


def test_a_killed_job_leaves_no_socket_and_no_listener_in_its_children(launch: Any) -> None:
    job = launch(2, programs.fork_a_worker, mesh=None, seconds=0.0)
    worker = job.hear(1)
    try:
        for rank in range(2):
            assert job.hear(rank) == "stepping"
        (_, file) = sockets()
        assert file.pid == job.pid(1)
        os.kill(job.pid(1), signal.SIGKILL)
        assert job.end(0).error == "PipelineAborted"
        job.join(time.monotonic())
        result = rrfp("top")
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith("rrfp: no job of this user can be looked at: none has a socket in ")
        assert not file.path.exists()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_of_two_jobs_one_is_chosen(launch: Any) -> None:
    jobs = [launch(1, programs.emulated_steps_for_ever) for _ in range(2)]
    for job in jobs:
        assert job.hear(0) == "stepping"
    result = rrfp("top")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("rrfp: 2 jobs run, choose one by its process id: ")
    assert all(f"{job.pid(0)} (" in result.stderr for job in jobs)
    looked = rrfp("top", "--once", "--json", str(jobs[1].pid(0)))
    assert json.loads(looked.stdout)["pid"] == jobs[1].pid(0)
    other = rrfp("top", "1")
    assert other.exit_code == 2
    assert other.stderr.startswith("rrfp: no job has a process 1, must be one of: ")
