"""The real shell in virtual time for stages of T ranks, and for replicas of them: each rank a pipeline of its own.

As `sim.shell.runs` does it for single ranks. Words between the ranks of a group take their time as messages do, and
the tasks of a group meet (`sim.shell.group_lane`). Orders, starts, messages and peaks are those that
`rrfp.lab.cluster.simulation` tells for the same arguments, to the last bit: so each of the two checks the other.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from sim.shell.group_lane import GroupLane, Meetings, MeetingStage
from sim.shell.runs import patience, run_ranks

from rrfp import Hint, StepResult, Topology
from rrfp.arbiter.coordination import GroupMessageKind
from rrfp.core.group_step import GroupMembership
from rrfp.core.ready_set import ForcedOrder
from rrfp.core.stage_core import StageCore
from rrfp.core.usage import Peaks
from rrfp.costs import CostTable
from rrfp.engine.engine import graph_of
from rrfp.lab.cluster.coordination import Agreement, Leader
from rrfp.lab.cluster.simulation import slowest_durations
from rrfp.lab.emulated import Durations
from rrfp.lab.generators.latency import Cube, RankLatencies
from rrfp.lab.simulated_transport import SimulatedTransport
from rrfp.memory.admission import Limit
from rrfp.model.mesh import Mesh, MeshPosition
from rrfp.model.tasks import Kind, Mode, Task
from rrfp.pipeline.faces import PipelineHandle
from rrfp.pipeline.local_ranks import LocalRanks
from rrfp.pipeline.options import complete
from rrfp.runtime.context import RankSettings
from rrfp.runtime.control_tree import peers
from rrfp.runtime.stage_runner import StageRunner
from rrfp.runtime.steps.plan import StepPlanner
from rrfp.trace.spans import MessageSpan, TaskSpan
from rrfp.transports.base import Message, MessageKind, TransportContext
from rrfp.transports.rendezvous import LocalRendezvous

_GROUP_KINDS = frozenset(MessageKind(kind.value) for kind in GroupMessageKind)


@dataclass(frozen=True, slots=True)
class Replica:
    """What one copy of the pipeline takes.

    Attributes:
        costs: of tasks; the latencies are not used.
        latencies: of messages, by rank; says how many ranks a group has.
        delays: seconds by which each rank lengthens its part of a task, V x M x T by kind.
    """

    costs: CostTable
    latencies: RankLatencies
    delays: Mapping[Kind, Cube] = field(default_factory=dict)

    def durations(self, member: int) -> Durations:
        """What each task takes on ``member`` alone."""
        costs, delays = self.costs, self.delays

        def duration(task: Task) -> float:
            seconds = costs.duration(task.kind.value, task.virtual_stage, task.microbatch)
            if task.kind in delays:
                seconds += float(delays[task.kind][task.virtual_stage, task.microbatch, member])
            return seconds

        return duration


@dataclass(frozen=True)
class GroupRun:
    """What all ranks did.

    Attributes:
        mesh: how they are laid out.
        results: by rank, what each step told its caller.
        peaks: by rank, the most that it held in the last step.
    """

    mesh: Mesh
    results: tuple[tuple[StepResult, ...], ...]
    peaks: tuple[Peaks, ...]

    def orders(self, stage: int, *, step: int = 0, replica: int = 0) -> tuple[tuple[Task, ...], ...]:
        """By member, what the ranks of a group ran, in order."""
        return tuple(tuple(span.task for span in spans) for spans in self._spans(stage, step, replica))

    def spans(self, stage: int, *, step: int = 0, replica: int = 0) -> tuple[TaskSpan, ...]:
        """The tasks of a group, each from when its last rank came to it; from the step's beginning on."""
        of_members, origin = self._spans(stage, step, replica), self._origin(step)
        return tuple(
            TaskSpan(stage, parts[0].task, max(part.start for part in parts) - origin, parts[0].end - origin)
            for parts in zip(*of_members, strict=True)
        )

    def messages(self, *, step: int = 0, replica: int = 0) -> tuple[MessageSpan, ...]:
        """The messages between stages, each with the arrival on its last rank, by source, target and task."""
        sent: dict[tuple[int, int, Task], float] = {}
        arrived: dict[tuple[int, int, Task], float] = {}
        origin = self._origin(step)
        for rank, results in enumerate(self.results):
            if self.mesh.place_of(rank).replica != replica:
                continue
            for span in results[step].trace.messages:
                key = (span.source, span.target, span.task)
                if span.sent is not None:
                    sent[key] = span.sent - origin
                if span.arrived is not None:
                    arrived[key] = max(arrived.get(key, 0.0), span.arrived - origin)
        return tuple(MessageSpan(*key, sent[key], arrived[key]) for key in sorted(sent))

    def _spans(self, stage: int, step: int, replica: int) -> list[tuple[TaskSpan, ...]]:
        ranks = (self.mesh.rank(MeshPosition(stage, replica, member)) for member in range(self.mesh.members))
        return [self.results[rank][step].trace.tasks for rank in ranks]

    def _origin(self, step: int) -> float:
        return min(results[step].trace.start for results in self.results)


