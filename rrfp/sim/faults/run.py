"""Drives the real cores of one scenario in virtual time, with its faults, under the eyes of the oracle.

Time moves as in `rrfp.sim.engine`; links are those of `rrfp.sim.faults.network`. A rank opens its next step as soon as
it has ended the last one, without waiting for other stages, so messages of the next step come early. When a core
refuses an event, or a rank dies, every other core is told `Aborted`, as the shell would tell it, and must stop at once.
Groups talk through the arbiters that the shell uses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rrfp.core import events as ev
from rrfp.core.stage_core import StageCore
from rrfp.core.tasks import Task
from rrfp.errors import ConfigError, ProtocolError
from rrfp.sim.faults.agenda import Agenda
from rrfp.sim.faults.checker import Ending
from rrfp.sim.faults.dataflow import MissingInputError, Reference, StageValues
from rrfp.sim.faults.failures import Failures
from rrfp.sim.faults.faults import Death, GroupMessageId
from rrfp.sim.faults.group_messages import Breach
from rrfp.sim.faults.meeting import GroupMeeting, ReplicaMeeting
from rrfp.sim.faults.network import Network, Parcel
from rrfp.sim.faults.node import Node, Run, stall_of
from rrfp.sim.faults.post import Post
from rrfp.sim.faults.ranks import Rank
from rrfp.sim.faults.scenario import Scenario
from rrfp.sim.faults.witness import Witness

#: Makes the core of a rank; tests pass broken ones, to show that the oracle notices.
CoreFactory = Callable[..., StageCore]

#: A run of a scenario has some hundred events. One with more does not end.
_MOST_EVENTS = 100_000


class FaultEngine:
    """Runs one scenario.

    Args:
        scenario: what to run.
        make_core: makes the cores, called like `StageCore`.
        trace: told of everything that happens, in lines of text; None: nobody is told.
    """

    def __init__(
        self, scenario: Scenario, make_core: CoreFactory = StageCore, trace: Callable[[str], None] | None = None
    ) -> None:
        self._scenario = scenario
        self._crew = crew = scenario.crew
        self._trace = trace
        self._death = next((fault for fault in scenario.faults if isinstance(fault, Death)), None)
        self._agenda = Agenda(scenario.faults)
        self._network = Network(scenario.faults)
        stages = scenario.graph.placement.stages
        self._ranks = crew.ranks(stages)
        numbers = {(rank.stage, rank.replica, rank.member): rank for rank in self._ranks}
        self._post = Post(scenario, self._network, self._agenda, numbers, self._deliver)
        self._nodes = tuple(self._node(rank, make_core) for rank in self._ranks)
        self._groups = {
            (stage, replica): GroupMeeting(
                [self._nodes[numbers[stage, replica, member]] for member in range(crew.members)],
                coupled=crew.coupled,
                is_led=crew.is_led,
            )
            for stage in range(stages)
            for replica in range(crew.replicas)
        }
        self._sums = ReplicaMeeting(crew.replicas)
        self._failures = Failures(self._nodes, self._agenda, scenario.control_latency, len(scenario.steps), self._say)
        #: By step, replica and member.
        self._references: dict[tuple[int, int, int], Reference] = {}
        #: How the message that a core is told right now breaks the contract, if it does.
        self._heard: Breach | None = None
        self._objections: list[str] = []

    def _node(self, rank: Rank, make_core: CoreFactory) -> Node:
        scenario, crew = self._scenario, self._crew
        graph, limit, hint = scenario.graph, scenario.limits[rank.stage], scenario.make_hint(rank.stage)
        group = crew.group(rank) if crew.is_led else None
        core = make_core(graph, rank.stage, hint, limit, group=group, in_order=scenario.in_order)
        witness = Witness(graph, rank, limit, crew, is_forced=bool(scenario.in_order))
        node = Node(rank, core, StageValues(graph, rank.salt), witness)
        node.join(crew, scenario.depth, self._dispatch, self._post.to_member, self._take_group_message)
        return node

    def run(self) -> Run:
        """Run it to its end, whatever that is."""
        for node in self._nodes:
            self._agenda.put(0.0, node.rank, self._open, 0)
        if self._death is not None:
            self._failures.foretell(self._death)
        try:
            self._let_happen()
        except ConfigError as error:
            return self._result(Ending.UNFIT, str(error))
        except Exception as error:  # whatever a core raises that is no ProtocolError
            return self._result(Ending.CRASHED, f"{type(error).__name__} at {self._agenda.now:.4f} s: {error}")
        if self._failures.first is not None:
            ending, origin = self._failures.first
            return self._result(ending, f"aborted by {origin}")
        if self._failures.all_finished:
            return self._result(Ending.FINISHED, "")
        return self._result(Ending.STALLED, str(stall_of(self._nodes)))

    def _let_happen(self) -> None:
        agenda = self._agenda
        while True:
            while (touched := agenda.instant()) is not None:
                for rank in touched:
                    self._decide(self._nodes[rank])
                if agenda.happened > _MOST_EVENTS:
                    raise RuntimeError(f"it does not end: {agenda.happened} events")
            kept = self._network.flush(agenda.now)
            if not kept:
                return
            self._post.later(kept)

    def _result(self, ending: Ending, text: str) -> Run:
        seen = [what for node in self._nodes for what in node.witness.objections]
        origin = None if self._failures.first is None else self._failures.first[1]
        objections = (*seen, *self._failures.objections, *self._objections)
        return Run(self._nodes, self._network, ending, text, objections, origin)

    # Steps and tasks.

    def _open(self, rank: int, number: int) -> None:
        node, scenario, group = self._nodes[rank], self._scenario, self._group(self._nodes[rank])
        if node.origin is not None or not group.may_open(node, number):
            return
        step = scenario.steps[number]
        self._say(node, f"opens {step}")
        sizes = None if scenario.sizes is None else scenario.sizes[: step.microbatches]
        node.open_step()
        early_words, early = node.witness.open_step(step, self._reference(number, node.rank.replica, node.rank))
        if node.agreement is not None:
            self._let_take(node, partial(node.agreement.open_step, step), f"what was said of {step}", early_words)
        if node.origin is None:
            self._tell(node, ev.StepOpened(number, step.mode, step.microbatches, sizes), early)
        self._post.later(self._network.step_opened(rank, number, self._agenda.now))
        for waiting, its_number in group.take_waiting():
            self._agenda.put(self._agenda.now, waiting, self._open, its_number)

    def _group(self, node: Node) -> GroupMeeting:
        return self._groups[node.rank.stage, node.rank.replica]

    def _reference(self, number: int, replica: int, like: Rank) -> Reference:
        """What the ranks of ``replica`` that have the place of ``like`` in their groups compute in a step."""
        key = number, replica, like.member
        if key not in self._references:
            salt = like.salt_in(replica)
            self._references[key] = Reference(self._scenario.graph, self._scenario.steps[number], salt)
        return self._references[key]

    def _decide(self, node: Node) -> None:
        if node.origin is None:
            node.arbiter.kick()
            node.arbiter.decide()
        elif (run := node.core.decide()) is not None:
            self._object(f"{node.rank.name} wants to run {run.task} after it was aborted")

    def _dispatch(self, node: Node, task: Task) -> None:
        node.witness.enqueued(task)
        self._group(node).enqueue(node, task)
        self._tell(node, ev.Enqueued(task), None)
        node.lane.append(task)
        if len(node.lane) == 1:
            self._start(node)

    def _start(self, node: Node) -> None:
        for one in self._group(node).begin(node):
            self._run_on_lane(one)

    def _run_on_lane(self, node: Node) -> None:
        task, now = node.lane[0], self._agenda.now
        if self._trace is not None:
            self._say(node, f"starts {task}")
        node.starts.append((task, now))
        try:
            node.running = node.values.compute(node.step.number, task)
        except MissingInputError as error:
            self._object(f"{node.rank.name}: {error}, in {node.step}")
        duration = self._scenario.durations[task.kind][task.virtual_stage][task.microbatch]
        # As a lane would measure it, to the last bit.
        end = now + duration
        self._agenda.put(end, node.rank, self._complete, end - now)

    def _complete(self, rank: int, seconds: float) -> None:
        node = self._nodes[rank]
        task = node.lane.popleft()
        node.values.keep(task, node.running)
        node.witness.completed(task, node.running)
        completed = ev.Completed(task, node.witness.memory.left_by(task), seconds)
        if node.leader_protocol is not None and node.origin is None:
            node.leader_protocol.on_completed(completed, node.step)
        self._tell(node, completed, None)
        if node.lane and node.origin is None:
            self._start(node)

    def _reduce(self, node: Node, virtual_stage: int) -> None:
        reduced = ev.ChunkReduced(virtual_stage)
        for one in self._sums.give(node, virtual_stage):
            if one is node:
                self._tell(one, reduced, None)
            else:
                self._agenda.put(self._agenda.now, one.rank, self._happened, reduced)

    def _finish(self, node: Node) -> None:
        self._say(node, f"ends {node.step}")
        virtual_stages = self._scenario.graph.placement.virtual_stages(node.rank.stage)
        replicas = [self._reference(node.step.number, r, node.rank).gradients for r in range(self._crew.replicas)]
        node.witness.finish_step(node.sums, {v: sum(one.get(v, 0) for one in replicas) for v in virtual_stages})
        node.num_finished += 1
        if node.num_finished < len(self._scenario.steps):
            later = self._agenda.now + self._scenario.gaps[node.rank.stage]
            self._agenda.put(later, node.rank, self._open, node.num_finished)

    def _send(self, node: Node, send: ev.Send) -> None:
        self._post.output(node, send)
        released = ev.SendReleased(send.task, send.peer)
        if self._scenario.release_after:
            self._agenda.put(self._agenda.now + self._scenario.release_after, node.rank, self._happened, released)
        else:
            self._tell(node, released, None)

    # What a rank is told: by others, and by itself.

    def _deliver(self, rank: int, parcel: Parcel) -> None:
        node, one, death = self._nodes[rank], parcel.id, self._death
        if death is not None and death.drops and one.sender == death.rank and self._agenda.is_dead(death.rank):
            return
        if self._trace is not None:
            self._say(node, f"gets {one}")
        is_early = node.witness.is_early(parcel)
        breach = node.witness.arrive(parcel) if node.origin is None else None
        sender = self._ranks[one.sender]
        if isinstance(one, GroupMessageId):
            self._hear(node, sender.member, parcel, breach)
        elif one.is_credit:
            self._tell(node, ev.Consumed(parcel.step, sender.stage, one.task), breach)
        else:
            node.values.file(one.task, parcel.value, is_early=is_early)
            sequence = parcel.place if self._crew.is_numbered else None
            self._tell(node, ev.Arrived(parcel.step, one.task, consumed=parcel.consumed, sequence=sequence), breach)

    def _hear(self, node: Node, member: int, parcel: Parcel, breach: Breach | None) -> None:
        assert parcel.group_message is not None
        if node.agreement is not None and node.origin is None:
            self._let_take(node, partial(node.agreement.on_message, member, parcel.group_message), parcel.id, breach)
        elif node.leader_protocol is not None:
            self._heard = breach
            try:
                node.leader_protocol.on_message(member, parcel.group_message)
            except ProtocolError as error:
                self._failures.refused(node, parcel.id, error, breach)

    def _take_group_message(self, node: Node, event: ev.Event) -> None:
        """A message inside the group in the form in which the core takes it."""
        self._tell(node, event, self._heard)

    def _happened(self, rank: int, event: ev.Event) -> None:
        self._tell(self._nodes[rank], event, None)

    def _let_take(self, node: Node, take: Callable[[], None], what: object, breach: Breach | None) -> None:
        """Let an arbiter take in what it must refuse if that is a breach, and only then."""
        try:
            take()
        except ProtocolError as error:
            self._failures.refused(node, what, error, breach)
            return
        self._expect_no(breach, node)

    def _tell(self, node: Node, event: ev.Event, breach: Breach | None) -> None:
        """Tell a core something that it must refuse if it is a breach, and only then; and do what it says."""
        try:
            instructions = node.core.apply(event)
        except ProtocolError as error:
            self._failures.refused(node, event, error, breach)
            return
        self._expect_no(breach, node)
        if node.origin is not None and instructions:
            self._object(f"{node.rank.name} gave {instructions[0]} after it was aborted")
            return
        for instruction in instructions:
            self._follow(node, instruction)

    def _expect_no(self, breach: Breach | None, node: Node) -> None:
        if breach is not None:
            self._object(f"{node.rank.name} took in {breach.parcel.id}, which {breach.how}")

    def _follow(self, node: Node, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.Send():
                self._send(node, instruction)
            case ev.Credit():
                self._post.credit(node, instruction)
            case ev.Release(task):
                node.values.drop(task)
            case ev.ReduceChunk(virtual_stage):
                self._reduce(node, virtual_stage)
            case ev.ReportReady() | ev.Order() if node.leader_protocol is not None:
                node.leader_protocol.perform(instruction, node.step)
            case ev.FinishStep():
                self._finish(node)
            case _:
                self._object(f"{node.rank.name} gave {instruction}, which has no place here")

    def _object(self, what: str) -> None:
        self._objections.append(what)

    def _say(self, node: Node, what: str) -> None:
        if self._trace is not None:
            self._trace(f"{self._agenda.now:10.4f}  {node.rank.name} {what}")
