"""Which memory rule a stage follows in a step: what the graph, a forced order and the limit allow.

The staircase (with the reserve rule, where an order is forced) holds back least, and is right where no two virtual
stages are beside each other: on chains, with or without skip edges. The in-order banker is right on every graph. It
leaves less freedom, so only the stages that need it take it: see `branches`. Where an order is forced, these
are all stages of a graph that is no chain.

The paper's rule, where it is asked for, is right on any graph for stages of several chunks. For one chunk it is the
plain limit D < K, which is right only on a chain of such stages; elsewhere these stages take the banker.

Rules of different stages fit together, as the proofs in docs/memory-rules.md show.
"""

from __future__ import annotations

from rrfp.memory.admission import Admission, Limit
from rrfp.memory.banker import Banker
from rrfp.memory.branches import plain_stages
from rrfp.model.graph import TaskGraph
from rrfp.model.visits import Visits


def rule_of(graph: TaskGraph, stage: int, limit: Limit, visits: Visits, *, is_forced: bool) -> type[Admission]:
    """The rule of ``stage`` in one step.

    Args:
        graph: the pipeline's.
        stage: 0..N-1.
        limit: the stage's in this step.
        visits: of the step.
        is_forced: whether any task of any stage has to run in microbatch order.
    """
    is_chain = graph.is_chain and not visits.are_partial
    if limit.rule == "paper" and not (is_chain and _has_even_chunks(graph)):
        return Admission if graph.placement.chunks_of(stage) > 1 else Banker
    if is_chain:
        return Admission
    return Admission if not is_forced and stage in plain_stages(graph, visits.patterns) else Banker


def _has_even_chunks(graph: TaskGraph) -> bool:
    placement = graph.placement
    return len({placement.chunks_of(stage) for stage in range(placement.stages)}) == 1
