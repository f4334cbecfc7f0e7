"""Schedules written as patterns: which kind of which chunk comes when, before anyone says which microbatch.

Each kind of each chunk takes the microbatches in order 0, 1, 2, ... A pattern may have more slots than there are
microbatches: those left over stay empty. So a pattern that is textbook for some M only (a multiple of N, or at least
2N - 1) serves smaller ones: it is the schedule for the larger M without the tasks of its last microbatches. No task of
one microbatch reads another's, so what is left cannot deadlock if the whole does not; no stage holds more than in the
whole, and run strictly no task starts later.
"""

from __future__ import annotations

from collections.abc import Iterable

from rrfp.core.graph import Graph
from rrfp.core.tasks import Kind, Mode, Task

#: A kind of task and the local chunk that it runs on.
Slot = tuple[Kind, int]


def fill(slots: Iterable[Slot], graph: Graph, stage: int, microbatches: int) -> tuple[Task, ...]:
    """The order of one stage.

    Args:
        slots: the pattern. Weight slots of a virtual stage whose backward is not split stay empty.
        graph: the dependency graph.
        stage: which stage.
        microbatches: M.
    """
    tasks = {
        (kind, chunk): iter([Task(kind, m, v) for m in range(microbatches)])
        for chunk, v in enumerate(graph.placement.virtual_stages(stage))
        for kind in graph.kinds(v, Mode.TRAIN)
    }
    nothing = iter(())
    filled = (next(tasks.get(slot, nothing), None) for slot in slots)
    return tuple(task for task in filled if task is not None)
