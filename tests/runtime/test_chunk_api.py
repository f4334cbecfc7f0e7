"""Chunks and split backward as their user meets them: what is refused, what is named, and what a report shows."""

from __future__ import annotations

from typing import Any

import pytest
from runtime.toys import (
    TOLERANCE,
    Bomb,
    Ones,
    Trap,
    data,
    expect,
    fail_at,
    largest_difference,
    loss_fn,
    placed,
    stages,
)
from torch import nn

import rrfp
from rrfp.errors import ConfigError, PipelineAborted
from rrfp.model.tasks import Kind


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ([], "module is an empty list, must be an nn.Module, a list of them (one for each chunk), or a"),
        ([nn.Identity(), None], "module[1] is of type NoneType, must be an nn.Module"),
        ([Ones(), Ones()], "module[0] is a StageProgram, must be passed alone: one serves all chunks of a rank"),
        (
            {"a": nn.Identity()},
            "module is of type dict, must be an nn.Module, a list of them (one for each chunk), or a",
        ),
    ],
    ids=["empty", "none", "programs", "dict"],
)
def test_what_is_no_list_of_modules_is_refused(part: Any, message: str) -> None:
    for make in (lambda: rrfp.local([part]), lambda: rrfp.Pipeline(part, topology=rrfp.Topology(0, 1))):
        with pytest.raises(ConfigError) as caught:
            make()
        assert message in str(caught.value)


def test_a_module_list_is_a_list_of_chunks() -> None:
    actual, expected, batch = stages(4), stages(4), data(3)
    parts = [nn.ModuleList(chunks) for chunks in placed(actual, 2, "v")]
    with rrfp.local(parts, loss_fn=loss_fn, placement="v").blocking() as pipe:
        pipe.step(batch.inputs, batch.targets)
    expect(expected, batch)
    assert largest_difference(actual, expected) < TOLERANCE


@pytest.mark.parametrize("options", [{}, {"strict": "zb-h1"}, {"hint": "zb-h1"}])
def test_a_stage_program_without_weight_tasks_is_refused_where_backward_is_split(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"Ones has no weight\(\), needed for weight gradients of their own"):
        rrfp.local([Ones(), Ones()], split=True, **options)


def test_a_stage_program_runs_all_chunks_of_its_stage() -> None:
    with rrfp.local([Ones(), Ones()], chunks=2, placement="v").blocking() as pipe:
        result = pipe.step(microbatches=3)
    assert sorted({span.task.virtual_stage for span in result.trace.tasks if span.stage == 0}) == [0, 3]
    with rrfp.local([Ones(), Ones()], hint="bfw").blocking() as pipe:
        result = pipe.step(microbatches=3)
    assert {span.task.kind for span in result.trace.tasks} == {Kind.F, Kind.B}


@pytest.mark.parametrize("kind", ["F", "B"])
def test_a_failure_in_a_chunk_names_its_virtual_stage(kind: str) -> None:
    modules, check = stages(4), fail_at(1, Trap("out of luck"))
    modules[3] = nn.Sequential(modules[3], Bomb(check) if kind == "F" else Bomb(on_backward=check))
    batch = data(4)
    with (
        pytest.raises(PipelineAborted, match=rf"aborted by stage 0, task {kind}\d@3: Trap: out of luck"),
        rrfp.local(placed(modules, 2, "v"), loss_fn=loss_fn, placement="v", split=True).blocking() as pipe,
    ):
        pipe.step(batch.inputs, batch.targets)


def test_every_task_of_every_chunk_is_in_the_trace_and_in_the_breakdown() -> None:
    batch = data(5)
    with rrfp.local(placed(stages(6), 3, "v"), loss_fn=loss_fn, placement="v", split=True).blocking() as pipe:
        pipe.step(batch.inputs, batch.targets)
        result = pipe.step(batch.inputs, batch.targets)
    trace = result.trace
    spans = {span.task: span for span in trace.tasks}
    assert len(spans) == len(trace.tasks) == 3 * 6 * 5
    for task, span in spans.items():
        if task.kind is Kind.W:
            assert spans[task._replace(kind=Kind.B)].end <= span.start
    # Of the five edges, the one in the middle of a V stays on its stage.
    assert len(trace.messages) == 2 * 4 * 5
    for stage, parts in enumerate(result.breakdown):
        own = [span for span in trace.tasks if span.stage == stage]
        assert {span.task.virtual_stage for span in own} == {stage, 5 - stage}
        assert parts.compute == pytest.approx(sum(span.end - span.start for span in own))
        assert parts.compute + parts.blocking + parts.other == pytest.approx(result.seconds, rel=0.01)
