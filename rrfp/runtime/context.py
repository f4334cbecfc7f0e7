"""The parts of a rank that most of its other parts use."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rrfp import timeouts
from rrfp.arbiter.loop import LoopTime
from rrfp.compute.gradients.ties import TiedGradients
from rrfp.compute.lanes.base import Lane
from rrfp.compute.mailbox import Mailbox
from rrfp.core.stage_core import StageCore
from rrfp.devices.base import Device
from rrfp.errors import ConfigError, Origin, PeerLostError, ProtocolError
from rrfp.log import get_logger
from rrfp.memory.round_trips import FollowedLimits
from rrfp.model.graph import TaskGraph
from rrfp.model.model_graph import ModelGraph
from rrfp.model.tasks import StepId, Task
from rrfp.model.topology import Topology
from rrfp.runtime.start.handshake import StartDigests
from rrfp.runtime.supervisor import TaskSupervisor
from rrfp.trace.event_log import write_event_log
from rrfp.trace.spans import Recorder
from rrfp.transports.base import Channel, Message, MessageKind, Transport

logger = get_logger(__name__)


class RankActivity:
    """Follows the calls of a rank's caller, which every rank makes in the same order."""

    def __init__(self, now: Callable[[], float]) -> None:
        #: The step that the rank is in, until it has the reports of all ranks; None between steps.
        self.step: StepId | None = None
        #: Training steps before that step, or before the last one.
        self.training_step = 0
        #: The call of that step has returned, and no caller waits for the reports.
        self.has_returned = False
        self.steps_ended = 0
        #: The collective call between two steps that it is in, such as ``clip_grad_norm_``; empty if none.
        self.gathering = ""
        #: Collective calls between steps that it has completed.
        self.gatherings_ended = 0
        #: When anything last happened, in seconds of the clock ``now``.
        self.active_at = 0.0
        self._now = now

    def begin_step(self, step: StepId, training_step: int = 0) -> None:
        """The caller began ``step``, before which there were so many training steps."""
        self.step, self.training_step = step, training_step
        self.touch()

    def return_step(self) -> None:
        """The rank has done its part of the step, and the caller goes on."""
        self.has_returned = True

    def await_reports(self) -> None:
        """A caller waits for the reports of the step."""
        if self.step is not None and self.has_returned:
            self.has_returned = False
            self.touch()

    def end_step(self) -> None:
        self.step = None
        self.has_returned = False
        self.steps_ended += 1

    @contextmanager
    def gather(self, call: str) -> Iterator[int]:
        """In here the rank takes part in ``call``, which all ranks make between two steps; yields its number."""
        self.touch()
        self.gathering = call
        yield self.gatherings_ended  # what raises in there ends the pipeline, so there is nothing to take back
        self.gathering = ""
        self.gatherings_ended += 1

    def touch(self) -> None:
        self.active_at = self._now()


class ClosedPeers:
    """The peers that left, each with the number of steps and collective calls that it took part in."""

    def __init__(self, activity: RankActivity) -> None:
        self._activity = activity
        self._steps: dict[int, int] = {}
        self._gatherings: dict[int, int] = {}

    def __contains__(self, peer: int) -> bool:
        return peer in self._steps

    def on_message(self, message: Message) -> None:
        """A CLOSED message arrived; raises as `check` if this rank is in a call."""
        steps, gatherings = message.body.get("steps"), message.body.get("gatherings")
        if not isinstance(steps, int) or not isinstance(gatherings, int):
            raise ProtocolError(f"rank {message.sender} closed without saying after how many steps and gatherings")
        self._steps[message.sender] = steps
        self._gatherings[message.sender] = gatherings
        self.check()

    def check(self) -> None:
        """This rank begins a call, or is in one: a PeerLostError if a peer left before it."""
        activity = self._activity
        if activity.step is not None:
            number = activity.step.number
            if (peer := _left_before(number, self._steps)) is not None:
                steps = self._steps[peer]
                raise PeerLostError(
                    peer, f"its program left after {steps} step(s), but step {number} was begun elsewhere"
                )
        if activity.gathering and (peer := _left_before(activity.gatherings_ended, self._gatherings)) is not None:
            raise PeerLostError(peer, f"its program left, but {activity.gathering} was called elsewhere")

    def own_message(self) -> Message:
        body = {"steps": self._activity.steps_ended, "gatherings": self._activity.gatherings_ended}
        return Message(Channel.CONTROL, MessageKind.CLOSED, body=body)


def _left_before(number: int, ended: dict[int, int]) -> int | None:
    """The first peer that took part in fewer calls than up to ``number``."""
    return next((peer for peer, count in ended.items() if count <= number), None)


