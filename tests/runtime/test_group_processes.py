"""Real processes in groups and replicas: a rank that dies or falls silent is soon named on every other one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import runtime.processes as programs
from fork_server import fork_server
from runtime.processes import Processes, Program
from runtime.test_processes import DEAD_S, TRANSPORTS

from rrfp.model.mesh import Mesh

__all__ = ["fork_server"]

#: Rank 2 leads stage 1, rank 3 follows it.
MESH = Mesh((("pp", 2), ("tp", 2)))

Launch = Callable[[Mesh, Program], Processes]


@pytest.fixture(params=TRANSPORTS)
def launch(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Launch]:
    running: list[Processes] = []

    def start(mesh: Mesh, program: Program) -> Processes:
        options: Any = {"transport": request.param, "allow_insecure": request.param == "collective"}
        running.append(Processes(tmp_path, mesh.size, program, 0.002, mesh=mesh, **options))
        return running[-1]

    yield start
    for processes in running:
        processes.kill()


def test_every_rank_of_a_mesh_gets_the_same_results(launch: Launch) -> None:
    mesh = Mesh((("dp", 2), ("pp", 2), ("tp", 2)))
    ranks = launch(mesh, programs.emulated_steps)
    ends = [ranks.end(rank) for rank in range(mesh.size)]
    assert [(end.error, end.text) for end in ends] == [("", "")] * mesh.size
    # All but the peaks, which are the replica's own.
    assert len({tuple((number, seconds) for number, _, seconds in end.value) for end in ends}) == 1
    ranks.join(time.monotonic())


@pytest.mark.parametrize(
    ("victim", "how"),
    [
        pytest.param(2, signal.SIGKILL, id="a leader dies"),
        pytest.param(3, signal.SIGKILL, id="a follower dies"),
        pytest.param(1, signal.SIGKILL, id="a follower of stage 0 dies"),
        pytest.param(3, signal.SIGSTOP, id="a follower falls silent"),
        pytest.param(2, signal.SIGSTOP, id="a leader falls silent"),
    ],
)
def test_a_rank_that_dies_or_falls_silent_is_named_on_every_other(
    launch: Launch, victim: int, how: signal.Signals
) -> None:
    ranks = launch(MESH, programs.emulated_steps_for_ever)
    for rank in range(MESH.size):
        assert ranks.hear(rank) == "stepping"
    struck = time.monotonic()
    os.kill(ranks.pid(victim), how)
    for rank in {*range(MESH.size)} - {victim}:
        end = ranks.end(rank)
        assert end.error == "PipelineAborted"
        assert end.origin is not None
        assert (end.origin[0], end.culprit) == (MESH.place_of(victim).stage, victim), end.text
        assert end.origin[2].startswith("PeerLostError: ")
        assert end.at - struck < DEAD_S
    if how is signal.SIGSTOP:
        os.kill(ranks.pid(victim), signal.SIGCONT)
        assert ranks.end(victim).error == "PipelineAborted"
    ranks.join(time.monotonic())
