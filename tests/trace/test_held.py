"""What a stage held at every moment of a step."""

from __future__ import annotations

from rrfp.costs import make_costs
from rrfp.lab.simulation import simulate
from rrfp.model.tasks import Kind, Task
from rrfp.trace.held import Level, held_levels, peak_held
from rrfp.trace.spans import StepTrace, TaskSpan


def span(kind: Kind, microbatch: int, start: float, *, stage: int = 0, virtual_stage: int = 0) -> TaskSpan:
    """A task of one second."""
    return TaskSpan(stage, Task(kind, microbatch, virtual_stage), start, start + 1.0)


def levels(*spans: TaskSpan) -> list[tuple[float, int]]:
    return [(level.time, level.held) for level in held_levels(StepTrace(0, 0.0, 9.0, spans), 0)]


def test_a_microbatch_is_held_from_its_forward_to_its_last_task() -> None:
    whole = levels(span(Kind.F, 0, 0), span(Kind.F, 1, 1), span(Kind.B, 0, 2), span(Kind.B, 1, 5))
    assert whole == [(0.0, 1), (1.0, 2), (3.0, 1), (6.0, 0)]
    split = levels(span(Kind.F, 0, 0), span(Kind.B, 0, 2), span(Kind.W, 0, 4))
    assert split == [(0.0, 1), (5.0, 0)]
    forward_only = levels(span(Kind.F, 0, 0), span(Kind.F, 1, 3))
    assert forward_only == [(0.0, 1), (1.0, 0), (3.0, 1), (4.0, 0)]


def test_an_end_comes_before_a_start_at_the_same_instant() -> None:
    assert levels(span(Kind.F, 0, 0), span(Kind.F, 1, 1)) == [(0.0, 1), (1.0, 0), (1.0, 1), (2.0, 0)]


def test_each_chunk_counts_and_other_stages_do_not() -> None:
    other = span(Kind.F, 0, 0, stage=1, virtual_stage=1)
    assert levels(span(Kind.F, 0, 0), span(Kind.F, 0, 2, virtual_stage=2), span(Kind.B, 0, 4), other) == [
        (0.0, 1), (2.0, 2), (3.0, 1), (5.0, 0)
    ]  # fmt: skip


def test_a_backward_whose_forward_was_lost_holds_nothing() -> None:
    assert levels(span(Kind.B, 0, 0)) == []
    assert peak_held(StepTrace(0, 0.0, 1.0), 0) == 0


def test_peaks_are_those_of_the_simulator() -> None:
    looped = simulate(make_costs("mllm", 4, 9, jitter="J2"), hint="bf", limit=2)
    v_shaped = simulate(make_costs("mllm", 4, 9, jitter="J2", chunks=2, placement="v", split=True), strict="zb-v")
    for simulation in (looped, v_shaped):
        trace = simulation.result.trace()
        assert [peak_held(trace, stage) for stage in range(4)] == [peak.held for peak in simulation.peaks]
        assert held_levels(trace, 0)[0] == Level(trace.tasks[0].start, 1)
