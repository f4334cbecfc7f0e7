"""The parts of a rank that most of its other parts use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rrfp.compute.lanes.base import Lane
from rrfp.compute.mailbox import Mailbox
from rrfp.core.graph import Graph
from rrfp.core.tasks import Task
from rrfp.core.topology import Topology
from rrfp.graphs.model_graph import ModelGraph
from rrfp.runtime.activity import RankActivity
from rrfp.runtime.departures import Departures
from rrfp.runtime.observer import Observer, Unobserved
from rrfp.runtime.supervisor import TaskSupervisor
from rrfp.trace.recorder import Recorder
from rrfp.transports.base import Transport


class Fail(Protocol):
    """Ends the pipeline on every rank."""

    def __call__(self, error: BaseException, task: Task | None = None) -> None:
        """Because of ``error`` on this rank, while it ran ``task``."""


@dataclass(frozen=True, slots=True)
class RankContext:
    """One rank: where it is, and the parts that its other parts share.

    Attributes:
        topology: where the rank is.
        graph: of the pipeline.
        transport: the way to the peers.
        lane: where tasks run.
        fail: ends the pipeline on every rank.
        supervisor: runs coroutines.
        activity: the call that the rank is in.
        departures: peers that left in order.
        mailbox: tensors between tasks.
        recorder: the trace of the step.
        observer: watches the run.
        model: of the model's parts, if it has any.
    """

    topology: Topology
    graph: Graph
    transport: Transport
    lane: Lane
    fail: Fail
    supervisor: TaskSupervisor
    activity: RankActivity
    departures: Departures
    mailbox: Mailbox
    recorder: Recorder
    observer: Observer
    model: ModelGraph | None = None

    @classmethod
    def create(
        cls,
        topology: Topology,
        graph: Graph,
        transport: Transport,
        lane: Lane,
        fail: Fail,
        observer: Observer | None = None,
        model: ModelGraph | None = None,
    ) -> RankContext:
        """Make the parts that need nothing else."""
        activity = RankActivity(lane.now)
        return cls(
            topology,
            graph,
            transport,
            lane,
            fail,
            TaskSupervisor(fail),
            activity,
            Departures(activity),
            Mailbox(graph, topology.stage, None if model is None else model.feeds),
            Recorder(topology.stage, lane.now),
            Unobserved() if observer is None else observer,
            model,
        )
