"""What a group of ranks could have done if they had known everything at once: the measure of coordination.

A group's task begins when the last of its ranks begins it, and ends when the last has ended. Between two tasks all its
lanes wait. One further core, which learns of an arrival when the last rank has it, tells since when a task was ready on
all ranks; from then until the next task begins is what coordination cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rrfp.core import events as ev
from rrfp.core.stage_core import StageCore
from rrfp.hints.registry import create_hint
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Mode, StepId, Task
from rrfp.trace.spans import StepTrace

_Happening = tuple[float, int, ev.Event]


@dataclass(frozen=True, slots=True)
class GroupStep:
    """One step of one group, in seconds.

    Attributes:
        seconds: from the first task's beginning to the last one's end.
        gaps: for each task but the first, how long it was ready on all ranks with all lanes idle.
        orders_differ: whether two ranks ran different tasks at one place.
    """

    seconds: float
    gaps: tuple[float, ...]
    orders_differ: bool

    @property
    def share(self) -> float:
        """The share of the step that coordination took."""
        return sum(self.gaps) / self.seconds


def measure(graph: TaskGraph, stage: int, limit: Limit, microbatches: int, traces: Sequence[StepTrace]) -> GroupStep:
    """Replay a step.

    Args:
        graph: of the pipeline.
        stage: the group's.
        limit: within which it ran.
        microbatches: M.
        traces: of the group's ranks, on one clock.
    """
    orders = [[span.task for span in trace.tasks] for trace in traces]
    starts = [max(spans) for spans in zip(*([s.start for s in trace.tasks] for trace in traces), strict=True)]
    ends = [max(spans) for spans in zip(*([s.end for s in trace.tasks] for trace in traces), strict=True)]
    step = StepId(0, Mode.TRAIN, microbatches)
    arrivals: dict[Task, float] = {}
    for trace in traces:
        for message in trace.messages:
            if message.arrived is not None and message.target == stage:
                arrivals[message.task] = max(arrivals.get(message.task, 0.0), message.arrived)
    happenings: list[_Happening] = [(time, 0, ev.Arrived(step, task)) for task, time in arrivals.items()]
    core = StageCore(graph, stage, create_hint("bf"), limit)
    core.apply(ev.StepOpened(0, Mode.TRAIN, microbatches))
    happenings.sort(key=lambda each: each[0])
    gaps, free_at = [], None
    for task, start, end in zip(orders[0], starts, ends, strict=True):
        ready_at = _ready_at(core, happenings, start, free_at)
        if free_at is not None:
            gaps.append(start - ready_at)
        _run(core, task)
        while happenings and happenings[0][0] <= end:
            core.apply(happenings.pop(0)[2])
        free_at = end
    return GroupStep(ends[-1] - starts[0], tuple(gaps), any(order != orders[0] for order in orders))


def _ready_at(core: StageCore, happenings: list[_Happening], start: float, free_at: float | None) -> float:
    """When, after ``free_at`` and before ``start``, a task was ready on all ranks; all until ``start`` is taken in."""
    ready_at = start if core.decide() is None or free_at is None else min(free_at, start)
    while happenings and happenings[0][0] <= start:
        time, _, event = happenings.pop(0)
        core.apply(event)
        if ready_at >= start and core.decide() is not None:
            ready_at = time if free_at is None else max(time, free_at)
    return min(ready_at, start)


def _run(core: StageCore, task: Task) -> None:
    core.apply(ev.Enqueued(task))
    for instruction in core.apply(ev.Completed(task)):
        if isinstance(instruction, ev.Send):
            core.apply(ev.SendReleased(task, instruction.peer))
        elif isinstance(instruction, ev.ReduceChunk):
            core.apply(ev.ChunkReduced(instruction.virtual_stage))