def run_shell_groups(
    replicas: Sequence[Replica],
    hint: Callable[[], Hint],
    limits: Sequence[Limit],
    coordination: Leader | Agreement,
    *,
    modes: Sequence[Mode] = (Mode.TRAIN,),
    sizes: Sequence[float] | None = None,
    in_order: Collection[ForcedOrder] = (),
    stall_after: float | None = None,
) -> GroupRun:
    """Run steps of one job. Not to be called where a loop runs.

    Args:
        replicas: what each copy of the pipeline takes; all of one shape but for the number of microbatches.
        hint: makes a fresh hint, one a rank.
        limits: one a stage.
        coordination: how the ranks of a group agree on an order, and how long their messages take: half of a round of
            proposals.
        modes: of each step.
        sizes: how large each microbatch is, for hints that ask; None: untold.
        in_order: (kind, virtual stage) pairs that run in microbatch order.
        stall_after: virtual seconds of idleness after which a rank asks why; by default more than the step can take.

    Raises:
        DeadlockError: if tasks remain and nothing will ever happen, as the ranks' own watchdog reports it.
        HintError: if a hint breaks its contract.
        ProtocolError: if the ranks of a group come together for different tasks.
    """
    job = _Job(replicas, hint, limits, coordination, in_order, stall_after)
    return run_ranks(job.run(modes, sizes))


