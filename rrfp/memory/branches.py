"""Where branches of a graph join: which stages are plain, so that the staircase is safe on them.

Two virtual stages are *beside* each other if neither depends on the other. Where an output of each of them goes into
one virtual stage further on, that is a join: it needs both of the same microbatch, and a rule that counts no more than
slots may give the one to another microbatch than the other.

A stage is *plain* if it takes no part in this: every virtual stage that depends on one of its chunks c depends on
nothing that is beside c, and all stages that hold such a virtual stage are plain too. What counts is each microbatch's
own graph, without what it skips: a skip edge beside a longer path joins two branches once the path is interrupted.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from rrfp.model.graph import TaskGraph
from rrfp.model.visits import Skipped

#: A set of virtual stages: bit v stands for v.
_Bits = int


def plain_stages(graph: TaskGraph, patterns: frozenset[Skipped]) -> frozenset[int]:
    """The stages that are plain in a step whose microbatches skip sets of virtual stages, ``patterns``."""
    if graph.is_chain and not any(patterns):
        return frozenset(range(graph.placement.stages))
    return _plain_stages(graph, patterns)


@functools.lru_cache(maxsize=64)
def _plain_stages(graph: TaskGraph, patterns: frozenset[Skipped]) -> frozenset[int]:
    stage_of, stages = graph.stage_of, range(graph.placement.stages)
    plain = set(stages)
    downstream: list[set[int]] = [set() for _ in stages]
    for skipped in patterns:
        below = _ancestors(graph, skipped)
        for v, stage in enumerate(stage_of):
            after = [w for w, ancestors in enumerate(below) if ancestors >> v & 1]
            downstream[stage].update(stage_of[w] for w in after)
            if any(_is_joined_beside(below, v, w) for w in after):
                plain.discard(stage)
    while above_others := {stage for stage in plain if not downstream[stage] <= plain}:
        plain -= above_others
    return frozenset(plain)


def _ancestors(graph: TaskGraph, skipped: Skipped) -> Sequence[_Bits]:
    """By virtual stage, all that it depends on in the graph of a microbatch that skips ``skipped``."""
    ancestors: list[_Bits] = []
    for v, predecessors in enumerate(graph.predecessors):
        sources = () if v in skipped else [u for u in predecessors if u not in skipped]
        ancestors.append(functools.reduce(lambda bits, u: bits | ancestors[u] | 1 << u, sources, 0))
    return ancestors


def _is_joined_beside(ancestors: Sequence[_Bits], v: int, w: int) -> bool:
    """Whether ``w``, which depends on ``v``, also depends on a virtual stage beside ``v``."""
    others = ancestors[w] & ~ancestors[v] & ~(1 << v)
    return any(others >> u & 1 and not ancestors[u] >> v & 1 for u in range(w))
