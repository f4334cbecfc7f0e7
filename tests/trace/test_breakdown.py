"""The breakdown: every instant of a step counts once, under the right heading."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.core.usage import WaitCause
from rrfp.costs import make_costs
from rrfp.lab.simulation import simulate
from rrfp.model.tasks import Kind, Task
from rrfp.trace.breakdown import Breakdown, breakdown, idle_waits, mean
from rrfp.trace.spans import StepTrace, TaskSpan, WaitSpan


def task(start: float, end: float, *, stage: int = 0, microbatch: int = 0) -> TaskSpan:
    return TaskSpan(stage, Task(Kind.F, microbatch, stage), start, end)


def trace(*spans: TaskSpan | WaitSpan, start: float = 0.0, end: float = 10.0) -> StepTrace:
    tasks = tuple(span for span in spans if isinstance(span, TaskSpan))
    waits = tuple(span for span in spans if isinstance(span, WaitSpan))
    return StepTrace(0, start, end, tasks, waits)


def total(part: Breakdown) -> float:
    return part.compute + part.blocking + part.other


def test_each_cause_has_its_own_part() -> None:
    waits = [WaitSpan(0, cause, 2.0 * i + 1, 2.0 * i + 2) for i, cause in enumerate(WaitCause)]
    tasks = [task(2.0 * i, 2.0 * i + 1) for i in range(6)]
    part = breakdown(trace(*waits, *tasks, end=11.0), 0)
    assert part == Breakdown(11.0, compute=6.0, input=1.0, memory=1.0, order=1.0, choice=1.0, drained=1.0, other=0.0)
    assert part.by_cause == dict.fromkeys(WaitCause, 1.0)
    assert (part.blocking, part.blocking_share, part.compute_share) == (5.0, 5 / 11, 6 / 11)


def test_what_no_span_covers_is_the_runtimes_own_time() -> None:
    assert breakdown(trace(task(1, 4), WaitSpan(0, WaitCause.INPUT, 5, 7), task(8, 10)), 0).other == 3.0


def test_after_the_last_task_nothing_is_left() -> None:
    """A merged trace ends with its last stage: the first to finish recorded nothing from then on."""
    part = breakdown(trace(task(0, 6), WaitSpan(0, WaitCause.INPUT, 7, 8)), 0)
    assert part == Breakdown(step=10.0, compute=6.0, input=1.0, drained=3.0)


def test_a_stage_without_any_span_is_all_other() -> None:
    assert breakdown(trace(task(0, 10)), 1) == Breakdown(step=10.0, compute=0.0, other=10.0)


def test_compute_wins_over_a_wait_that_overlaps_it() -> None:
    """A wait that is recorded late, or several tasks in flight at once."""
    spans = trace(task(1, 4), task(3, 6), WaitSpan(0, WaitCause.MEMORY, 0, 10), WaitSpan(0, WaitCause.INPUT, 5, 8))
    assert breakdown(spans, 0) == Breakdown(step=10.0, compute=5.0, memory=5.0)
    waits = [(wait.start, wait.end) for wait in idle_waits(spans, 0)]
    assert waits == [(0.0, 1.0), (6.0, 10.0)]


def test_spans_are_cut_to_the_step() -> None:
    spans = trace(WaitSpan(0, WaitCause.INPUT, -5, 2), task(2, 30), start=0.0, end=10.0)
    assert breakdown(spans, 0) == Breakdown(step=10.0, compute=8.0, input=2.0)


def test_an_empty_step_has_no_shares() -> None:
    part = breakdown(trace(start=3.0, end=3.0), 0)
    assert part == Breakdown(step=0.0, compute=0.0)
    assert (part.compute_share, part.blocking_share) == (0.0, 0.0)


@given(
    st.lists(st.tuples(st.floats(-1, 11), st.floats(0, 5)), max_size=8),
    st.lists(st.tuples(st.floats(-1, 11), st.floats(0, 5), st.sampled_from(WaitCause)), max_size=8),
)
def test_parts_are_never_negative_and_sum_to_the_step(
    tasks: list[tuple[float, float]], waits: list[tuple[float, float, WaitCause]]
) -> None:
    spans = trace(
        *(task(start, start + length) for start, length in tasks),
        *(WaitSpan(0, cause, start, start + length) for start, length, cause in waits),
    )
    part = breakdown(spans, 0)
    assert total(part) == pytest.approx(part.step, rel=1e-12)
    assert min(part.compute, part.other, *part.by_cause.values()) >= 0.0
    cut = idle_waits(spans, 0)
    edges = [edge for wait in cut for edge in (wait.start, wait.end)]
    assert edges == sorted(edges)


def test_a_simulated_step_is_compute_and_blocking_only() -> None:
    costs = make_costs("mllm", 4, 12, jitter="J2", latency="wire")
    for simulation in (simulate(costs, strict="1f1b"), simulate(costs, hint="bf", limit=2)):
        spans = simulation.result.trace()
        parts = [breakdown(spans, stage) for stage in range(4)]
        assert [part.compute for part in parts] == pytest.approx(list(costs.work()))
        assert all(part.step == spans.end for part in parts)
        assert max(part.other for part in parts) < 1e-12
    assert parts[0].memory > 0.0


def test_mean_averages_every_part() -> None:
    one, two = Breakdown(step=4.0, compute=3.0, input=1.0), Breakdown(step=6.0, compute=1.0, memory=3.0, other=2.0)
    assert mean([one, two]) == Breakdown(step=5.0, compute=2.0, input=0.5, memory=1.5, other=1.0)
    with pytest.raises(ValueError, match="no breakdowns"):
        mean([])


def test_its_text_is_short_and_leaves_out_what_is_nothing() -> None:
    part = Breakdown(0.2, compute=0.1, input=0.0501, drained=0.0499)
    assert str(part) == "200.0 ms: compute 50.0%, input 25.1%, nothing left 24.9%"
    assert str(Breakdown(0.0, compute=0.0)) == "0.0 ms: nothing"


def test_json_form_names_the_causes() -> None:
    document = json.loads(json.dumps(Breakdown(step=4.0, compute=1.0, input=2.0, order=0.5, other=0.5).to_json()))
    assert document == {
        "step": 4.0,
        "compute": 1.0,
        "blocking": 2.5,
        "blocking_by_cause": {"input": 2.0, "memory": 0.0, "order": 0.5, "choice": 0.0, "drained": 0.0},
        "other": 0.5,
    }
