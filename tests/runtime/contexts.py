"""A rank without a pipeline: its context, for tests of one part of it."""

from __future__ import annotations

from rrfp import Topology
from rrfp.core.stage_core import StageCore
from rrfp.hints import create_hint
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Task
from rrfp.runtime.context import RankContext, RankSettings
from rrfp.testing.clock import TimerLane
from rrfp.transports.base import Rendezvous, TransportContext
from rrfp.transports.inproc import InprocTransport
from rrfp.transports.rendezvous import LocalRendezvous


def fail(error: BaseException, task: Task | None = None) -> None:
    """Nothing fails in these tests."""
    raise error


def context_of(topology: Topology, graph: TaskGraph, met: Rendezvous | None = None) -> RankContext:
    """The rank at ``topology``, connected with all others where they ``met``; its transport and lane not started."""
    peers = () if met is None else tuple(rank for rank in range(topology.world) if rank != topology.rank)
    rendezvous = LocalRendezvous() if met is None else met
    transport = InprocTransport(TransportContext(topology.rank, peers, "run", rendezvous))
    return RankContext.create(RankSettings(topology), core_of(topology, graph), TimerLane(), transport, fail)


def core_of(topology: Topology, graph: TaskGraph) -> StageCore:
    """A core of the rank at ``topology``."""
    return StageCore(graph, topology.stage, create_hint("bf"))
