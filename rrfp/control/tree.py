"""Who talks to whom.

Tensors travel along the edges of the graph, between ranks of one replica that have the same place in their groups. The
members of a group talk to its leader. Everything that concerns all ranks (results, aborts, polls) travels along a
binary tree over the ranks with rank 0 at the root, so that a rank keeps a handful of connections however large the job
is, and news reaches everybody in O(log) hops. Ranks whose numbers follow each other are connected too: if one dies, the
others still reach each other.
"""

from __future__ import annotations

from rrfp.core.graph import Graph
from rrfp.core.topology import Topology


def parent(rank: int) -> int | None:
    """The rank above ``rank``, None for the root."""
    return (rank - 1) // 2 if rank else None


def children(rank: int, world: int) -> tuple[int, ...]:
    """The ranks below ``rank``."""
    return tuple(child for child in (2 * rank + 1, 2 * rank + 2) if child < world)


def peers(graph: Graph, place: Topology) -> tuple[int, ...]:
    """Every rank that the one at ``place`` is connected to, ascending."""
    above = parent(place.rank)
    tree = set(children(place.rank, place.world)) | (set() if above is None else {above})
    neighbours = {place.rank_of(stage) for stage in graph.neighbours(place.stage)}
    if place.world > place.stages:
        neighbours |= {rank for rank in (place.rank - 1, place.rank + 1) if 0 <= rank < place.world}
    group = set(place.group) if place.member == 0 else {place.leader}
    return tuple(sorted((tree | neighbours | group) - {place.rank}))
