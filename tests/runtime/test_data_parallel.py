"""Stages by replicas: gradients are those of one process over all microbatches, and a failure reaches every rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from compute.gloo_ranks import GOOD, outcomes
from fork_server import fork_server
from runtime import replica_processes as griefs
from runtime.replica_processes import Grief, Replicas
from torch import nn

import rrfp
from rrfp.errors import ConfigError
from rrfp.model.mesh import Mesh

__all__ = ["fork_server"]

#: Seconds from the begin of a step to the error on every rank: a live rank reports it, a dead one is detected.
TOLD_S, DEAD_S = 2.5, 5.5


@pytest.mark.slow
@pytest.mark.long
def test_gradients_of_two_replicas_are_the_references(tmp_path: Path) -> None:
    """Ragged microbatches, weights, chunks, accumulation, clipping, a learned loss; where it is promised, bitwise."""
    case = "gradients_of_two_replicas_are_the_references"
    found = outcomes("runtime.data_parallel_cases", [case], 4, tmp_path)[case]
    assert found == [GOOD] * 4, "\n".join(found)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Any]:
    running: list[Replicas] = []

    def start(victim: int, grief: Grief) -> Replicas:
        running.append(Replicas(tmp_path, victim, grief))
        return running[-1]

    yield start
    for replicas in running:
        replicas.kill()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_dies_while_its_like_waits_in_a_collective_is_named_on_all(launch: Any, victim: int) -> None:
    replicas = launch(victim, griefs.die)
    survivors = {0, 1, 2, 3} - {victim}
    ends = {rank: replicas.end(rank) for rank in survivors}
    for end in ends.values():
        assert end.error == "PipelineAborted", end.text
        assert end.origin[0] == victim, end.text
        assert end.origin[2].startswith("PeerLostError: ")
        assert end.value < DEAD_S
    _join(replicas, survivors)


@pytest.mark.slow
def test_an_error_reaches_a_rank_that_waits_in_a_collective(launch: Any) -> None:
    replicas = launch(1, griefs.fail)
    ends = {rank: replicas.end(rank) for rank in range(4)}
    for end in ends.values():
        assert end.origin == (1, "F1@0", "ValueError: enough")
        assert end.value < TOLD_S
    _join(replicas, {0, 1, 2, 3})


@pytest.mark.slow
def test_a_rank_with_another_mesh_is_named_before_its_replicas_wait_for_it(launch: Any) -> None:
    replicas = launch(3, griefs.elsewhere)
    for rank in range(4):
        end = replicas.end(rank)
        assert end.error == "ConfigError"
        assert end.text.startswith("mesh is 'pp 2, dp 2' on stage 0, dp 0 (rank 0) and 'pp 2, tp 2' on stage 1, dp 1")
    _join(replicas, {0, 1, 2, 3})


def _join(replicas: Replicas, ranks: set[int]) -> None:
    """Every process ends, although a thread of it may still be in a collective."""
    deadline = time.monotonic() + 10
    for rank in ranks:
        replicas.processes[rank].join(max(0.0, deadline - time.monotonic()))
        assert replicas.processes[rank].exitcode == 0


def test_several_replicas_without_torch_distributed_are_one_line_that_says_what_to_call() -> None:
    place = rrfp.Topology.at(1, Mesh((("pp", 1), ("dp", 2))))
    with pytest.raises(ConfigError, match=r"topology has 2 replicas.*call torch\.distributed\.init_process_group\(\)"):
        rrfp.Pipeline(nn.Linear(1, 1), topology=place)


def test_a_place_is_told_once() -> None:
    place: Any = rrfp.Topology(0, 1)
    with pytest.raises(ConfigError, match="topology and mesh both place"):
        rrfp.Pipeline(nn.Linear(1, 1), topology=place, mesh=place)
    with pytest.raises(ConfigError, match="coordinate goes with mesh"):
        rrfp.Pipeline(nn.Linear(1, 1), topology=place, coordinate=("tp",))
