"""A GradScaler over real processes: replicas, sharded parameters, and a rank that dies meanwhile."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from compute.gloo_ranks import GOOD, cases_of, outcomes
from fork_server import fork_server
from pipeline import scaled_cases
from pipeline.scaled_training import new_scaler
from runtime.processes import BATCH, Processes
from torch import nn

from rrfp.pipeline.faces import BlockingPipeline

__all__ = ["fork_server"]


@pytest.mark.slow
def test_all_ranks_of_replicas_and_groups_skip_the_same_steps(tmp_path: Path) -> None:
    cases = cases_of(scaled_cases)
    assert len(cases) == 2
    found = outcomes("pipeline.scaled_cases", cases, 4, tmp_path)
    assert found == {case: [GOOD] * 4 for case in cases}, "\n".join(map(str, found.values()))


def dies_while_the_others_compare(stage: int, pipe: BlockingPipeline, connection: Connection) -> None:
    scaler = pipe.scale(new_scaler())
    pipe.step(BATCH.inputs, BATCH.targets)
    if stage == 1:
        connection.send("dying")
        connection.close()
        os._exit(7)
    scaler.step(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))


def test_a_rank_that_dies_is_named_on_those_that_compare_overflows(tmp_path: Path) -> None:
    ranks = Processes(tmp_path, 3, dies_while_the_others_compare)
    try:
        assert ranks.hear(1) == "dying"
        began = time.monotonic()
        for stage in (0, 2):
            end = ranks.end(stage)
            assert end.error == "PipelineAborted"
            assert end.origin is not None
            assert end.origin[0] == 1
        ranks.join(began)
    finally:
        ranks.kill()
