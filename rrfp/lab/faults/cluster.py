"""A cluster in virtual time in which things go wrong, under the eyes of the checkers.

Links are those of `rrfp.lab.faults.network`. A rank opens its next step as soon as it has ended the last one, without
waiting for other stages, so messages of the next step come early. When a core refuses an event, or a rank dies, every
other core receives `Aborted`, as it does from the shell, and must stop at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TypeVar

from rrfp.arbiter.coordination import GroupMessage
from rrfp.core import events as ev
from rrfp.core.group_step import GroupMembership
from rrfp.core.stage_core import StageCore
from rrfp.errors import ConfigError, Origin, PeerLostError, ProtocolError
from rrfp.lab.cluster.checker import RankChecker
from rrfp.lab.cluster.cluster import Envelope, EventQueue, TimedCluster
from rrfp.lab.cluster.node import Node
from rrfp.lab.cluster.ranks import Rank
from rrfp.lab.faults.checker import ContractViolation, Ending, MessageChecker
from rrfp.lab.faults.dataflow import MissingInputError, Reference, StageValues
from rrfp.lab.faults.deadlock_report import DeadlockReport
from rrfp.lab.faults.faults import Death, Fault, Pause
from rrfp.lab.faults.network import FaultyNetwork, Parcel, identity_of
from rrfp.lab.faults.scenario import Scenario
from rrfp.model.tasks import Mode, StepId, Task


class FaultChecker(RankChecker):
    """Collects what is wrong on one rank, against a reference's values."""

    reference: Reference

    def __init__(self, rank: Rank, scenario: Scenario) -> None:
        graph, limit = scenario.graph, scenario.limits[rank.stage]
        # One forward of each chunk may start on any size: the first, whose size is unknown, and one while nothing is
        # held from its chunk on. In a forced order so may the lowest microbatch of each.
        extra = graph.placement.chunks_of(rank.stage) * scenario.most_held * (2 if scenario.in_order else 1)
        most_bytes = None if limit.bytes is None else limit.bytes + extra
        super().__init__(
            rank,
            graph,
            limit,
            most_bytes,
            scenario.visits_of,
            is_forced=bool(scenario.in_order),
            claims=0 if scenario.shared is None else scenario.shared.depth,
        )
        self.violations: list[str] = []

    def object_to(self, what: str) -> None:
        """Keep it for the report."""
        self.violations.append(self.named(what))

    def compare(self, task: Task, value: int) -> None:
        if value != self.reference.values.get(task):
            self.object_to(f"computed a wrong value in {task}: it read a wrong or stale input")

    def compare_gradients(self, gradients: Mapping[int, int], expected: Mapping[int, int]) -> None:
        """The step is done, with these sums over replicas by virtual stage."""
        for v, gradient in expected.items():
            if gradients.get(v, 0) != gradient:
                self.object_to(f"has a wrong gradient on virtual stage {v}")


class FaultNode(Node):
    """One rank of a run."""

    checker: FaultChecker

    def __init__(self, rank: Rank, core: StageCore, scenario: Scenario) -> None:
        super().__init__(rank, core, FaultChecker(rank, scenario))
        self.messages = MessageChecker()
        self.values = StageValues(scenario.graph)
        self._scenario = scenario
        self.running = 0
        self.sums: dict[int, int] = {}

    def open_step(self, step: StepId) -> None:
        super().open_step(step)
        scenario, rank = self._scenario, self.rank
        pool = scenario.pool_of(step, rank)
        # What other callers passed for the first virtual stage comes with the grant.
        absent = () if pool is None else [m for m, home in enumerate(pool.homes) if home != rank.replica]
        self.values.open_step(scenario.visits_of(step), scenario.salts_of(step, rank), absent)
        self.sums = {}


T = TypeVar("T")

Failure = tuple[Ending, Origin]


