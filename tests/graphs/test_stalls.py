"""Stalls and failures on graphs: the part is named beside the task."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from graphs.graph_models import Block, Model, loss_fn, model
from runtime.ranks import ThreadedRanks
from runtime.test_watchdog import STALL_S, wait_for_log
from runtime.toys import Hold
from torch import Tensor

import rrfp
from rrfp.pipeline.faces import BlockingPipeline


class Calling(Block):
    """Calls ``what`` before its forward."""

    def __init__(self, block: Block, what: Any) -> None:
        super().__init__()
        self.linear = block.linear
        self._what = what

    def forward(self, x: Tensor | None = None, **read: Tensor | None) -> Tensor:
        self._what(0)
        return super().forward(x, **read)


class NoAudio(rrfp.Hint):
    """Never runs the audio encoder's module on stage 1."""

    may_wait = True

    def choose(self, ready: rrfp.ReadySet, view: rrfp.View) -> rrfp.Task | None:
        return next((task for task in ready if task.virtual_stage != 3), None)


def ranks_of(own: Model, **options: Any) -> ThreadedRanks:
    def step(stage: int, pipe: BlockingPipeline) -> Any:
        return pipe.step(own.inputs, own.targets, visits=own.visits)

    return ThreadedRanks(own.by_stage(), step, graph=own.graph, loss_fn=loss_fn, **options)


def one_microbatch(own: Model) -> Model:
    """The first microbatch of ``own``, which visits every part."""
    inputs = {name: values[:1] for name, values in own.inputs.items()}
    return Model(own.graph, own.modules, inputs, targets=own.targets[:1])


def test_the_part_that_a_slow_rank_runs_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """A chunk of both encoders and of the language model on each of two stages; stage 1 stops in its audio chunk.

    One microbatch, because the lanes of one process take turns: with another one stage 0 would still wait for its turn.
    """
    caplog.set_level(logging.WARNING)
    hold, own = Hold(), one_microbatch(model("colocated"))
    own.modules["audio"][1] = Calling(own.modules["audio"][1], hold)  # type: ignore[arg-type]
    ranks = ranks_of(own, hint="bf", stall_after=STALL_S)
    try:
        line = wait_for_log(caplog, "has been running F0@3 (audio.1) for")
    finally:
        hold.release.set()
    assert line.startswith("stage 0 has been idle for")
    assert "stage 1 has been running F0@3 (audio.1) for" in line
    assert [outcome.error for outcome in ranks.join()] == [None] * 2


def test_a_deadlock_names_the_parts_that_are_waited_for() -> None:
    """Microbatches 1 and 3 visit the audio encoder, whose second module stage 1 never runs."""
    ranks = ranks_of(model("colocated"), hint=NoAudio(), stall_after=STALL_S)
    for outcome in ranks.join():
        head, first, second = outcome.abort.origin.cause.splitlines()
        assert head == "DeadlockError: deadlock in step 0: every rank is idle and nothing is in flight"
        assert first.startswith("  stage 0 waits for: F1@4 (lm.0) (F1@3 (audio.1) owed by stage 1); ")
        assert "B1@0 (vision.0) (B1@1 (vision.1) owed by stage 1)" in first
        assert "F1@3 (audio.1) (ready, but hint NoAudio does not choose it)" in second
        assert "F1@5 (lm.1) (F1@4 (lm.0) owed by stage 0)" in second


def test_a_failure_names_the_part() -> None:
    def fail(number: int) -> None:
        raise ValueError("enough")

    own = model("two_sources")
    own.modules["audio"][0] = Calling(own.modules["audio"][0], fail)  # type: ignore[arg-type]
    for outcome in ranks_of(own, hint="bf").join():
        assert (outcome.abort.origin.stage, outcome.abort.origin.task) == (2, "F0@2 (audio)")
        assert "stage 2, task F0@2 (audio): " in str(outcome.abort)
