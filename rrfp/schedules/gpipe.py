"""GPipe: all forwards, then all backwards, both in microbatch order (Huang et al., 2019)."""

from __future__ import annotations

from rrfp.core.graph import Graph
from rrfp.core.schedule import Schedule
from rrfp.core.tasks import Kind, Task
from rrfp.schedules.needs import Needs

NEEDS = Needs(chunks=1)


def gpipe(graph: Graph, microbatches: int) -> Schedule:
    """Every stage holds all M microbatches. One chunk a stage."""
    stages = graph.placement.stages
    orders = tuple(
        tuple(Task(kind, m, stage) for kind in (Kind.F, Kind.B) for m in range(microbatches)) for stage in range(stages)
    )
    return Schedule("gpipe", orders)