class Failures:
    """The failures of one run, and how reports of them travel."""

    def __init__(
        self,
        nodes: Sequence[FaultNode],
        queue: EventQueue,
        latency: float,
        num_steps: int,
        report: Callable[[FaultNode, str, object], None],
    ) -> None:
        self._nodes = nodes
        self._queue = queue
        self._latency = latency
        self._num_steps = num_steps
        self._report = report
        #: The first failure of the run, by any rank.
        self.first: Failure | None = None
        self.violations: list[str] = []

    @property
    def all_finished(self) -> bool:
        return all(node.num_finished == self._num_steps for node in self._nodes)

    def accept(
        self, node: FaultNode, receive: Callable[[], T], what: object, breach: ContractViolation | None
    ) -> T | None:
        """``node``'s answer to ``what``; None if it refused, as it must a breach."""
        try:
            result = receive()
        except ProtocolError as error:
            self.refused(node, what, error, breach)
            return None
        if breach is not None:
            self.violations.append(f"{node.rank.name} accepted {breach.parcel.id}, which {breach.how}")
        return result

    def refused(self, node: FaultNode, what: object, error: ProtocolError, breach: ContractViolation | None) -> None:
        """``node`` refused ``what``: a breach, which the error must name."""
        self._report(node, "refuses:", error)
        if breach is None:
            self.violations.append(f"{node.rank.name} refused {what}, which keeps the contract: {error}")
        elif unnamed := [word for word in breach.words if word not in str(error)]:
            self.violations.append(f"the refusal of {breach.parcel.id} does not name {', '.join(unnamed)}: {error}")
        failure = Ending.REFUSED, self._origin(node.rank, f"ProtocolError: {error}")
        self._abort(node.rank, failure)
        self._spread(node.rank, failure, self._queue.now)

    def expect_failure(self, death: Death) -> None:
        """Notify every other rank of ``death`` once it is detected."""
        error = PeerLostError(death.rank, "its connection ended or fell silent")
        rank = self._nodes[death.rank].rank
        failure = Ending.ABORTED, self._origin(rank, f"{type(error).__name__}: {error.reason}")
        self._spread(rank, failure, death.at + death.detection)

    def _origin(self, rank: Rank, cause: str) -> Origin:
        is_alone = rank.name == f"stage {rank.stage}"
        return Origin(rank.stage, None, cause, None if is_alone else int(rank))

    def _spread(self, origin: Rank, failure: Failure, time: float) -> None:
        """From ``time`` on a report travels from stage to stage."""
        for node in self._nodes:
            if node.rank != origin:
                delay = self._latency * max(1, abs(origin.stage - node.rank.stage))
                self._queue.put(time + delay, node.rank, self._abort, failure)

    def _abort(self, rank: int, failure: Failure) -> None:
        node, (ending, origin) = self._nodes[rank], failure
        if node.origin is not None:
            return  # only the first failure counts
        if self.first is None and ending is Ending.ABORTED and self.all_finished:
            return  # all ranks had left in order before any of them noticed
        self._report(node, "is notified of a failure:", origin)
        node.origin = origin
        self.first = self.first or failure
        for instruction in node.core.apply(ev.Aborted(origin)):
            self.violations.append(f"{node.rank.name} answers an abort with {instruction}")


