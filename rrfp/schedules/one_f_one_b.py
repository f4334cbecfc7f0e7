"""1F1B: warm up with N - 1 - i forwards on stage i, then alternate (Narayanan et al., PipeDream-Flush, 2021)."""

from __future__ import annotations

from rrfp.core.graph import Graph
from rrfp.core.schedule import Schedule
from rrfp.core.tasks import Kind, Task
from rrfp.schedules.needs import Needs

NEEDS = Needs(chunks=1)


def one_f_one_b(graph: Graph, microbatches: int) -> Schedule:
    """Stage i holds at most min(M, N - i) microbatches. One chunk a stage."""
    stages = graph.placement.stages
    return Schedule("1f1b", tuple(_order(stage, stages, microbatches) for stage in range(stages)))


def _order(stage: int, stages: int, microbatches: int) -> tuple[Task, ...]:
    warm_up = min(microbatches, stages - 1 - stage)
    order = [Task(Kind.F, m, stage) for m in range(warm_up)]
    for m in range(microbatches - warm_up):
        order += [Task(Kind.F, warm_up + m, stage), Task(Kind.B, m, stage)]
    order += [Task(Kind.B, m, stage) for m in range(microbatches - warm_up, microbatches)]
    return tuple(order)