class Observer:
    """Called on the rank's loop or a thread that watches it. Must return at once, and raise nothing. Does nothing."""

    def stalled(self, text: str) -> None:
        """A rank, or a loop, has made no progress for ``stall_after`` seconds; ``text`` names the reason."""

    def aborted(self, origin: Origin) -> None:
        """The pipeline is aborted; may be called more than once."""


class Fail(Protocol):
    """Ends the pipeline on every rank."""

    def __call__(self, error: BaseException, task: Task | None = None) -> None:
        """Because of ``error`` on this rank, while it ran ``task``."""


#: Sums the gradients of a virtual stage over the replicas.
Reduce = Callable[[int], Awaitable[None]]

#: How the ranks of a group agree on an order: a leader's, or by proposing until they agree (the paper's way).
Coordination = Literal["leader", "agreement"]


@dataclass(frozen=True, slots=True)
class RankSettings:
    """How one rank runs."""

    #: Where it is; None: the only rank of its stage.
    topology: Topology | None = None
    coordination: Coordination = "leader"
    #: Tasks enqueued and not complete, at most; None: as many as the lane wants, and where a group has a leader at
    #: least 2, so that its order travels while the task before is running.
    depth: int | None = None
    #: Seconds of idleness inside a step after which all ranks are asked why.
    stall_after: float = timeouts.STALL_AFTER_S
    #: Seconds that a task, or a turn of a rank's loop, may take before the pipeline ends; None: any.
    abort_after: float | None = None
    #: The newest training steps whose traces are kept.
    trace_steps: int = 0
    #: The lane's; None for a CPU.
    device: Device | None = None
    observer: Observer = field(default_factory=Observer)
    #: Of the model's parts, if it has any.
    model: ModelGraph | None = None
    #: Sums the gradients of a virtual stage over the replicas.
    reduce: Reduce | None = None
    #: The rank's copies of tied parameters, if it may have any; all ranks agree on them.
    ties: TiedGradients | None = None
    #: What ranks agreed on before they connected, compared once they are.
    agreement: StartDigests = field(default_factory=StartDigests)
    #: The limits of ``limit="auto"``, of this rank alone; None: the core's does not change.
    limits: FollowedLimits | None = None
    #: Where the events of the core go when it stalls or aborts; None: nowhere.
    event_log: str | os.PathLike[str] | None = None
    #: Where replicas share microbatches, the seeds of their random numbers.
    replica_seeds: Sequence[int] | None = None
    #: Whether they share forwards, each rank for itself.
    claims: bool = False
    #: Whether each rank keeps a copy of another replica's batch.
    copies: bool = False


@dataclass(frozen=True, slots=True)
class RankContext:
    """One rank: where it is, and the parts that its other parts share."""

    topology: Topology
    graph: TaskGraph
    transport: Transport
    lane: Lane
    fail: Fail
    supervisor: TaskSupervisor
    activity: RankActivity
    #: Peers that left in order.
    closed_peers: ClosedPeers
    mailbox: Mailbox
    recorder: Recorder
    #: Of the rank's loop.
    time: LoopTime
    #: Writes the events of the core into a file, where the caller wants one.
    save_events: EventSaver
    settings: RankSettings

    @classmethod
    def create(
        cls,
        settings: RankSettings,
        core: StageCore,
        lane: Lane,
        transport: Transport,
        fail: Fail,
        time: LoopTime = LoopTime(),  # noqa: B008 - immutable
    ) -> RankContext:
        """Make the parts that need nothing else."""
        activity, model = RankActivity(lane.now), settings.model
        topology = settings.topology or Topology(core.stage, core.graph.placement.stages)
        return cls(
            topology,
            core.graph,
            transport,
            lane,
            fail,
            TaskSupervisor(fail),
            activity,
            ClosedPeers(activity),
            Mailbox(core.graph, topology.stage, None if model is None else model.feeds),
            Recorder(topology.stage, lane.now),
            time,
            EventSaver(settings.event_log, topology, core),
            settings,
        )


class EventSaver:
    """Writes the event log of a rank into ``folder``, if there is one."""

    def __init__(self, folder: str | os.PathLike[str] | None, topology: Topology, core: StageCore) -> None:
        self._folder = folder
        self._topology = topology
        self._core = core
        self._has_tried = False
        #: See `StageRunner.job`; known once all ranks have met.
        self.job: str | None = None

    def __call__(self, why: str) -> None:
        """Write the log as it is now; ``why`` says what has happened."""
        self._has_tried = True
        if self._folder is None:
            return
        name, stage = self._topology.name, self._topology.stage
        try:
            path = write_event_log(self._folder, self._topology, self._core, why, self.job)
        except ConfigError as error:
            logger.warning("%s has not written its event log: %s", name, error, stage=stage)
        else:
            logger.info("%s has written %s", name, path, stage=stage)

    def end(self) -> None:
        """Write the log at the end of a run that has reported nothing: a report on a stall stays."""
        if not self._has_tried:
            self("the pipeline was left")