class Availability:
    """When a rank takes in what happens to it."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        pauses = [fault for fault in faults if isinstance(fault, Pause)]
        self._pauses = sorted(pauses, key=lambda pause: pause.start)
        self._deaths = {fault.rank: fault.at for fault in faults if isinstance(fault, Death)}

    def __call__(self, rank: int, now: float) -> float | None:
        """When ``rank`` takes in what happens now; None if it has ended."""
        if self.is_dead(rank, now):
            return None
        time = now
        for pause in self._pauses:  # by their starts, so that one may run into the next
            if pause.rank == rank and pause.start <= time:
                time = max(time, pause.start + pause.seconds)
        return time

    @property
    def is_limited(self) -> bool:
        """Whether any rank ever stands still or ends."""
        return bool(self._pauses or self._deaths)

    def is_dead(self, rank: int, now: float) -> bool:
        return self._deaths.get(rank, now + 1.0) <= now


#: Makes the core of a rank; tests pass broken ones, to show that the checkers notice.
CoreFactory = Callable[..., StageCore]

#: A run of a scenario has some hundred events. One with more does not end.
_MOST_EVENTS = 100_000


class FaultCluster(TimedCluster[FaultNode]):
    """Runs one scenario, to its end with `run`."""

    def __init__(
        self,
        scenario: Scenario,
        make_core: CoreFactory = StageCore,
        # Called with everything that happens, in lines of text; None: with nothing.
        trace: Callable[[str], None] | None = None,
    ) -> None:
        self._scenario = scenario
        self._parallelism = parallelism = scenario.parallelism
        self._trace = trace
        self._death = next((fault for fault in scenario.faults if isinstance(fault, Death)), None)
        self._availability = Availability(scenario.faults)
        self.network = FaultyNetwork(scenario.faults)
        super().__init__(
            EventQueue(self._availability if self._availability.is_limited else None),
            [self._node(rank, make_core) for rank in scenario.ranks],
            scenario.steps,
            members=parallelism.members,
            depth=scenario.depth,
            coordination=parallelism.coordination,
            coupled=parallelism.coupled,
            takes_offers=scenario.takes_offers,
            sizes=scenario.sizes,
            shares=scenario.shared is not None,
        )
        self.failures = Failures(self.nodes, self.queue, scenario.control_latency, len(scenario.steps), self._report)
        self._reference = cache(lambda step, salts: Reference(scenario.graph, step, salts, scenario.visits_of(step)))
        #: By step, virtual stage, stage and member: the gradients of the replicas that have come to their sum.
        self._gradients: dict[tuple[int, ...], list[tuple[FaultNode, int]]] = {}
        self._breach: ContractViolation | None = (
            None  # how the event that a core receives next breaks the contract, if it does
        )

    def opened_on(self, node: FaultNode, step: StepId) -> ev.StepOpened:
        """With the visits, and the pool of forwards where replicas share them."""
        scenario = self._scenario
        return replace(self.opened(step), visits=scenario.visits_of(step), pool=scenario.pool_of(step, node.rank))

    def _node(self, rank: Rank, make_core: CoreFactory) -> FaultNode:
        scenario, parallelism = self._scenario, self._parallelism
        hint, limit = scenario.make_hint(rank.stage), scenario.limits[rank.stage]
        group = GroupMembership(rank.member, parallelism.members) if parallelism.is_led else None
        core = make_core(scenario.graph, rank.stage, hint, limit, group=group, in_order=scenario.in_order)
        return FaultNode(rank, core, scenario)

    def run(self) -> tuple[Ending, str]:
        """Run to the end; returns how it ended, and its error, if any."""
        for node in self.nodes:
            self.queue.put(0.0, node.rank, self._open, None)
        if self._death is not None:
            self.failures.expect_failure(self._death)
        try:
            self._let_happen()
        except ConfigError as error:
            return Ending.UNFIT, str(error)
        except Exception as error:  # whatever a core raises that is no ProtocolError
            return Ending.CRASHED, f"{type(error).__name__} at {self.queue.now:.4f} s: {error}"
        if self.failures.first is not None:
            ending, origin = self.failures.first
            return ending, f"aborted by {origin}"
        if self.failures.all_finished:
            return Ending.FINISHED, ""
        return Ending.STALLED, str(DeadlockReport(self.nodes))

    @property
    def violations(self) -> list[str]:
        """What was wrong on the way."""
        return [what for node in self.nodes for what in node.checker.violations] + self.failures.violations

    def _let_happen(self) -> None:
        queue = self.queue
        while True:
            while (touched := queue.instant()) is not None:
                for rank in touched:
                    self._decide(self.nodes[rank])
                if queue.num_happened > _MOST_EVENTS:
                    raise RuntimeError(f"it does not end: {queue.num_happened} events")
            kept = self.network.flush()
            if not kept:
                return
            self._put_now(kept)

    # Steps.

    def _open(self, rank: int, _: None) -> None:
        node = self.nodes[rank]
        if node.origin is None and self.opens_with(node).may_open(node):
            self.open_step(node)

    def open_step(self, node: FaultNode) -> None:
        """What came early, or was kept for this step, arrives."""
        step = self.steps[node.num_opened]
        self._report(node, "opens", step)
        node.open_step(step)
        node.checker.reference = self._reference(step, self._scenario.salts_of(step, node.rank))
        from_group, early = node.messages.open_step(step)
        if node.agreement is not None:
            open_step = partial(node.agreement.open_step, step)
            self.failures.accept(node, open_step, f"the early messages of {step}", from_group)
        if node.origin is None:
            self._breach = early
            self.apply(node, self.opened_on(node, step))
        self._put_now(self.network.step_opened(node.rank, step.number))
        self.allow_step(self.opens_with(node).take_waiting())

    def allow_step(self, nodes: Sequence[FaultNode]) -> None:
        """They open it now, but for one that was aborted."""
        for node in nodes:
            self.queue.put(self.queue.now, node.rank, self._open, None)

    def finish_step(self, node: FaultNode) -> None:
        """Its gradients must be right; the next step follows after a while."""
        self._report(node, "ends", node.step)
        super().finish_step(node)
        node.messages.finish_step()
        pool = self._scenario.pool_of(node.step, node.rank)
        copies = [n.rank for n in self.nodes if n.rank.member == node.rank.member and n.rank.stage == node.rank.stage]
        # Together the copies of a pool run what the reference has, else each of them all of it.
        summed = copies if pool is None else copies[:1]
        replicas = [self._reference(node.step, self._scenario.salts_of(node.step, rank)).gradients for rank in summed]
        virtual_stages = self._scenario.graph.placement.virtual_stages(node.rank.stage)
        expected = {v: sum(gradients.get(v, 0) for gradients in replicas) for v in virtual_stages}
        node.checker.compare_gradients(node.sums, expected)
        if node.num_finished < len(self.steps):
            later = self.queue.now + self._scenario.gaps[node.rank.stage]
            self.queue.put(later, node.rank, self._open, None)

    # Tasks.

    def _decide(self, node: FaultNode) -> None:
        if node.origin is None:
            node.arbiter.kick()
            node.arbiter.decide()
        elif (run := node.core.decide()) is not None:
            self.failures.violations.append(f"{node.rank.name} wants to run {run.task} after it was aborted")

    def begin(self, nodes: Sequence[FaultNode]) -> None:
        """Each computes its value, and takes its time."""
        for node in nodes:
            task, now = node.lane[0], self.queue.now
            self._report(node, "starts", task)
            try:
                node.running = node.values.compute(node.step.number, task)
            except MissingInputError as error:
                self.failures.violations.append(f"{node.rank.name}: {error}, in {node.step}")
            # As a lane would measure it, to the last bit.
            end = now + self._scenario.seconds(node.rank, task)
            self.queue.put(end, node.rank, self._complete, end - now)

    def _complete(self, rank: int, seconds: float) -> None:
        node = self.nodes[rank]
        node.values.keep(node.lane[0], node.running)
        node.checker.compare(node.lane[0], node.running)
        self.take_offer(node)
        self.complete(node, seconds)

    def bytes_held(self, node: FaultNode, task: Task) -> int:
        """The same after each task of a chunk but the last."""
        is_last = task.kind is self._scenario.graph.last_kind(task.virtual_stage, Mode.TRAIN)
        return 0 if is_last else self._scenario.bytes_held(node.rank, task.microbatch)

    def preview(self, node: FaultNode, task: Task) -> None:
        """Its inputs show exactly what it will hold here."""
        self.apply(node, ev.Previewed(task, self.bytes_held(node, task)))

    def drop(self, node: FaultNode, task: Task) -> None:
        node.values.drop(task)

    def reduce(self, node: FaultNode, virtual_stage: int) -> None:
        """Sum over the replicas, once all have come to it."""
        key = node.step.number, virtual_stage, node.rank.stage, node.rank.member
        gradients = self._gradients.setdefault(key, [])
        gradients.append((node, node.values.gradients.get(virtual_stage, 0)))
        if len(gradients) < self._parallelism.replicas:
            return
        total, reduced = sum(gradient for _, gradient in gradients), ev.ChunkReduced(virtual_stage)
        for other, _ in gradients:
            other.sums[virtual_stage] = total
        for other, _ in gradients:
            if other is node:
                self.apply(other, reduced)
            else:
                self.queue.put(self.queue.now, other.rank, self._happened, reduced)

    # Messages.

    def send(self, packet: Envelope) -> None:
        """Over the faulty links."""
        content, sender = packet.content, self.nodes[packet.sender]
        if isinstance(content, ev.BegunReported):  # no fault is planned for advice
            later = self.queue.now + self._scenario.control_latency
            self.queue.put(later, packet.receiver, self._begun_reported, content)
            return
        message, latency, value = identity_of(packet), self._scenario.control_latency, 0
        number = self.network.next_number(message)
        if isinstance(content, ev.Arrived):
            value = sender.values.output(content.task)
            latency = self._scenario.latency(content, packet.sender.member)
            content = ev.Arrived(content.step, content.task, consumed=content.consumed)
        elif (microbatch := _given(packet)) is not None:
            value = sender.values.given[microbatch] or 0
        parcel = Parcel(message, number, packet._replace(content=content), value)
        self._put(self.network.send(parcel, self.queue.now, latency))

    def release(self, node: FaultNode, released: ev.SendReleased) -> None:
        """Its memory becomes free after a while."""
        if self._scenario.release_after:
            later = self.queue.now + self._scenario.release_after
            self.queue.put(later, node.rank, self._happened, released)
        else:
            self.apply(node, released)

    def _begun_reported(self, rank: int, event: ev.BegunReported) -> None:
        node = self.nodes[rank]
        if node.pauses is not None:
            node.pauses.begun_reported(event)
        self.apply(node, event)

    def _put(self, arrivals: Iterable[tuple[float, Parcel]]) -> None:
        for time, parcel in arrivals:
            self.queue.put(time, parcel.id.receiver, self._arrive, parcel)

    def _put_now(self, parcels: Iterable[Parcel]) -> None:
        self._put((self.queue.now, parcel) for parcel in parcels)

    def _arrive(self, rank: int, parcel: Parcel) -> None:
        node, content, death = self.nodes[rank], parcel.content, self._death
        is_lost = death is not None and death.drops and parcel.id.sender == death.rank
        if is_lost and self._availability.is_dead(parcel.id.sender, self.queue.now):
            return
        self._report(node, "gets", parcel.id)
        is_for_arbiter = isinstance(content, GroupMessage) and node.agreement is not None
        if is_for_arbiter and node.origin is not None:
            return
        if isinstance(content, ev.Arrived):
            node.values.file(content.task, parcel.value, is_early=node.messages.is_early(parcel))
        breach = node.messages.judge(parcel) if node.origin is None else None
        self._breach = None if is_for_arbiter else breach
        assert parcel.packet is not None, f"{parcel.id} has no content"
        if (microbatch := _given(parcel.packet)) is not None and content.step == node.step_or_none:
            node.values.given[microbatch] = parcel.value
        self.failures.accept(node, partial(self.deliver, parcel.packet), parcel.id, breach if is_for_arbiter else None)

    # What a core takes in, and what it must refuse.

    def _happened(self, rank: int, event: ev.Event) -> None:
        self.apply(self.nodes[rank], event)

    def apply(self, node: FaultNode, event: ev.Event) -> None:
        """Its core must take the event in, unless it breaks the contract."""
        breach, self._breach = self._breach, None
        instructions = self.failures.accept(node, partial(node.core.apply, event), event, breach)
        if instructions is None:
            return
        if node.origin is not None and instructions:
            self.failures.violations.append(f"{node.rank.name} gave {instructions[0]} after it was aborted")
            return
        for instruction in instructions:
            self.perform(node, instruction)

    def _report(self, node: FaultNode, what: str, about: object) -> None:
        if self._trace is not None:
            self._trace(f"{self.queue.now:10.4f}  {node.rank.name} {what} {about}")


def _given(packet: Envelope) -> int | None:
    """The microbatch whose forward it grants to its receiver, with what the sender's caller passed for it."""
    content = packet.content
    is_own = isinstance(content, ev.Granted) and content.copy == packet.receiver.replica
    return content.task.microbatch if is_own and content.task is not None else None
