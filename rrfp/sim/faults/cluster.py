"""A cluster in virtual time in which things go wrong, under the eyes of the checkers.

Links are those of `rrfp.sim.faults.network`. A rank opens its next step as soon as it has ended the last one, without
waiting for other stages, so messages of the next step come early. When a core refuses an event, or a rank dies, every
other core receives `Aborted`, as it does from the shell, and must stop at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from rrfp.arbiter.group_messages import GroupMessage
from rrfp.core import events as ev
from rrfp.core.stage_core import StageCore
from rrfp.core.tasks import Task
from rrfp.errors import ConfigError, ProtocolError
from rrfp.sim.cluster.cluster import Cluster, Packet
from rrfp.sim.cluster.event_queue import EventQueue
from rrfp.sim.cluster.ranks import Rank
from rrfp.sim.faults.availability import Availability
from rrfp.sim.faults.checker import Ending
from rrfp.sim.faults.dataflow import MissingInputError, References, ReplicaSums, StageValues
from rrfp.sim.faults.failures import Failures
from rrfp.sim.faults.faults import AnyId, Death
from rrfp.sim.faults.group_messages import Breach
from rrfp.sim.faults.network import Delivery, Network, Parcel, identity_of
from rrfp.sim.faults.node import FaultNode, Run, stall_of
from rrfp.sim.faults.rank_checker import FaultChecker
from rrfp.sim.faults.scenario import Scenario

#: Makes the core of a rank; tests pass broken ones, to show that the checkers notice.
CoreFactory = Callable[..., StageCore]

#: A run of a scenario has some hundred events. One with more does not end.
_MOST_EVENTS = 100_000


class FaultCluster(Cluster[FaultNode]):
    """Runs one scenario.

    Args:
        scenario: what to run.
        make_core: makes the cores, called like `StageCore`.
        trace: called with everything that happens, in lines of text; None: with nothing.
    """

    def __init__(
        self, scenario: Scenario, make_core: CoreFactory = StageCore, trace: Callable[[str], None] | None = None
    ) -> None:
        self._scenario = scenario
        self._crew = crew = scenario.crew
        self._trace = trace
        self._death = next((fault for fault in scenario.faults if isinstance(fault, Death)), None)
        self._availability = Availability(scenario.faults)
        self._queue = EventQueue(self._availability if self._availability.is_limited else None)
        self._network = Network(scenario.faults)
        super().__init__(
            [self._node(rank, make_core) for rank in crew.ranks(scenario.graph.placement.stages)],
            scenario.steps,
            members=crew.members,
            depth=scenario.depth,
            coordination=crew.coordination,
            coupled=crew.coupled,
            sizes=scenario.sizes,
        )
        self._sums = ReplicaSums[FaultNode](crew.replicas)
        self._failures = Failures(self.nodes, self._queue, scenario.control_latency, len(scenario.steps), self._report)
        self._references = References(scenario.graph)
        #: How the message breaks the contract that a leader's protocol hands to its core right now, if it does.
        self._breach: Breach | None = None

    def _node(self, rank: Rank, make_core: CoreFactory) -> FaultNode:
        scenario, crew = self._scenario, self._crew
        graph, limit, hint = scenario.graph, scenario.limits[rank.stage], scenario.make_hint(rank.stage)
        group = crew.group(rank) if crew.is_led else None
        core = make_core(graph, rank.stage, hint, limit, group=group, in_order=scenario.in_order)
        checker = FaultChecker(graph, rank, limit, crew, is_forced=bool(scenario.in_order))
        return FaultNode(rank, core, StageValues(graph, rank.salt), checker)

    def run(self) -> Run:
        """Run it to its end, whatever that is."""
        for node in self.nodes:
            self._queue.put(0.0, node.rank, self._open, None)
        if self._death is not None:
            self._failures.foretell(self._death)
        try:
            self._let_happen()
        except ConfigError as error:
            return self._result(Ending.UNFIT, str(error))
        except Exception as error:  # whatever a core raises that is no ProtocolError
            return self._result(Ending.CRASHED, f"{type(error).__name__} at {self._queue.now:.4f} s: {error}")
        if self._failures.first is not None:
            ending, origin = self._failures.first
            return self._result(ending, f"aborted by {origin}")
        if self._failures.all_finished:
            return self._result(Ending.FINISHED, "")
        return self._result(Ending.STALLED, str(stall_of(self.nodes)))

    def _let_happen(self) -> None:
        queue = self._queue
        while True:
            while (touched := queue.instant()) is not None:
                for rank in touched:
                    self._decide(self.nodes[rank])
                if queue.num_happened > _MOST_EVENTS:
                    raise RuntimeError(f"it does not end: {queue.num_happened} events")
            kept = self._network.flush(queue.now)
            if not kept:
                return
            self._put(kept)

    def _result(self, ending: Ending, text: str) -> Run:
        seen = [what for node in self.nodes for what in node.checker.objections]
        origin = None if self._failures.first is None else self._failures.first[1]
        return Run(self.nodes, self._network, ending, text, (*seen, *self._failures.objections), origin)

    # Steps.

    def _open(self, rank: int, _: None) -> None:
        node = self.nodes[rank]
        if node.origin is None and self.group_of(node).may_open(node):
            self.open_step(node)

    def open_step(self, node: FaultNode) -> None:
        """It takes in what came early, and what the network has kept for it arrives."""
        step = self.steps[node.num_opened]
        self._report(node, "opens", step)
        node.open_step(step)
        from_group, early = node.checker.open_step(step, self._references.of(step, node.rank.salt))
        if node.agreement is not None:
            open_step = partial(node.agreement.open_step, step)
            self._failures.accept(node, open_step, f"the early messages of {step}", from_group)
        if node.origin is None:
            self._judge(node, self.opened(step), early)
        self._put(self._network.step_opened(node.rank, step.number, self._queue.now))
        self.allow_step(self.group_of(node).take_waiting())

    def allow_step(self, nodes: Sequence[FaultNode]) -> None:
        """They open it now, but for one that was aborted."""
        for node in nodes:
            self._queue.put(self._queue.now, node.rank, self._open, None)

    def finish_step(self, node: FaultNode) -> None:
        """It must have done everything; the next step follows after a while."""
        self._report(node, "ends", node.step)
        salts = map(node.rank.salt_in, range(self._crew.replicas))
        replicas = [self._references.of(node.step, salt).gradients for salt in salts]
        virtual_stages = self._scenario.graph.placement.virtual_stages(node.rank.stage)
        expected = {v: sum(gradients.get(v, 0) for gradients in replicas) for v in virtual_stages}
        node.checker.finish_step(node.sums, expected)
        super().finish_step(node)
        if node.num_finished < len(self.steps):
            later = self._queue.now + self._scenario.gaps[node.rank.stage]
            self._queue.put(later, node.rank, self._open, None)

    # Tasks.

    def _decide(self, node: FaultNode) -> None:
        if node.origin is None:
            node.arbiter.kick()
            node.arbiter.decide()
        elif (run := node.core.decide()) is not None:
            self._failures.objections.append(f"{node.rank.name} wants to run {run.task} after it was aborted")

    def dispatch(self, node: FaultNode, task: Task) -> None:
        """It must be a task that may run now, here and on all members of a group under a leader."""
        node.checker.enqueue(task)
        if self._crew.is_led and node.rank.member == 0:
            for other in self.group_of(node).nodes[1:]:
                if lacks := other.checker.lacks(task, node.step):
                    what = " ".join(map(str, lacks))
                    node.checker.object_to(f"ordered {task}, and {other.rank.name} has not got {what}")
        super().dispatch(node, task)

    def mismatch(self, node: FaultNode, task: Task, other: Task) -> None:
        """Object to it."""
        node.checker.object_to(f"runs {task} where others of its group run {other}")

    def begin(self, nodes: Sequence[FaultNode]) -> None:
        """Each computes its value, and takes its time."""
        for node in nodes:
            task, now = node.lane[0], self._queue.now
            self._report(node, "starts", task)
            node.starts.append((task, now))
            try:
                node.running = node.values.compute(node.step.number, task)
            except MissingInputError as error:
                self._failures.objections.append(f"{node.rank.name}: {error}, in {node.step}")
            # As a lane would measure it, to the last bit.
            end = now + self._scenario.durations[task.kind][task.virtual_stage][task.microbatch]
            self._queue.put(end, node.rank, self._complete, end - now)

    def _complete(self, rank: int, seconds: float) -> None:
        node = self.nodes[rank]
        node.values.keep(node.lane[0], node.running)
        node.checker.compute(node.lane[0], node.running)
        self.complete(node, seconds)

    def bytes_held(self, node: FaultNode, task: Task) -> int:
        """What the crew says."""
        return node.checker.bytes_after(task)

    def drop(self, node: FaultNode, task: Task) -> None:
        """The value is gone."""
        node.values.drop(task)

    def reduce(self, node: FaultNode, virtual_stage: int) -> None:
        """Sum over the replicas, once all have come to it."""
        key = node.step.number, virtual_stage, node.rank.stage, node.rank.member
        replicas, total = self._sums.add(key, node, node.values.gradients.get(virtual_stage, 0))
        reduced = ev.ChunkReduced(virtual_stage)
        for other in replicas:
            other.sums[virtual_stage] = total
        for other in replicas:
            if other is node:
                self.apply(other, reduced)
            else:
                self._queue.put(self._queue.now, other.rank, self._happened, reduced)

    # Messages.

    def send(self, packet: Packet) -> None:
        """Over the faulty links."""
        content, sender = packet.content, self.nodes[packet.sender]
        message, latency, value = identity_of(packet), self._scenario.control_latency, 0
        number = self._network.next_number(message)
        if isinstance(content, ev.Arrived):
            value = sender.values.output(content.task)
            latency = self._scenario.latency(content, packet.sender.member)
            sequence = number if self._crew.is_numbered else None
            content = ev.Arrived(content.step, content.task, consumed=content.consumed, sequence=sequence)
        parcel = Parcel(message, content.step, number, content, value)
        self._put(self._network.send(parcel, self._queue.now, latency))

    def release(self, node: FaultNode, released: ev.SendReleased) -> None:
        """Its memory becomes free after a while."""
        if self._scenario.release_after:
            later = self._queue.now + self._scenario.release_after
            self._queue.put(later, node.rank, self._happened, released)
        else:
            self.apply(node, released)

    def _put(self, deliveries: Iterable[Delivery]) -> None:
        for time, parcel in deliveries:
            self._queue.put(time, parcel.id.receiver, self._arrive, parcel)

    def _arrive(self, rank: int, parcel: Parcel) -> None:
        node, content, death = self.nodes[rank], parcel.content, self._death
        is_lost = death is not None and death.drops and parcel.id.sender == death.rank
        if is_lost and self._availability.is_dead(parcel.id.sender, self._queue.now):
            return
        self._report(node, "gets", parcel.id)
        is_early = node.checker.is_early(parcel)
        breach = node.checker.judge(parcel) if node.origin is None else None
        if isinstance(content, GroupMessage):
            self._on_group_message(node, self.nodes[parcel.id.sender].rank.member, content, parcel.id, breach)
            return
        assert content is not None
        if isinstance(content, ev.Arrived):
            node.values.file(content.task, parcel.value, is_early=is_early)
        self._judge(node, content, breach)

    def _on_group_message(
        self, node: FaultNode, member: int, message: GroupMessage, message_id: AnyId, breach: Breach | None
    ) -> None:
        if node.agreement is not None and node.origin is None:
            receive = partial(node.agreement.on_message, member, message)
            self._failures.accept(node, receive, message_id, breach)
        elif node.leader_protocol is not None:
            self._breach = breach
            try:
                node.leader_protocol.on_message(member, message)
            except ProtocolError as error:
                self._failures.refused(node, message_id, error, breach)

    # What a core takes in, and what it must refuse.

    def _happened(self, rank: int, event: ev.Event) -> None:
        self.apply(self.nodes[rank], event)

    def apply(self, node: FaultNode, event: ev.Event) -> None:
        """The core must take it in, unless it comes in a message that breaks the contract."""
        breach, self._breach = self._breach, None
        self._judge(node, event, breach)

    def _judge(self, node: FaultNode, event: ev.Event, breach: Breach | None) -> None:
        """Apply what the core must refuse if it is a breach, and only then; and do what it says."""
        instructions = self._failures.accept(node, partial(node.core.apply, event), event, breach)
        if instructions is None:
            return
        if node.origin is not None and instructions:
            self._failures.objections.append(f"{node.rank.name} gave {instructions[0]} after it was aborted")
            return
        for instruction in instructions:
            self.perform(node, instruction)

    def _report(self, node: FaultNode, what: str, about: object) -> None:
        if self._trace is not None:
            self._trace(f"{self._queue.now:10.4f}  {node.rank.name} {what} {about}")
