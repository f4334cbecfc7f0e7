"""Real processes that are stuck: named by all others, with their stacks, and ended where the caller wants that."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import runtime.processes as programs
from fork_server import fork_server  # noqa: F401 - a fixture
from runtime.processes import Processes
from runtime.stuck_hints import BLOCKING, Blocks

from rrfp import timeouts
from rrfp.model.mesh import Mesh

STALL_S = 1.0
ABORT_S = 4.0


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Any]:
    running: list[Processes] = []

    def start(program: programs.Program, emulated: bool = True, **options: Any) -> Processes:
        # The first backward of a torch module loads libraries: for seconds, on a machine that is busy.
        mesh = Mesh((("pp", 3),)) if emulated else None
        settings = {"stall_after": STALL_S, "abort_after": ABORT_S, "patience": 20.0, "lock_watch": True, **options}
        running.append(Processes(tmp_path, 3, program, mesh=mesh, stderr=tmp_path, **settings))
        return running[-1]

    yield start
    for processes in running:
        processes.kill()


@pytest.mark.parametrize("keeps_lock", [False, True], ids=["a hint sleeps", "a call keeps the interpreter's lock"])
def test_a_stuck_loop_is_named_prints_its_stacks_and_is_ended(launch: Any, tmp_path: Path, keeps_lock: bool) -> None:
    seconds = ABORT_S + 4.0 if keeps_lock else 60.0  # nothing can end a process whose lock is kept but a signal
    ranks = launch(programs.emulated_steps_for_ever, hint=Blocks(1, seconds=seconds, keeps_lock=keeps_lock))
    began = time.monotonic()
    ends = [ranks.end(rank) for rank in range(3)]
    blocked_at = ends[1].logged_at[ends[1].logged.index(BLOCKING)]
    for end in (ends[0], ends[2]):
        assert end.origin is not None
        assert end.origin[0] == 1
        assert end.origin[2].startswith("PeerLostError: its event loop has not run for ")
        assert f"pid {ranks.pid(1)}" in end.origin[2]
        named = next(index for index, line in enumerate(end.logged) if "has not answered for" in line)
        assert end.logged[named].startswith("stage 1 (host ")
        assert f"pid {ranks.pid(1)})" in end.logged[named]
        assert end.logged_at[named] - blocked_at < STALL_S + timeouts.NAMED_S
    stuck = ends[1]
    assert stuck.error == "PipelineAborted"
    assert stuck.origin is not None
    assert stuck.origin[0] == 1
    told = [line for line in stuck.logged if "its event loop has not run for" in line]
    if keeps_lock:  # printed while nothing of Python ran in the process
        told = [(tmp_path / "stderr-1").read_text()]
        assert told[0].startswith(f"stage 1 (pid {ranks.pid(1)}): a call has kept the interpreter's lock for more than")
        assert told[0].count("a call has kept") == 1
        first, *others = told[0].split("\nthread ")[1:]
        assert first.startswith("rrfp-1")
        assert "in sleep_with_the_lock" in first
        assert any(other.startswith("MainThread:") and "in step" in other for other in others)
    else:
        assert "longer than abort_after" in stuck.origin[2]
    assert "block_here" in told[0]
    ranks.join(began, within_s=30.0)


def test_a_stuck_rank_is_not_taken_for_a_frozen_one_where_cgroups_cannot_be_read(launch: Any) -> None:
    """No thread of it does anything for longer than the patience, but for the one that watches its loop."""
    options: Any = {"hint": Blocks(1, seconds=3.0), "patience": 1.5, "stall_after": 30.0, "abort_after": None}
    ranks = launch(programs.step_where_no_cgroup_can_be_read, transport="shm", **options)
    ends = [ranks.end(rank) for rank in range(3)]
    assert [end.error for end in ends] == [""] * 3
    assert BLOCKING in ends[1].logged
    ranks.join(time.monotonic())


@pytest.mark.long
def test_all_ranks_may_be_stuck_and_each_prints_its_own_stacks(launch: Any, tmp_path: Path) -> None:
    """No loop runs anywhere, and no thread of Python either."""
    ranks = launch(programs.keep_the_lock, emulated=False, abort_after=None)
    for rank in range(3):
        assert ranks.end(rank).error == ""
        told = (tmp_path / f"stderr-{rank}").read_text()
        assert "a call has kept the interpreter's lock for more than 2 s" in told
        assert "in keep_the_lock" in told
    ranks.join(time.monotonic())


def test_a_task_that_never_returns_ends_the_job_and_is_named_with_its_stack(launch: Any) -> None:
    ranks = launch(programs.steps_for_ever, emulated=False, seconds=120.0)
    for rank in range(3):
        end = ranks.end(rank)
        assert end.origin is not None
        stage, task, cause = end.origin
        assert (stage, task) == (0, "F0@0")
        assert cause.startswith("OverdueError: F0@0 has not completed for 4.")
        assert (
            f"longer than abort_after, which is 4, on stage 0 (host {os.uname().nodename}, pid {ranks.pid(0)})" in cause
        )
        assert cause.endswith("time.sleep(self.seconds)")
    ranks.join(time.monotonic())