class _Job:
    """All ranks; arguments as in `run_shell_groups`."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        hint: Callable[[], Hint],
        limits: Sequence[Limit],
        coordination: Leader | Agreement,
        in_order: Collection[ForcedOrder],
        stall_after: float | None,
    ) -> None:
        first = replicas[0]
        self._graph = graph_of(first.costs)
        self._replicas = replicas
        members, stages = first.latencies.ranks, first.costs.stages
        self.mesh = Mesh((("pp", stages), ("dp", len(replicas)), ("tp", members)))
        self._coordination = coordination
        words_s = coordination.control_seconds if isinstance(coordination, Leader) else coordination.gather_seconds / 2
        self._latency = _Latency(self.mesh, [replica.latencies for replica in replicas], words_s)
        meetings = {(s, r): Meetings(members) for s in range(stages) for r in range(len(replicas))}
        places = [self.mesh.place_of(rank) for rank in range(self.mesh.size)]
        self._lanes = [GroupLane(meetings[place[:2]], place.member) for place in places]
        self._programs = [
            MeetingStage(self._graph, replicas[place.replica].durations(place.member), lane)
            for place, lane in zip(places, self._lanes, strict=True)
        ]
        self._cores = [self._core(place, hint, limits, in_order) for place in places]
        if stall_after is None:
            stall_after = max(_patience(replica, words_s) for replica in replicas)
        self._stall_after = stall_after

    def _core(
        self, place: MeshPosition, hint: Callable[[], Hint], limits: Sequence[Limit], in_order: Collection[ForcedOrder]
    ) -> StageCore:
        group = GroupMembership(place.member, self.mesh.members) if isinstance(self._coordination, Leader) else None
        return StageCore(self._graph, place.stage, hint(), limits[place.stage], group=group, in_order=in_order)

    async def run(self, modes: Sequence[Mode], sizes: Sequence[float] | None) -> GroupRun:
        """Run steps on all ranks, and leave."""
        met = LocalRendezvous()
        outcomes = await asyncio.gather(
            *(self._run_rank(rank, met, modes, sizes) for rank in range(self.mesh.size)), return_exceptions=True
        )
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            raise next((failure for failure in failures if failure.__cause__ is not None), failures[0])
        results = tuple(outcome for outcome in outcomes if not isinstance(outcome, BaseException))
        return GroupRun(self.mesh, results, tuple(core.peaks for core in self._cores))

    async def _run_rank(
        self, rank: int, met: LocalRendezvous, modes: Sequence[Mode], sizes: Sequence[float] | None
    ) -> tuple[StepResult, ...]:
        async def build(_: int) -> Sequence[StageRunner]:
            return [self._runner(rank, met)]

        ranks = LocalRanks(
            [self._programs[rank]],
            complete({}),
            build,
            topologies=[Topology.at(rank, self.mesh)],
            planner=StepPlanner(is_shared=self.mesh.replicas > 1),
        )
        microbatches = self._replicas[self.mesh.place_of(rank).replica].costs.microbatches
        results = []
        async with PipelineHandle(ranks, "caller", f"rrfp-{rank}") as pipe:
            for mode in modes:
                call = pipe.step if mode is Mode.TRAIN else pipe.evaluate
                results.append(await call(sizes=sizes, microbatches=microbatches))
        return tuple(results)

    def _runner(self, rank: int, met: LocalRendezvous) -> StageRunner:
        place = Topology.at(rank, self.mesh)
        context = TransportContext(rank, peers(self._graph, place), "virtual", met, queue_bytes=sys.maxsize)
        is_led = isinstance(self._coordination, Leader)
        return StageRunner(
            self._cores[rank],
            self._programs[rank],
            self._lanes[rank],
            SimulatedTransport(context, self._latency),
            RankSettings(
                place,
                "leader" if is_led else "agreement",
                self._coordination.depth if isinstance(self._coordination, Leader) else 1,
                self._stall_after,
            ),
        )


class _Latency:
    """How long a message takes: tensors by the ranks' own tables, all messages inside groups the same, others nothing.

    Args:
        mesh: how the ranks are laid out.
        latencies: of each replica.
        words_s: seconds that a message inside a group takes.
    """

    def __init__(self, mesh: Mesh, latencies: Sequence[RankLatencies], words_s: float) -> None:
        self._places = [mesh.place_of(rank) for rank in range(mesh.size)]
        self._rows = [{Kind.F: one.forward.tolist(), Kind.B: one.backward.tolist()} for one in latencies]
        self._words_s = words_s

    def __call__(self, rank: int, peer: int, message: Message) -> float:
        if message.kind in _GROUP_KINDS:
            return self._words_s
        if message.kind is not MessageKind.OUTPUT or message.task is None:
            return 0.0
        place, (kind, m, v) = self._places[rank], message.task
        seconds: float = self._rows[place.replica][kind][v if kind is Kind.F else v - 1][m][place.member]
        return seconds


def _patience(replica: Replica, words_s: float) -> float:
    """More than a step takes, in seconds: its tasks, messages and words one after the other, many times over."""
    costs, members = replica.costs, replica.latencies.ranks
    alone = patience(replica.latencies.slowest(slowest_durations(costs, replica.delays, members)))
    return alone + 20 * members * words_s * 3 * costs.num_virtual_stages * costs.microbatches
