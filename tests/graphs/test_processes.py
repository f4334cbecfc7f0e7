"""Graphs over real processes: the gradients of one process, and one clear error where ranks differ or one dies."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import fork_server  # noqa: F401 - a fixture
from graphs.graph_models import MODELS, model
from graphs.graph_processes import (
    GraphRanks,
    declared_elsewhere,
    one_step,
    steps_for_ever,
    with_other_visits,
    with_other_weights,
)

from rrfp.testing.reference import reference

QUICK = ["two_sources", "unet", "several_losses"]


def expected(name: str) -> tuple[float | None, dict[str, Any]]:
    alone = model(name)
    result = reference(
        alone.modules, alone.inputs, alone.targets, loss_fn=alone.loss_fn, graph=alone.graph, visits=alone.visits
    )
    return result.loss, {key: grad.numpy() for key, grad in alone.gradients().items() if grad is not None}


@pytest.mark.parametrize(
    ("name", "transport"),
    [
        *((name, "auto") for name in QUICK),
        *(
            pytest.param(name, transport, marks=pytest.mark.long)
            for name in MODELS
            for transport in ("auto", "zmq", "shm")
            if (name, transport) not in [(quick, "auto") for quick in QUICK]
        ),
    ],
)
def test_processes_compute_what_one_does_bitwise(tmp_path: Path, name: str, transport: str) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    ranks = GraphRanks(tmp_path, name, one_step, deterministic=True, transport=transport, limit=1)
    try:
        loss, wanted = expected(name)
        found: dict[str, Any] = {}
        for stage in range(ranks.stages):
            end = ranks.end(stage)
            assert not end.error, end.text
            assert end.value[0] == loss
            found |= end.value[1]
        assert found.keys() == wanted.keys()
        for key, gradient in wanted.items():
            assert (found[key] == gradient).all(), key
    finally:
        torch.set_default_dtype(before)
        ranks.kill()


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("two_sources", with_other_visits, "visits: microbatch 1 skips 'vision' on stage 0 and not on stage 4"),
        ("several_losses", with_other_weights, "weights[3] is 4 on stage 0 and 5 on stage 2: must be the same"),
    ],
    ids=["visits", "weights where losses are computed"],
)
def test_ranks_with_other_arguments_are_named_on_all(tmp_path: Path, name: str, body: Any, message: str) -> None:
    ranks = GraphRanks(tmp_path, name, body, hint="bf")
    try:
        ends = [ranks.end(stage) for stage in range(ranks.stages)]
        assert {end.error for end in ends} == {"PipelineAborted"}
        assert all(message in end.text for end in ends)
    finally:
        ranks.kill()


def test_ranks_that_declare_another_graph_are_refused_at_the_start(tmp_path: Path) -> None:
    ranks = GraphRanks(tmp_path, declared_elsewhere, one_step, hint="bf")
    try:
        ends = [ranks.end(stage) for stage in range(ranks.stages)]
        assert {end.error for end in ends} == {"ConfigError"}
        assert all("graph" in end.text and "reads y=root" in end.text and "stage 1" in end.text for end in ends)
    finally:
        ranks.kill()


def test_a_killed_rank_of_a_branch_is_named_by_all_others(tmp_path: Path) -> None:
    """Stage 2, the audio encoder, shares no edge with the vision stages."""
    ranks = GraphRanks(tmp_path, "two_sources", steps_for_ever, hint="bf")
    try:
        for stage in range(ranks.stages):
            assert ranks.hear(stage) == "stepping"
        ranks.processes[2].kill()
        since = time.monotonic()
        for stage in (0, 1, 3, 4):
            end = ranks.end(stage)
            assert end.error == "PipelineAborted"
            assert end.origin is not None
            assert end.origin[0] == 2
        ranks.processes[2].join(10)
        ranks.join(since)
    finally:
        ranks.kill()
