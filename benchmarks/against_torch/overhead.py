"""What a step took beyond what its own order takes in the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from rrfp.core.admission import Limit
from rrfp.core.schedule import Schedule
from rrfp.core.tasks import Kind, Task
from rrfp.costs import CostTable
from rrfp.costs.latency import with_latency
from rrfp.hints.schedule import Strict
from rrfp.sim.engine import run
from rrfp.trace.plain import from_plain
from rrfp.trace.spans import StepTrace, merge

#: What rank 0 tells of a step.
Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Overhead:
    """See the module's docstring.

    Attributes:
        total: the step's time over the engine's, with the table's durations and one transfer time, minus 1.
        in_tasks: the part of it due to tasks that took longer than the table says; None without a trace.
        between: the rest of it; None without a trace.
    """

    total: float
    in_tasks: float | None = None
    between: float | None = None

    @classmethod
    def of(cls, line: Line, costs: CostTable, transfer_s: float) -> Overhead:
        """Compare a step with the engine, which runs the executed order strictly.

        Args:
            line: the step.
            costs: its table.
            transfer_s: what every message takes.
        """
        latency = f"constant:{transfer_s}"
        schedule = Schedule("executed", tuple(tuple(map(Task.parse, order)) for order in line["order"]))
        planned = _makespan(schedule, with_latency(costs, latency))
        total = line["seconds"] / planned - 1
        if not line["traces"]:
            return cls(total)
        measured = _makespan(schedule, with_latency(_measured(_trace(line), costs), latency))
        return cls(total, measured / planned - 1, line["seconds"] / measured - 1)


def transfer_of(line: Line) -> float | None:
    """Seconds from the call of ``send`` to the arrival being filed, median over the step's messages."""
    if not line["traces"]:
        return None
    ends = [(message.sent, message.arrived) for message in _trace(line).messages]
    return median(arrived - sent for sent, arrived in ends if sent is not None and arrived is not None)


def _trace(line: Line) -> StepTrace:
    return merge(from_plain(part) for part in line["traces"])


def _makespan(schedule: Schedule, costs: CostTable) -> float:
    hints = [Strict(lambda view: schedule) for _ in schedule.orders]
    return run(costs, hints, [Limit()] * costs.stages).makespan


def _measured(trace: StepTrace, costs: CostTable) -> CostTable:
    """The durations that the lanes really needed."""
    rows = {Kind.F: costs.forward.copy(), Kind.B: costs.backward.copy()}
    for span in trace.tasks:
        rows[span.task.kind][span.task.virtual_stage, span.task.microbatch] = span.end - span.start
    return replace(costs, forward=rows[Kind.F], backward=rows[Kind.B])
