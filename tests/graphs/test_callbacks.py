"""Callbacks on a graph see stages, not parts: what they held, and the failure of a part by its name."""

from __future__ import annotations

from typing import Any

import pytest
from graphs.graph_models import MICROBATCHES, loss_fn, model
from pipeline.notes import Notes

import rrfp
from rrfp.errors import PipelineAborted

VISITS = {"vision": [False] * MICROBATCHES, "audio": [False, False, False, True]}


def test_figures_of_a_step_are_by_stage_with_all_parts_of_it() -> None:
    own, notes = model("colocated"), Notes()
    with rrfp.local(own.by_stage(), graph=own.graph, loss_fn=loss_fn, limit=2, callbacks=[notes]).blocking() as pipe:
        results = [pipe.step(own.inputs, own.targets, visits=VISITS), pipe.step(own.inputs, own.targets)]
        results.append(pipe.evaluate(own.inputs, own.targets, visits=VISITS))
    assert notes.methods == ["run_begun", *["step_begun", "step_ended"] * 2, "evaluation_ended", "run_ended"]
    events = [*notes.of("step_ended"), *notes.of("evaluation_ended")]
    for event, result in zip(events, results, strict=True):
        assert (event.loss, event.microbatches) == (result.loss, MICROBATCHES)
        assert [stage.stage for stage in event.stages] == [0, 1]
        assert [stage.slots for stage in event.stages] == [6, 6]  # two for each of the three modules
        assert tuple(stage.peaks for stage in event.stages) == result.peaks
        assert all(1 <= stage.peaks.held <= 6 for stage in event.stages)
    skipping, visiting = (sum(stage.sent_bytes for stage in event.stages) for event in events[:2])
    assert visiting > skipping  # what a skipped part would send is not sent


def test_an_abort_names_the_part_that_failed() -> None:
    own, notes = model("two_sources"), Notes()

    def fail(*_: Any) -> None:
        raise ValueError("no sound")

    own.modules["audio"][0].register_forward_pre_hook(fail)
    pipeline = rrfp.local(own.by_stage(), graph=own.graph, loss_fn=loss_fn, callbacks=[notes])
    with (
        pytest.raises(PipelineAborted, match=r"task F\d@2 \(audio\): ValueError: no sound"),
        pipeline.blocking() as pipe,
    ):
        pipe.step(own.inputs, own.targets, visits=own.visits)
    (event,) = notes.of("aborted")
    assert (event.origin.stage, event.origin.cause) == (2, "ValueError: no sound")
    assert event.origin.task.endswith("@2 (audio)")
