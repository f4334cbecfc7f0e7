"""The time of a step beyond that of its own order in the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.shared.steps import Step
from rrfp.costs import CostTable
from rrfp.engine.engine import run
from rrfp.hints.registry import Strict
from rrfp.memory.admission import Limit
from rrfp.model.schedule import Schedule
from rrfp.model.tasks import Kind
from rrfp.trace.spans import TaskSpan


@dataclass(frozen=True, slots=True)
class Overhead:
    """The engine runs the executed order strictly, with the table's durations and messages that take no time.

    Attributes:
        total: the step's time over the engine's, minus 1.
        in_sleeps: the same for the engine's time with the durations that the tasks really had: they slept too long.
    """

    total: float
    in_sleeps: float

    @classmethod
    def of(cls, step: Step, costs: CostTable) -> Overhead:
        """Compare a step with its table."""
        planned = makespan(step.order, costs)
        measured = makespan(step.order, _measured(step.spans, costs))
        return cls(step.seconds / planned - 1, measured / planned - 1)


def makespan(order: Schedule, costs: CostTable) -> float:
    """Seconds that ``order`` takes."""
    hints = [Strict(lambda view: order) for _ in order.orders]
    return run(costs, hints, [Limit()] * costs.stages).makespan


def _measured(spans: Sequence[Sequence[TaskSpan]], costs: CostTable) -> CostTable:
    """The durations that the tasks really had."""
    rows = {Kind.F: costs.forward.copy(), Kind.B: costs.backward.copy()}
    if costs.weight is not None:
        rows[Kind.W] = costs.weight.copy()
    for span in (span for stage in spans for span in stage):
        rows[span.task.kind][span.task.virtual_stage, span.task.microbatch] = span.end - span.start
    return replace(costs, forward=rows[Kind.F], backward=rows[Kind.B], weight=rows.get(Kind.W))
