"""Schedules written as patterns: a sequence of (kind, chunk) slots without microbatches.

Each kind of each chunk runs the microbatches in order 0, 1, 2, ... A pattern may have more slots than there are
microbatches: surplus slots stay empty. So a pattern that is published for some M only (a multiple of N, or at least
2N - 1) also serves a smaller M: it is the schedule for the larger M without the tasks of its last microbatches. No task
reads another microbatch's output, so the remaining tasks cannot deadlock if the full schedule does not. No stage holds
more than in the full schedule, and run strictly no task starts later.
"""

from __future__ import annotations

from collections.abc import Iterable

from rrfp.core.graph import Graph
from rrfp.core.tasks import Kind, Mode, Task

#: A kind of task and the local chunk that it runs on.
Slot = tuple[Kind, int]


def fill(slots: Iterable[Slot], graph: Graph, stage: int, microbatches: int) -> tuple[Task, ...]:
    """The order of one stage. Weight slots of a virtual stage whose backward is not split stay empty."""
    tasks = {
        (kind, chunk): iter([Task(kind, m, v) for m in range(microbatches)])
        for chunk, v in enumerate(graph.placement.virtual_stages(stage))
        for kind in graph.kinds(v, Mode.TRAIN)
    }
    no_tasks = iter(())
    filled = (next(tasks.get(slot, no_tasks), None) for slot in slots)
    return tuple(task for task in filled if task is not None)
