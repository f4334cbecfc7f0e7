"""`rrfp simulate --tp` as a function: one method on one cost table for groups of T ranks, beside the lower bound.

A task takes what its slowest rank takes, and rank t of a stage sends to rank t of the next, every message with its own
latency. At one instant everything that completes or arrives takes effect before any group decides, as in
`rrfp.engine.engine`.

The bound is that of a single rank with the slowest rank's messages: no coordination can start a task before its inputs
are on all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from rrfp.arbiter.coordination import GroupMessage
from rrfp.core import events as ev
from rrfp.core.group_step import GroupMembership
from rrfp.core.hint import Hint
from rrfp.core.ready_set import ForcedOrder, MicrobatchOrder, forced_by
from rrfp.core.stage_core import StageCore
from rrfp.core.usage import Peaks, WaitCause
from rrfp.core.waiting import describe, wait_line
from rrfp.costs.table import CostTable
from rrfp.engine.engine import graph_of
from rrfp.engine.record import EngineResult
from rrfp.errors import ConfigError, DeadlockError, ProtocolError
from rrfp.hints.registry import HintSpec, check_order, create_hint, create_strict
from rrfp.lab.cluster.checker import RankChecker
from rrfp.lab.cluster.cluster import Envelope, EventQueue, TimedCluster
from rrfp.lab.cluster.coordination import (
    Agreement,
    Coordination,
    CoordinationName,
    GroupCounts,
    Independent,
    Leader,
    resolve_coordination,
)
from rrfp.lab.cluster.node import Node
from rrfp.lab.cluster.ranks import Rank, ranks_of
from rrfp.lab.generators.latency import SHUFFLED, Cube, RankLatencies, rank_latencies
from rrfp.lab.simulation import Simulation, beside_bound, resolve_limits, shown_correlation
from rrfp.lab.unused_hint import UnusedHint
from rrfp.memory.admission import Limit
from rrfp.model.mesh import Mesh
from rrfp.model.tasks import KINDS, SENT_TO, Kind, Mode, Side, StepId, Task
from rrfp.model.topology import Topology
from rrfp.schedules.registry import ScheduleSpec
from rrfp.trace.spans import MessageSpan, TaskSpan, WaitSpan


@dataclass(frozen=True)
class TensorParallelResult(EngineResult):
    """One simulated step, a group as one stage: all its ranks start and end a task together.

    Attributes:
        waits: why the lanes of a group were idle, up to the makespan. ORDER: a task was ready on *all* ranks, and
            coordination kept it (the step's TP coordination); any other cause: none was (blocked).
        messages: messages between stages, each with the arrival on its last rank.
        peaks: for each stage, the most that any of its ranks held.
        orders: for each stage and rank, what the rank ran.
        rank_peaks: for each stage and rank, the most that it held.
        counts: for each stage, what agreeing took.
    """

    orders: tuple[tuple[tuple[Task, ...], ...], ...]
    rank_peaks: tuple[tuple[Peaks, ...], ...]
    counts: tuple[GroupCounts, ...]

    @property
    def ranks(self) -> int:
        return len(self.orders[0])

    @cached_property
    def num_tasks(self) -> int:
        """Tasks of all groups; one that T ranks run together counts once."""
        return sum(map(len, self.spans))

    @cached_property
    def coordination(self) -> tuple[float, ...]:
        """Seconds for each stage of idle lanes with a task ready on all ranks."""
        return self._waited(coordinating=True)

    @cached_property
    def blocked(self) -> tuple[float, ...]:
        """Seconds for each stage of idle lanes with no task ready on all ranks."""
        return self._waited(coordinating=False)

    @property
    def coordination_share(self) -> float:
        """Part of the step that the mean stage lost to coordination, 0..1."""
        return sum(self.coordination) / (len(self.spans) * self.makespan) if self.makespan else 0.0

    @property
    def rounds_per_task(self) -> float:
        """Decisions taken together for each task, failed ones included."""
        return sum(counts.rounds for counts in self.counts) / self.num_tasks

    @property
    def failed_rounds_per_task(self) -> float:
        """Rounds in which two ranks proposed different tasks, for each task."""
        return sum(counts.failed_rounds for counts in self.counts) / self.num_tasks

    @property
    def messages_per_task(self) -> float:
        """Messages between ranks of a group for each task."""
        return sum(counts.messages for counts in self.counts) / self.num_tasks

    def _waited(self, *, coordinating: bool) -> tuple[float, ...]:
        seconds = [0.0] * len(self.spans)
        for wait in self.waits:
            if (wait.cause is WaitCause.ORDER) is coordinating:
                seconds[wait.stage] += wait.end - wait.start
        return tuple(seconds)


class GroupTimeline:
    """The spans and waits of a stage whose ranks begin and end together."""

    # It has one more core of the stage, which learns without delay what is true of all ranks: what it would run is
    # ready on every rank. That core never decides anything.

    def __init__(self, core: StageCore, members: int) -> None:
        self.core = core
        self.spans: list[TaskSpan] = []
        #: When its lanes were idle. ORDER: a task was ready on all ranks; any other cause: none was.
        self.waits: list[WaitSpan] = []
        self._members = members
        self._num_arrived: Counter[Task] = Counter()
        self._is_running = False
        #: Why the lanes are idle, and since when; None while they are not.
        self._idle: tuple[WaitCause, float] | None = None
        #: The cause as of the last event that was applied to the core.
        self._cause: WaitCause | None = None

    def apply(self, event: ev.Event) -> None:
        # The core has no peers and nothing to reduce: its instructions are of no interest.
        self.core.apply(event)
        self._cause = None

    def begin(self, task: Task, start: float, end: float) -> None:
        self._is_running = True
        self.spans.append(TaskSpan(self.core.stage, task, start, end))
        self.apply(ev.Enqueued(task))

    def complete(self, completed: ev.Completed) -> None:
        """All ranks end the task that they ran."""
        self._is_running = False
        self.apply(completed)

    def arrive(self, arrived: ev.Arrived) -> None:
        """One more rank has this message."""
        self._num_arrived[arrived.task] += 1
        if self._num_arrived[arrived.task] == self._members:
            self.apply(arrived)

    def decided(self, now: float, *, is_pausing: bool = False) -> None:
        """The ranks have enqueued what they may: lanes are busy, or idle."""
        cause = WaitCause.CHOICE if is_pausing else self._wait_cause()
        self._wait(None if self._is_running else cause, now)

    def end(self, now: float) -> None:
        self._wait(None, now)

    def _wait_cause(self) -> WaitCause:
        if self._cause is None:
            is_ready = self.core.decide() is not None
            self._cause = WaitCause.ORDER if is_ready else self.core.wait_cause()
        return self._cause

    def _wait(self, cause: WaitCause | None, now: float) -> None:
        before = self._idle
        if before is not None and before[0] is cause:
            return
        if before is not None and before[1] < now:
            self.waits.append(WaitSpan(self.core.stage, before[0], before[1], now))
        self._idle = None if cause is None else (cause, now)


_NAMES: Mapping[type[Coordination], CoordinationName | None] = {
    Leader: "leader",
    Agreement: "agreement",
    Independent: None,
}


def _message_seconds(coordination: Coordination) -> float:
    if isinstance(coordination, Independent):
        return 0.0
    # A round of proposals is there and back.
    return coordination.control_seconds if isinstance(coordination, Leader) else coordination.gather_seconds / 2


class GroupRun(TimedCluster[Node]):
    """One step of tensor-parallel groups, on the slowest rank's costs."""

    def __init__(
        self,
        costs: CostTable,
        latencies: RankLatencies,
        hint: Callable[[], Hint],
        limits: Sequence[Limit],
        coordination: Coordination,
        sizes: Sequence[float] | None = None,
        size_correlation: float | None = None,
        in_order: Collection[ForcedOrder] = (),
    ) -> None:
        graph, is_led = graph_of(costs), isinstance(coordination, Leader)

        def core(stage: int, stage_hint: Hint, group: GroupMembership | None = None) -> StageCore:
            return StageCore(graph, stage, stage_hint, limits[stage], group=group, in_order=in_order)

        def node(rank: Rank) -> Node:
            group = GroupMembership(rank.member, latencies.ranks) if is_led else None
            rank_hint = UnusedHint() if is_led and rank.member else hint()
            checker = RankChecker(rank, graph, limits[rank.stage], is_forced=bool(in_order))
            return Node(rank, core(rank.stage, rank_hint, group), checker)

        super().__init__(
            EventQueue(),
            [node(rank) for rank in ranks_of(costs.stages, members=latencies.ranks)],
            [StepId(0, Mode.TRAIN, costs.microbatches)],
            members=latencies.ranks,
            depth=coordination.depth if isinstance(coordination, Leader) else 1,
            coordination=_NAMES[type(coordination)],
            sizes=None if sizes is None else tuple(sizes),
        )
        self._size_correlation = size_correlation
        self._control_s = _message_seconds(coordination)
        self._timelines = [GroupTimeline(core(stage, hint()), self.members) for stage in range(costs.stages)]
        self._durations = {kind: times.tolist() for kind, times in costs.durations.items()}
        self._latency = {Kind.F: latencies.forward.tolist(), Kind.B: latencies.backward.tolist()}
        self._messages: list[MessageSpan] = []
        self._num_messages = [0] * len(self.groups)

    def opened(self, step: StepId) -> ev.StepOpened:
        return replace(super().opened(step), size_correlation=self._size_correlation)

    def run(self) -> TensorParallelResult:
        for node in self.nodes:
            self.open_step(node)
        for timeline in self._timelines:
            timeline.apply(self.opened(self.steps[0]))
        for stage in range(len(self.groups)):
            self._decide(stage)
        while (touched := self.queue.instant()) is not None:
            for stage in sorted({rank // self.members for rank in touched}):
                self._decide(stage)
        self._check_finished()
        return self._result()

    # A network and a clock.

    def send(self, packet: Envelope) -> None:
        """Carry it for its rank's latency; inside a group for as long as coordination says."""
        content, queue, (stage, member) = packet.content, self.queue, (packet.sender.stage, packet.sender.member)
        if isinstance(content, GroupMessage):
            self._num_messages[stage] += 1
            if self._control_s:
                queue.put(queue.now + self._control_s, packet.receiver, self._arrive, packet)
            else:
                self.deliver(packet)
            return
        if isinstance(content, ev.BegunReported):  # as in the engine, which has control messages take no time
            queue.put(queue.now, packet.receiver, self._arrive, packet)
            return
        kind, microbatch, v = task = content.task
        # Row v of a latency matrix is the edge between v and v + 1, whichever way it is travelled.
        latencies = self._latency[kind][v if SENT_TO[kind] is Side.AFTER else v - 1][microbatch]
        if member == 0:
            arrival = queue.now + max(latencies)
            self._messages.append(MessageSpan(stage, packet.receiver.stage, task, queue.now, arrival))
        queue.put(queue.now + latencies[member], packet.receiver, self._arrive, packet)

    def begin(self, nodes: Sequence[Node]) -> None:
        """A group begins a task; one of no time ends before any decides."""
        task, leader, now = nodes[0].lane[0], nodes[0].rank, self.queue.now
        end = now + self._durations[task.kind][task.virtual_stage][task.microbatch]
        self._timelines[leader.stage].begin(task, now, end)
        # As a lane would measure it, to the last bit.
        self.queue.put(end, leader, self._complete, end - now)

    def allow_step(self, nodes: Sequence[Node]) -> None:
        """There is one step."""

    def mismatch(self, node: Node, task: Task, other: Task) -> None:
        raise ProtocolError(
            f"collective mismatch on stage {node.rank.stage}: rank {node.rank.member} runs {task} as number "
            f"{len(node.order) - 1} of the step, where another rank runs {other}"
        )

    def _arrive(self, rank: int, packet: Envelope) -> None:
        self.deliver(packet)
        if isinstance(packet.content, ev.Arrived):
            self._timelines[packet.receiver.stage].arrive(packet.content)

    def _complete(self, rank: int, seconds: float) -> None:
        group = self.groups[rank // self.members]
        self._timelines[group.nodes[0].rank.stage].complete(ev.Completed(group.nodes[0].lane[0], seconds=seconds))
        for node in group.nodes:
            self.complete(node, seconds)

    def _decide(self, stage: int) -> None:
        """The ranks of a touched group enqueue what they may, leader first."""
        nodes = self.groups[stage].nodes
        while any(node.arbiter.is_due for node in nodes):  # messages that take no time may ask for another decision
            for node in nodes:
                node.arbiter.decide()
        self._timelines[stage].decided(self.queue.now, is_pausing=nodes[0].core.is_pausing)

    # The end.

    def _check_finished(self) -> None:
        lines, remedy = [], ""
        for stage, timeline in enumerate(self._timelines):
            topology = Topology(stage, len(self.groups))
            if texts := describe(timeline.core, topology, most=1):
                disputes = [*self._disputes(stage)]
                lines += disputes or [wait_line(topology.name, texts)]
                if disputes:
                    hint = type(timeline.core.hint).__name__
                    remedy = f"\nhint {hint} picks by more than the ready set, and needs coordination='leader'"
        if lines:
            head = "deadlock: every group is idle and nothing is in flight"
            raise DeadlockError("\n  ".join([head, *lines]) + remedy)

    def _disputes(self, stage: int) -> Iterator[str]:
        """What each rank of a group proposes that will never be agreed on."""
        mesh = Mesh((("pp", len(self.groups)), ("tp", self.members)))
        for node in self.groups[stage].nodes:
            if node.agreement is not None and (dispute := node.agreement.dispute) is not None:
                topology = Topology.at(node.rank, mesh)
                yield wait_line(topology.name, describe(node.core, topology, 0, dispute))

    def _result(self) -> TensorParallelResult:
        timelines = self._timelines
        makespan = max((timeline.spans[-1].end for timeline in timelines if timeline.spans), default=0.0)
        for timeline in timelines:
            timeline.end(makespan)
        waits = [wait for timeline in timelines for wait in timeline.waits]
        nodes = [group.nodes for group in self.groups]
        rank_peaks = tuple(tuple(node.core.peaks for node in members) for members in nodes)
        return TensorParallelResult(
            makespan=makespan,
            spans=tuple(tuple(timeline.spans) for timeline in timelines),
            waits=tuple(sorted(waits, key=lambda wait: (wait.start, wait.stage))),
            messages=tuple(self._messages),
            peaks=tuple(map(_largest, rank_peaks)),
            orders=tuple(tuple(tuple(node.order) for node in members) for members in nodes),
            rank_peaks=rank_peaks,
            counts=tuple(map(self._counts, range(len(nodes)))),
        )

    def _counts(self, stage: int) -> GroupCounts:
        node, num_messages = self.groups[stage].nodes[0], self._num_messages[stage]
        if node.agreement is not None:
            return GroupCounts(node.agreement.rounds, node.agreement.failed, num_messages)
        # A round is an entry of the log; none fails.
        return GroupCounts() if node.leader_protocol is None else GroupCounts(len(node.order), 0, num_messages)


def _largest(ranks: Sequence[Peaks]) -> Peaks:
    return Peaks(max(p.held for p in ranks), max(p.num_bytes for p in ranks), max(p.received for p in ranks))


def run_tensor_parallel(
    costs: CostTable,
    latencies: RankLatencies,
    hint: Callable[[], Hint],
    limits: Sequence[Limit],
    coordination: Coordination,
    *,
    delays: Mapping[Kind, Cube] | None = None,
    sizes: Sequence[float] | None = None,
    size_correlation: float | None = None,
    in_order: Collection[ForcedOrder] = (),
) -> TensorParallelResult:
    """Simulate one training step.

    Args:
        costs: what tasks take; its latencies are not used.
        latencies: what the messages of each rank take; says how many ranks a group has.
        hint: makes a fresh hint, one for each core that decides.
        limits: one a stage; all its ranks have it.
        coordination: how the ranks of a group agree on an order.
        delays: seconds by which each rank lengthens its part of a task, V x M x T by kind; the task takes what its
            slowest rank takes. None: nothing.
        sizes: how large each microbatch is, for hints that ask; None: unknown.
        size_correlation: as a step before would have shown it, see `rrfp.hints.View`; None: there was none.
        in_order: (kind, virtual stage) pairs that run in microbatch order.
    """
    latencies.check_fits(costs)
    if len(limits) != costs.stages:
        raise ConfigError(f"limits has {len(limits)} entries, must have {costs.stages} (one a stage)")
    costs = slowest_durations(costs, delays or {}, latencies.ranks)
    return GroupRun(costs, latencies, hint, limits, coordination, sizes, size_correlation, in_order).run()


def slowest_durations(costs: CostTable, delays: Mapping[Kind, Cube], tp: int) -> CostTable:
    """The table of a group of ``tp`` ranks with ``delays``: every task takes what its slowest rank takes."""
    durations = {}
    for kind, cube in delays.items():
        before = costs.durations.get(kind)
        if before is None:
            kinds = " and ".join(costs.durations)
            raise ConfigError(f"delays has {kind}, must be of {kinds} only: the costs are not split")
        added = np.asarray(cube, dtype=np.float64)
        if added.shape != (*before.shape, tp):
            raise ConfigError(f"delays[{kind}] has shape {added.shape}, must be {(*before.shape, tp)}")
        if not (np.isfinite(added) & (added >= 0)).all():
            raise ConfigError(f"delays[{kind}] must hold finite numbers >= 0 only")
        durations[KINDS[kind].name] = before + added.max(axis=2)
    return replace(costs, **durations)


@dataclass(frozen=True, slots=True)
class TensorParallelSimulation:
    """One method on one cost table, for groups of T ranks."""

    #: The groups as single ranks: what tables, timelines and traces of a step show. Its costs have the slowest rank's
    #: latencies.
    simulation: Simulation
    #: The result of the simulation, with what coordination cost.
    result: TensorParallelResult
    #: How the ranks of a group agreed on the same order.
    coordination: Coordination

    def to_json(self) -> Mapping[str, Any]:
        """What ``rrfp simulate --json`` prints, and ``tp``."""
        result = self.result
        fields = {
            "ranks": result.ranks,
            "coordination": type(self.coordination).__name__.lower(),
            "coordination_seconds": list(result.coordination),
            "blocked_seconds": list(result.blocked),
            "coordination_share": result.coordination_share,
            "rounds_per_task": result.rounds_per_task,
            "failed_rounds_per_task": result.failed_rounds_per_task,
            "messages_per_task": result.messages_per_task,
        }
        return {**self.simulation.to_json(), "tp": fields}


def simulate_tensor_parallel(
    costs: CostTable,
    tp: int,
    *,
    coordination: Coordination | CoordinationName | None = None,
    hint: HintSpec | None = None,
    strict: ScheduleSpec | None = None,
    limit: Limit | int | str | None = None,
    latency: str = SHUFFLED,
    seed: int = 0,
    sizes: Sequence[float] | None = None,
    order: MicrobatchOrder = "free",
) -> TensorParallelSimulation:
    """Simulate one training step of N stages of ``tp`` ranks, with a hint or with a schedule consumed strictly.

    Args:
        costs: what tasks take, and what the messages of rank 0 take.
        tp: T >= 1.
        coordination: with a hint, ``"leader"`` (the default) or ``"agreement"`` with their default times, or either
            with its own. A strict schedule takes none: it is the same on every rank, so there is nothing to agree on.
        hint: a hint's name, class or instance.
        strict: a schedule's name, or a schedule file's text; its stages wait for their next task.
        limit: with a hint, how many microbatches a stage may hold (default ``2n``); a strict schedule takes none.
        latency: how the messages of ranks 1..T-1 draw their times; see `rank_latencies`.
        seed: of those draws.
        sizes: how large each microbatch is, for hints that ask; None: as the table says, if it does.
        order: with a hint; see `rrfp.lab.simulation.simulate`.
    """
    if (hint is None) == (strict is None):
        raise ConfigError("exactly one of hint and strict is needed")
    if costs.graph is not None:
        raise ConfigError("tp: groups of ranks are simulated on chains only, and these costs are of a graph")
    costs = costs if sizes is None else replace(costs, sizes=tuple(sizes))
    latencies = rank_latencies(costs, latency, tp, seed=seed)
    if hint is None:
        if limit is not None or coordination is not None or order != "free":
            what = "limit" if limit is not None else "coordination" if coordination is not None else "order"
            raise ConfigError(f"{what} goes with a hint; a strict schedule is the same order on every rank")
        assert strict is not None
        way: Coordination = Independent()
        make, limits, counts = partial(create_strict, strict), [Limit()] * costs.stages, None
    else:
        check_order(hint, order)
        way = resolve_coordination(coordination)
        make, limits = partial(create_hint, hint), resolve_limits(costs, limit)
        if any(stage_limit.bytes is not None for stage_limit in limits):
            raise ConfigError("limit: bytes must be None, simulated groups count microbatches")
        counts = tuple(stage_limit.microbatches or costs.microbatches for stage_limit in limits)
    known: Mapping[str, Any] = {"sizes": costs.sizes, "size_correlation": shown_correlation(costs)}
    in_order = forced_by(order, graph_of(costs))
    result = run_tensor_parallel(costs, latencies, make, limits, way, in_order=in_order, **known)
    # A strict schedule's bound uses what it held itself; under the paper's rule D may pass the limit by C.
    held = [-(-peak.held // costs.chunks) for peak in result.peaks]
    needed = held if counts is None else list(map(max, zip(counts, held, strict=True)))
    simulation = beside_bound(latencies.slowest(costs), result, counts, needed)
    return TensorParallelSimulation(simulation, result, way)
