"""Tied parameters between real processes over zmq, with and without data-parallel replicas."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import runtime.tied_processes as programs
from batches import long
from fork_server import fork_server
from runtime.test_processes import DEAD_S
from runtime.tied_processes import Program, TiedProcesses
from runtime.toys import TOLERANCE

import rrfp

__all__ = ["fork_server"]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Any]:
    running: list[TiedProcesses] = []

    def start(stages: int, program: Program, replicas: int = 1, **options: Any) -> TiedProcesses:
        running.append(TiedProcesses(tmp_path, stages, program, replicas, **options))
        return running[-1]

    yield start
    for processes in running:
        processes.kill()


@pytest.mark.parametrize(("stages", "hint", "transport_bytes"), [(2, "bf", 1 << 20), (3, "bfw", 1500)])
def test_copies_train_bit_by_bit_as_one_parameter_in_one_process(
    launch: Any, stages: int, hint: str, transport_bytes: int
) -> None:
    how = {"hint": hint, "split": hint == "bfw", "max_message_bytes": transport_bytes}
    ranks = launch(stages, programs.three_steps, deterministic=True, **how)
    ends = [ranks.hear(rank) for rank in range(stages)]
    assert [end.error for end in ends] == [None] * stages
    assert all(end.value[0] for end in ends)
    assert ends[0].value[2] == ends[-1].value[2]


@pytest.mark.parametrize(
    "options",
    [
        {},
        long({"placement": "v", "split": True}),
        {"placement": "looped", "split": True},
        long({"placement": "looped"}),
    ],
    ids=["copies", "one object, split", "a copy and one object, split", "a copy and one object"],
)
def test_with_replicas_the_sum_over_both_counts_everything_once(launch: Any, options: dict[str, Any]) -> None:
    """Two replicas of two stages; the total of two accumulated steps is on all ranks with a copy."""
    ranks = launch(2, programs.three_steps, replicas=2, deterministic=True, **options)
    ends = [ranks.hear(rank) for rank in range(4)]
    assert [end.error for end in ends] == [None] * 4
    assert all(end.value[1] < TOLERANCE for end in ends)
    weights = [weight for end in ends for weight in end.value[2]]
    assert len(weights) == 4
    assert all(weight == weights[0] for weight in weights)


@pytest.mark.parametrize(
    ("program", "victim"),
    [(programs.hang_in_the_last_weight, 2), (programs.hang_in_the_first_weight, 0)],
    ids=["the gradients", "the sum"],
)
def test_a_rank_that_is_killed_while_another_waits_for_its_tie_is_named(
    launch: Any, program: Program, victim: int
) -> None:
    ranks = launch(3, program, split=True)
    assert ranks.hear(victim) == "hangs"
    time.sleep(0.3)  # until the others have come to where they wait
    killed = time.monotonic()
    os.kill(ranks.processes[victim].pid, signal.SIGKILL)
    for rank in {0, 1, 2} - {victim}:
        end = ranks.hear(rank)
        assert isinstance(end.error, rrfp.PipelineAborted)
        assert end.error.origin.stage == victim
        assert end.error.origin.cause.startswith("PeerLostError: ")
        assert end.at - killed < DEAD_S
