"""One simulated step of tensor-parallel groups: a cluster on a cost table.

Time moves as in `rrfp.sim.engine`. A task takes what its slowest rank takes, and rank t of a stage sends to rank t of
the next, every message with its own latency. At one instant everything that completes or arrives takes effect before
any group decides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from rrfp.arbiter.group_messages import GroupMessage
from rrfp.core import events as ev
from rrfp.core.admission import Limit
from rrfp.core.hint import Hint
from rrfp.core.order_log import Group
from rrfp.core.readiness import ForcedOrder
from rrfp.core.stage_core import StageCore
from rrfp.core.tasks import Kind, Mode, StepId, Task
from rrfp.core.topology import Topology
from rrfp.core.usage import Peaks
from rrfp.core.waiting import describe, wait_line
from rrfp.costs.rank_latency import RankLatencies
from rrfp.costs.table import CostTable
from rrfp.errors import DeadlockError, ProtocolError
from rrfp.sim.cluster.all_gather import AllGather
from rrfp.sim.cluster.checker import RankChecker
from rrfp.sim.cluster.cluster import Packet
from rrfp.sim.cluster.coordination import Agreement, Coordination, Leader
from rrfp.sim.cluster.event_queue import EventQueue
from rrfp.sim.cluster.node import Node
from rrfp.sim.cluster.ranks import Rank, ranks_of
from rrfp.sim.cluster.result import GroupCounts, TensorParallelResult
from rrfp.sim.cluster.timed import TimedCluster
from rrfp.sim.cluster.timeline import GroupTimeline
from rrfp.sim.engine import graph_of
from rrfp.sim.never_asked import NeverAsked
from rrfp.trace.spans import MessageSpan


class GroupRun(TimedCluster[Node]):
    """See the module's docstring; the arguments are those of `rrfp.sim.cluster.tensor_parallel.run_tensor_parallel`.

    The costs are those of the slowest rank of a group.
    """

    def __init__(
        self,
        costs: CostTable,
        latencies: RankLatencies,
        hint: Callable[[], Hint],
        limits: Sequence[Limit],
        coordination: Coordination,
        sizes: Sequence[float] | None = None,
        in_order: Collection[ForcedOrder] = (),
    ) -> None:
        graph, is_led = graph_of(costs), isinstance(coordination, Leader)

        def core(stage: int, stage_hint: Hint, group: Group | None = None) -> StageCore:
            return StageCore(graph, stage, stage_hint, limits[stage], group=group, in_order=in_order)

        def node(rank: Rank) -> Node:
            group = Group(rank.member, latencies.ranks) if is_led else None
            rank_hint = NeverAsked() if is_led and rank.member else hint()
            return Node(rank, core(rank.stage, rank_hint, group), RankChecker(rank, graph, limits[rank.stage]))

        super().__init__(
            EventQueue(),
            [node(rank) for rank in ranks_of(costs.stages, members=latencies.ranks)],
            [StepId(0, Mode.TRAIN, costs.microbatches)],
            members=latencies.ranks,
            depth=coordination.depth if isinstance(coordination, Leader) else 1,
            coordination="leader" if is_led else None,
            sizes=None if sizes is None else tuple(sizes),
        )
        self._control_s = coordination.control_seconds if isinstance(coordination, Leader) else 0.0
        self._timelines = [GroupTimeline(core(stage, hint()), self.members) for stage in range(costs.stages)]
        self._gathers = (
            [AllGather(group.nodes, coordination.gather_seconds, self.queue, self.dispatch) for group in self.groups]
            if isinstance(coordination, Agreement)
            else None
        )
        self._durations = {Kind.F: costs.forward.tolist(), Kind.B: costs.backward.tolist()}
        if costs.weight is not None:
            self._durations[Kind.W] = costs.weight.tolist()
        self._latency = {Kind.F: latencies.forward.tolist(), Kind.B: latencies.backward.tolist()}
        self._messages: list[MessageSpan] = []
        self._num_messages = [0] * len(self.groups)

    def run(self) -> TensorParallelResult:
        """Simulate the step.

        Raises:
            DeadlockError: if tasks remain and nothing will ever happen.
        """
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

    def send(self, packet: Packet) -> None:
        """Carry it for the latency of its rank; inside a group for `control_seconds`, at once if that is none."""
        content, queue, (stage, member) = packet.content, self.queue, (packet.sender.stage, packet.sender.member)
        if isinstance(content, GroupMessage):
            self._num_messages[stage] += 1
            if self._control_s:
                queue.put(queue.now + self._control_s, packet.receiver, self._arrive, packet)
            else:
                self.deliver(packet)
            return
        if isinstance(content, ev.Announced):  # as in the engine, which has control messages take no time
            queue.put(queue.now, packet.receiver, self._arrive, packet)
            return
        kind, microbatch, v = task = content.task
        # Row v of a latency matrix is the edge between v and v + 1, whichever way it is travelled.
        latencies = self._latency[kind][v if kind is Kind.F else v - 1][microbatch]
        if member == 0:
            arrival = queue.now + max(latencies)
            self._messages.append(MessageSpan(stage, packet.receiver.stage, task, queue.now, arrival))
        queue.put(queue.now + latencies[member], packet.receiver, self._arrive, packet)

    def begin(self, nodes: Sequence[Node]) -> None:
        """A group begins a task; if it takes no time, it ends before any group decides."""
        task, leader, now = nodes[0].lane[0], nodes[0].rank, self.queue.now
        end = now + self._durations[task.kind][task.virtual_stage][task.microbatch]
        self._timelines[leader.stage].begin(task, now, end)
        # As a lane would measure it, to the last bit.
        self.queue.put(end, leader, self._complete, end - now)

    def allow_step(self, nodes: Sequence[Node]) -> None:
        """There is one step."""

    def mismatch(self, node: Node, task: Task, other: Task) -> None:
        """Refuse it.

        Raises:
            ProtocolError: the collectives of the two would not match.
        """
        raise ProtocolError(
            f"collective mismatch on stage {node.rank.stage}: rank {node.rank.member} runs {task} as number "
            f"{len(node.order) - 1} of the step, where another rank runs {other}"
        )

    def _arrive(self, rank: int, packet: Packet) -> None:
        self.deliver(packet)
        if isinstance(packet.content, ev.Arrived):
            stage = packet.receiver.stage
            self._timelines[stage].arrive(packet.content)
            if self._gathers is not None:
                self._gathers[stage].note_arrival(self.nodes[rank], packet.content.task)

    def _complete(self, rank: int, seconds: float) -> None:
        group = self.groups[rank // self.members]
        self._timelines[group.nodes[0].rank.stage].complete(ev.Completed(group.nodes[0].lane[0], seconds=seconds))
        for node in group.nodes:
            self.complete(node, seconds)

    def _decide(self, stage: int) -> None:
        """Something happened to this group: its ranks enqueue what they may, the leader first."""
        if self._gathers is not None:
            self._gathers[stage].decide()
        else:
            for node in self.groups[stage].nodes:
                node.arbiter.decide()
        self._timelines[stage].decided(self.queue.now, is_pausing=self.groups[stage].nodes[0].core.is_pausing)

    # The end.

    def _check_finished(self) -> None:
        lines = []
        for stage, timeline in enumerate(self._timelines):
            topology = Topology(stage, len(self.groups))
            if texts := describe(timeline.core, topology, most=1):
                cause = None if self._gathers is None else self._gathers[stage].stalled()
                lines.append(f"  {wait_line(topology.name, texts) if cause is None else f'{topology.name}: {cause}'}")
        if lines:
            raise DeadlockError("deadlock: every group is idle and nothing is in flight\n" + "\n".join(lines))

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
        if self._gathers is not None:
            return self._gathers[stage].counts()
        if self.groups[stage].nodes[0].leader_protocol is None:
            return GroupCounts()
        # A round is an entry of the log; none fails.
        return GroupCounts(len(self.groups[stage].nodes[0].order), messages=self._num_messages[stage])


def _largest(ranks: Sequence[Peaks]) -> Peaks:
    """The most that any rank of a stage held."""
    return Peaks(max(p.held for p in ranks), max(p.num_bytes for p in ranks), max(p.received for p in ranks))
