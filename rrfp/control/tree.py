"""Who talks to whom.

Tensors travel along the edges of the graph. Everything that concerns all ranks (results, aborts, polls) travels along a
binary tree over the stages with stage 0 at the root, so that a rank keeps a handful of connections however deep the
pipeline is, and news reaches everybody in O(log N) hops.
"""

from __future__ import annotations

from rrfp.core.graph import Graph


def parent(stage: int) -> int | None:
    """The stage above ``stage``, None for the root."""
    return (stage - 1) // 2 if stage else None


def children(stage: int, stages: int) -> tuple[int, ...]:
    """The stages below ``stage``."""
    return tuple(child for child in (2 * stage + 1, 2 * stage + 2) if child < stages)


def peers(graph: Graph, stage: int) -> tuple[int, ...]:
    """Every stage that ``stage`` is connected to, ascending."""
    above = parent(stage)
    tree = set(children(stage, graph.placement.stages)) | (set() if above is None else {above})
    return tuple(sorted(tree | set(graph.neighbours(stage))))
