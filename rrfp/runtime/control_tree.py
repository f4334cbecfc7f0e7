"""Who talks to whom.

Tensors travel along the edges of the graph, between ranks of one replica that have the same place in their groups. The
members of a group talk to its leader, ranks with copies of a tied parameter to the one with the first copy, and where
replicas share microbatches or keep copies of each other's batches, the ranks of a stage to one another. Everything
that concerns all ranks (results, aborts, status) travels along a binary tree over the ranks with rank 0 at the root, so
that a rank keeps a handful of connections however large the job is, and a message reaches all ranks in O(log) hops.
Ranks whose numbers follow each other are connected too: if one dies, the others still reach each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum

from rrfp.compute.gradients.ties import Tie
from rrfp.model.graph import TaskGraph
from rrfp.model.topology import Topology


def parent(rank: int) -> int | None:
    """The rank above ``rank``, None for the root."""
    return (rank - 1) // 2 if rank else None


def children(rank: int, world: int) -> tuple[int, ...]:
    return tuple(child for child in (2 * rank + 1, 2 * rank + 2) if child < world)


def below(rank: int, world: int) -> Iterator[int]:
    first, last = rank, rank
    while first < world:
        yield from range(first, min(last + 1, world))
        first, last = 2 * first + 1, 2 * last + 2


def neighbours(rank: int, world: int) -> tuple[int, ...]:
    """The ranks next to ``rank``: above and below."""
    above = parent(rank)
    return (() if above is None else (above,)) + children(rank, world)


def towards(rank: int, other: int) -> int:
    """The first rank on the way from ``rank`` to ``other``, another one."""
    step = other
    while step > rank:
        above = (step - 1) // 2
        if above == rank:
            return step
        step = above
    return (rank - 1) // 2


class Shares(Enum):
    """What replicas run of one another."""

    NOTHING = False
    MICROBATCHES = "dealt"
    FORWARDS = True


def holder_of(replica: int, replicas: int) -> int:
    """The replica that keeps the copies of ``replica``: neighbours often share a host."""
    return (replica + replicas // 2) % replicas


def held_by(replica: int, replicas: int) -> int:
    """The replica whose copies ``replica`` keeps."""
    return (replica - replicas // 2) % replicas


def peers(
    graph: TaskGraph,
    topology: Topology,
    ties: Iterable[Tie] = (),
    shares: Shares = Shares.NOTHING,
    *,
    copies: bool = False,
) -> tuple[int, ...]:
    """Every rank that the one at ``topology`` is connected to, ascending; see `data_peers`."""
    exchanging = data_peers(graph, topology, ties, shares, copies=copies)
    connected = {*neighbours(topology.rank, topology.world), *exchanging}
    if topology.world > topology.stages:
        connected |= {rank for rank in (topology.rank - 1, topology.rank + 1) if 0 <= rank < topology.world}
    group = set(topology.group) if topology.member == 0 else {topology.leader}
    return tuple(sorted((connected | group) - {topology.rank}))


def data_peers(
    graph: TaskGraph,
    topology: Topology,
    ties: Iterable[Tie] = (),
    shares: Shares = Shares.NOTHING,
    *,
    copies: bool = False,
) -> tuple[int, ...]:
    """Those of `peers` with which the rank at ``topology`` exchanges tensors, ascending.

    ``copies``: each rank keeps a copy of another replica's batch.
    """
    replicas = range(topology.replicas) if shares is Shares.FORWARDS else (topology.replica,)
    next_to = {topology.rank_of(stage, r) for stage in graph.neighbours(topology.stage) for r in replicas}
    tied = {topology.rank_of(stage) for tie in ties for stage in _tied_to(tie, graph, topology.stage)}
    counterparts = topology.mesh.counterparts(topology.rank)
    alike = set(counterparts) if shares is not Shares.NOTHING else set[int]()
    if copies:
        own, count = topology.replica, topology.replicas
        alike |= {counterparts[holder_of(own, count)], counterparts[held_by(own, count)]}
    return tuple(sorted((next_to | tied | alike) - {topology.rank}))


def _tied_to(tie: Tie, graph: TaskGraph, stage: int) -> set[int]:
    """The stages that ``stage`` exchanges the gradients of ``tie`` with: all with a copy, if it has the first."""
    first, *others = (graph.placement.stage_of(v) for v in tie.virtual_stages)
    if stage == first:
        return set(others)
    return {first} if stage in others else set()
