"""How many of the stages compute or wait, over time."""

from __future__ import annotations

import pytest

from rrfp.core.usage import WaitCause
from rrfp.costs import make_costs
from rrfp.lab.simulation import simulate
from rrfp.lab.traces.timeline import shares
from rrfp.model.tasks import Kind, Task
from rrfp.trace.breakdown import breakdown, idle_waits
from rrfp.trace.spans import StepTrace, TaskSpan, WaitSpan


def test_an_interval_counts_the_part_that_a_span_covers() -> None:
    """Two stages from 10 s on: stage 0 computes for 3 s, stage 1 waits for 1 s of the second interval."""
    task = TaskSpan(0, Task(Kind.F, 0, 0), 10.0, 13.0)
    wait = WaitSpan(1, WaitCause.INPUT, 12.5, 13.5)
    trace = StepTrace(0, 10.0, 14.0, (task,), (wait,))
    found = shares(trace, trace.waits, 2, 0.0, 4.0, 2)
    assert found == {Kind.F: [0.5, 0.25], WaitCause.INPUT: [0.0, 0.25]}
    assert shares(trace, trace.waits, 2, 2.0, 3.0, 1) == {Kind.F: [0.5], WaitCause.INPUT: [0.25]}


def test_the_shares_of_a_step_sum_to_its_breakdown() -> None:
    trace = simulate(make_costs("mllm", 4, 12, jitter="J2"), hint="bf", limit=2).result.trace()
    waits = [wait for stage in range(4) for wait in idle_waits(trace, stage)]
    found = shares(trace, waits, 4, 0.0, trace.end, 7)
    parts = [breakdown(trace, stage) for stage in range(4)]
    for cause in (WaitCause.INPUT, WaitCause.MEMORY, WaitCause.DRAINED):
        expected = sum(part.by_cause[cause] for part in parts)
        assert sum(found[cause]) * trace.end / 7 * 4 == pytest.approx(expected)
    compute = sum(map(sum, (found[Kind.F], found[Kind.B])))
    assert compute * trace.end / 7 * 4 == pytest.approx(sum(part.compute for part in parts))
