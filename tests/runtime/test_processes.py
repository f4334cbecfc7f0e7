"""Real processes: they compute together, and they end together, whatever happens to one of them.

Over transport auto, which is shared memory here, and in the long version over zmq and collective too; a few always over
auto and zmq.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import runtime.processes as programs
from batches import long
from fork_server import fork_server
from freezers import VERSIONS, freezer
from runtime.processes import Processes, Program
from transports.curved import curve
from transports.gloo_backend import over_gloo

__all__ = ["fork_server"]

#: Seconds from a failure to the error on every rank: a live rank reports it, a dead one is detected.
TOLD_S, DEAD_S = 2.0, 3.0

#: What the ranks' messages go through; auto is shared memory here.
TRANSPORTS = ("auto", long("zmq"), long("collective"))

over_both = pytest.mark.parametrize("launch", ["auto", "zmq"], indirect=True)


@pytest.fixture(params=TRANSPORTS)
def launch(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    running: list[Processes] = []

    def start(
        count: int, program: Program, seconds: float = 0.01, chunks: Sequence[int] = (), **options: Any
    ) -> Processes:
        over = {"transport": over_gloo if request.param == "collective" else request.param, **options}
        running.append(Processes(tmp_path, count, program, seconds, chunks, **over))
        return running[-1]

    yield start
    for processes in running:
        processes.kill()


@over_both
def test_every_rank_gets_the_same_result(launch: Any) -> None:
    ranks = launch(4, programs.three_steps)
    ends = [ranks.end(stage) for stage in range(4)]
    assert [end.error for end in ends] == [""] * 4
    assert all(end.value == ends[0].value for end in ends)
    assert all(loss is not None and len(losses) == 4 for loss, losses, _ in ends[0].value)
    ranks.join(time.monotonic())
    assert [process.exitcode for process in ranks.processes] == [0] * 4


def test_ranks_with_different_numbers_of_chunks_are_all_told_both(launch: Any) -> None:
    ranks = launch(4, programs.three_steps, chunks=[2, 2, 2, 1])
    ends = [ranks.end(stage) for stage in range(4)]
    assert {(end.error, end.text) for end in ends} == {
        (
            "ConfigError",
            "chunks is 2 on stage 0 and 1 on stage 3: must be the same on all ranks (values as the rendezvous store "
            "has them)",
        )
    }
    assert max(end.at for end in ends) - min(end.at for end in ends) < TOLD_S
    ranks.join(time.monotonic())


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_killed_rank_is_named_on_every_other(launch: Any, victim: int) -> None:
    ranks = launch(4, programs.steps_for_ever)
    for stage in range(4):
        assert ranks.hear(stage) == "stepping"
    killed = time.monotonic()
    os.kill(ranks.pid(victim), signal.SIGKILL)
    for stage in {0, 1, 2, 3} - {victim}:
        end = ranks.end(stage)
        assert end.error == "PipelineAborted"
        assert end.origin[0] == victim
        assert end.origin[2].startswith("PeerLostError: ")
        assert end.at - killed < DEAD_S
    ranks.join(killed)


def test_a_killed_rank_is_named_over_encrypted_tcp(launch: Any) -> None:
    ranks = launch(3, programs.steps_for_ever, transport=curve)
    for stage in range(3):
        assert ranks.hear(stage) == "stepping"
    killed = time.monotonic()
    os.kill(ranks.pid(1), signal.SIGKILL)
    for stage in (0, 2):
        end = ranks.end(stage)
        assert (end.error, end.origin[0]) == ("PipelineAborted", 1)
        assert end.at - killed < DEAD_S
    ranks.join(killed)


def test_a_killed_rank_is_named_at_once_while_its_children_keep_its_sockets(launch: Any) -> None:
    ranks = launch(3, programs.fork_a_worker, patience=20.0)
    worker = ranks.hear(1)
    try:
        for stage in range(3):
            assert ranks.hear(stage) == "stepping"
        killed = time.monotonic()
        os.kill(ranks.pid(1), signal.SIGKILL)
        for stage in (0, 2):
            end = ranks.end(stage)
            assert end.origin == (1, None, "PeerLostError: its process ended")
            assert end.at - killed < TOLD_S
    finally:
        os.kill(worker, signal.SIGKILL)
    ranks.join(killed)


def test_a_rank_that_pauses_for_less_than_its_peers_patience_goes_on(launch: Any) -> None:
    ranks = launch(3, programs.pause_between_steps, patience=6.0)
    for stage in range(3):
        assert ranks.hear(stage) == "stepping"
    os.kill(ranks.pid(1), signal.SIGSTOP)
    for stage in range(3):
        ranks.connections[stage].send("go on")
        ranks.connections[stage].send("go on")
    time.sleep(2.5)  # the pause is the subject
    os.kill(ranks.pid(1), signal.SIGCONT)
    assert [ranks.end(stage).error for stage in range(3)] == [""] * 3


@pytest.mark.parametrize("version", VERSIONS)
def test_a_frozen_rank_goes_on_without_a_line_if_thawed_in_time_and_is_lost_after_the_patience(
    tmp_path: Path, version: str
) -> None:
    """As in a paused container: no signal and no state says that it stands still."""
    with freezer(version) as group:
        ranks = Processes(tmp_path, 3, programs.pause_between_steps, transport="auto", patience=1.5, stall_after=30.0)
        try:
            for stage in range(3):
                assert ranks.hear(stage) == "stepping"
            group.take(ranks.pid(1))
            group.freeze()
            for stage in range(3):
                ranks.connections[stage].send("go on")
            time.sleep(0.7)  # the pause is the subject
            group.thaw()
            for stage in range(3):
                assert ranks.hear(stage) == "stepping"
            group.freeze()
            for stage in (0, 2):
                ranks.connections[stage].send("go on")
            ends = [ranks.end(stage) for stage in (0, 2)]
            assert {end.origin for end in ends} == {
                (1, None, "PeerLostError: its process is frozen with its cgroup, for 1.5 s already")
            }
            assert [end.logged for end in ends] == [[], []]
            group.thaw()
            ranks.connections[1].send("go on")
            assert ranks.end(1).error == "PipelineAborted"
        finally:
            group.thaw()
            ranks.kill()


@over_both
def test_a_silent_rank_is_named_and_ends_once_it_wakes(launch: Any) -> None:
    ranks = launch(3, programs.steps_for_ever)
    for stage in range(3):
        assert ranks.hear(stage) == "stepping"
    stopped = time.monotonic()
    os.kill(ranks.pid(1), signal.SIGSTOP)
    for stage in (0, 2):
        end = ranks.end(stage)
        assert end.origin[0] == 1
        assert end.at - stopped < DEAD_S
    os.kill(ranks.pid(1), signal.SIGCONT)
    woken = time.monotonic()
    assert ranks.end(1).error == "PipelineAborted"
    ranks.join(woken)


def test_ctrl_c_ends_all_ranks(launch: Any) -> None:
    ranks = launch(3, programs.steps_for_ever)
    for stage in range(3):
        assert ranks.hear(stage) == "stepping"
    interrupted = time.monotonic()
    for stage in range(3):
        os.kill(ranks.pid(stage), signal.SIGINT)
    for stage in range(3):
        end = ranks.end(stage)
        assert end.error in ("KeyboardInterrupt", "PipelineAborted")
        assert end.at - interrupted < DEAD_S
    ranks.join(interrupted)


def test_ctrl_c_on_one_rank_is_named_on_the_others(launch: Any) -> None:
    ranks = launch(3, programs.steps_for_ever)
    for stage in range(3):
        assert ranks.hear(stage) == "stepping"
    interrupted = time.monotonic()
    os.kill(ranks.pid(1), signal.SIGINT)
    assert ranks.end(1).error == "KeyboardInterrupt"
    for stage in (0, 2):
        end = ranks.end(stage)
        assert end.origin == (1, None, "KeyboardInterrupt")
        assert end.at - interrupted < TOLD_S
    ranks.join(interrupted)


def test_a_rank_that_dies_between_steps_is_named_in_the_next_one(launch: Any) -> None:
    ranks = launch(3, programs.die_between_steps)
    assert ranks.hear(1) == "dying"
    died = time.monotonic()
    for stage in (0, 2):
        end = ranks.end(stage)
        assert end.origin[0] == 1
        assert end.at - died < DEAD_S
    ranks.join(died)


def test_a_rank_that_leaves_early_is_named_on_the_others(launch: Any) -> None:
    ranks = launch(3, programs.leave_early)
    left = ranks.end(1)
    assert left.error == ""
    for stage in (0, 2):
        end = ranks.end(stage)
        assert end.origin[0] == 1
        assert "its program left after 1 step(s)" in end.origin[2]
        assert end.at - left.at < TOLD_S


def test_neither_the_error_nor_the_exit_waits_for_a_lane(launch: Any) -> None:
    """Every forward takes half a minute; stage 2 gives up."""
    ranks = launch(3, programs.hang_on_the_lane, seconds=30.0)
    for stage in range(3):
        assert ranks.hear(stage) == "stepping"
    began = time.monotonic()
    assert ranks.end(2).error == "ValueError"
    for stage in (0, 1):
        end = ranks.end(stage)
        assert end.origin == (2, None, "ValueError: enough")
        assert end.at - began < 0.5 + TOLD_S
    ranks.join(began)
