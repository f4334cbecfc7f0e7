"""Drives the real cores of one scenario in virtual time, with its faults, under the eyes of the oracle.

Time moves as in `rrfp.sim.engine`; links are those of `rrfp.sim.fault_network`. A stage opens its next step as soon as
it has ended the last one, without waiting for others, so messages of the next step come early. When a core refuses an
event, or a rank dies, every other core is told `Aborted`, as the shell would tell it, and must stop at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rrfp.core import events as ev
from rrfp.core.stage_core import StageCore
from rrfp.errors import ConfigError, Origin, PeerLostError, ProtocolError
from rrfp.sim.fault_agenda import Agenda
from rrfp.sim.fault_network import Delivery, Network, Parcel
from rrfp.sim.fault_node import Node, Run, stall_of
from rrfp.sim.fault_oracle import Breach, Ending, Witness
from rrfp.sim.fault_plan import Death, MessageId
from rrfp.sim.fault_scenario import Scenario
from rrfp.sim.fault_values import MissingInputError, Reference, StageValues

#: Makes the core of a stage; tests pass broken ones, to show that the oracle notices.
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
        self._trace = trace
        self._death = next((fault for fault in scenario.faults if isinstance(fault, Death)), None)
        self._agenda = Agenda(scenario.faults)
        self._network = Network(scenario.faults)
        graph = scenario.graph
        self._references = [Reference(graph, step) for step in scenario.steps]
        self._nodes = tuple(
            Node(
                make_core(graph, stage, scenario.make_hint(stage), limit, in_order=scenario.in_order),
                StageValues(graph),
                Witness(graph, stage, limit),
            )
            for stage, limit in enumerate(scenario.limits)
        )
        self._objections: list[str] = []
        #: The first failure of the run, by any stage.
        self._first: tuple[Ending, Origin] | None = None

    def run(self) -> Run:
        """Run it to its end, whatever that is."""
        for node in self._nodes:
            self._agenda.put(0.0, node.stage, self._open, 0)
        if self._death is not None:
            self._foretell(self._death)
        try:
            self._let_happen()
        except ConfigError as error:
            return self._result(Ending.UNFIT, str(error))
        except Exception as error:  # whatever a core raises that is no ProtocolError
            return self._result(Ending.CRASHED, f"{type(error).__name__} at {self._agenda.now:.4f} s: {error}")
        if self._first is not None:
            ending, origin = self._first
            return self._result(ending, f"aborted by {origin}")
        if self._all_finished():
            return self._result(Ending.FINISHED, "")
        return self._result(Ending.STALLED, str(stall_of(self._nodes)))

    def _let_happen(self) -> None:
        agenda = self._agenda
        while True:
            while (touched := agenda.instant()) is not None:
                for stage in touched:
                    self._decide(self._nodes[stage])
                if agenda.happened > _MOST_EVENTS:
                    raise RuntimeError(f"it does not end: {agenda.happened} events")
            kept = self._network.flush(agenda.now)
            if not kept:
                return
            self._deliver_later(kept)

    def _result(self, ending: Ending, text: str) -> Run:
        seen = [what for node in self._nodes for what in node.witness.objections]
        return Run(self._nodes, self._network, ending, text, (*seen, *self._objections))

    def _all_finished(self) -> bool:
        return all(node.num_finished == len(self._scenario.steps) for node in self._nodes)

    # Steps and tasks.

    def _open(self, stage: int, number: int) -> None:
        node, scenario = self._nodes[stage], self._scenario
        if node.origin is not None:
            return
        step = scenario.steps[number]
        self._say(node, f"opens {step}")
        sizes = None if scenario.sizes is None else scenario.sizes[: step.microbatches]
        node.values.open_step()
        breach = node.witness.open_step(step, self._references[number])
        self._tell(node, ev.StepOpened(number, step.mode, step.microbatches, sizes), breach)
        self._deliver_later(self._network.step_opened(stage, number, self._agenda.now))

    def _decide(self, node: Node) -> None:
        core = node.core
        if node.origin is not None:
            if (run := core.decide()) is not None:
                self._object(f"stage {node.stage} wants to run {run.task} after it was aborted")
            return
        while len(node.lane) < self._scenario.depth and (run := core.decide()) is not None:
            node.witness.enqueued(run.task)
            self._apply(node.stage, ev.Enqueued(run.task))
            node.lane.append(run.task)
            if len(node.lane) == 1:
                self._start(node)

    def _start(self, node: Node) -> None:
        task, now = node.lane[0], self._agenda.now
        self._say(node, f"starts {task}")
        node.starts.append((task, now))
        try:
            node.running = node.values.compute(node.step.number, task)
        except MissingInputError as error:
            self._object(f"stage {node.stage}: {error}, in {node.step}")
        duration = self._scenario.durations[task.kind][task.virtual_stage][task.microbatch]
        # As a lane would measure it, to the last bit.
        end = now + duration
        self._agenda.put(end, node.stage, self._complete, end - now)

    def _complete(self, stage: int, seconds: float) -> None:
        node = self._nodes[stage]
        task = node.lane.popleft()
        node.values.keep(task, node.running)
        node.witness.completed(task, node.running)
        self._apply(stage, ev.Completed(task, seconds=seconds))
        if node.lane and node.origin is None:
            self._start(node)

    def _finish(self, node: Node) -> None:
        self._say(node, f"ends {node.step}")
        node.witness.finish_step(node.values.gradients)
        node.num_finished += 1
        if node.num_finished < len(self._scenario.steps):
            later = self._agenda.now + self._scenario.gaps[node.stage]
            self._agenda.put(later, node.stage, self._open, node.num_finished)

    # Messages.

    def _send_output(self, node: Node, send: ev.Send) -> None:
        task = send.task
        one = MessageId(node.step.number, task, node.stage, send.peer)
        parcel = Parcel(one, node.step, self._network.next_place(one), node.values.output(task), send.consumed)
        latency = self._scenario.latencies[task.kind][task.virtual_stage][task.microbatch]
        self._deliver_later(self._network.send(parcel, self._agenda.now, latency))
        released = ev.SendReleased(task, send.peer)
        if self._scenario.release_after:
            self._agenda.put(self._agenda.now + self._scenario.release_after, node.stage, self._apply, released)
        else:
            self._apply(node.stage, released)

    def _send_credit(self, node: Node, credit: ev.Credit) -> None:
        one = MessageId(node.step.number, credit.task, node.stage, credit.peer, is_credit=True)
        parcel = Parcel(one, node.step, self._network.next_place(one))
        self._deliver_later(self._network.send(parcel, self._agenda.now, self._scenario.control_latency))

    def _deliver_later(self, deliveries: Iterable[Delivery]) -> None:
        for time, parcel in deliveries:
            self._agenda.put(time, parcel.id.receiver, self._deliver, parcel)

    def _deliver(self, stage: int, parcel: Parcel) -> None:
        node, one, death = self._nodes[stage], parcel.id, self._death
        if death is not None and death.drops and one.sender == death.stage and self._agenda.is_dead(death.stage):
            return
        self._say(node, f"gets {one}")
        is_early = node.witness.is_early(parcel)
        breach = node.witness.arrive(parcel) if node.origin is None else None
        if one.is_credit:
            self._tell(node, ev.Consumed(parcel.step, one.sender, one.task), breach)
            return
        node.values.file(one.task, parcel.value, is_early=is_early)
        arrived = ev.Arrived(parcel.step, one.task, consumed=parcel.consumed, sequence=parcel.place)
        self._tell(node, arrived, breach)

    # Events to the core, and what follows from its instructions.

    def _apply(self, stage: int, event: ev.Event) -> None:
        self._tell(self._nodes[stage], event, None)

    def _tell(self, node: Node, event: ev.Event, breach: Breach | None) -> None:
        try:
            instructions = node.core.apply(event)
        except ProtocolError as error:
            self._refused(node, event, error, breach)
            return
        if breach is not None:
            self._object(f"stage {node.stage} took in {breach.parcel.id}, which {breach.how}")
        if node.origin is not None and instructions:
            self._object(f"stage {node.stage} gave {instructions[0]} after it was aborted")
            return
        for instruction in instructions:
            self._follow(node, instruction)

    def _follow(self, node: Node, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.Send():
                self._send_output(node, instruction)
            case ev.Credit():
                self._send_credit(node, instruction)
            case ev.Release(task):
                node.values.drop(task)
            case ev.ReduceChunk(virtual_stage):
                self._apply(node.stage, ev.ChunkReduced(virtual_stage))
            case ev.FinishStep():
                self._finish(node)
            case _:
                self._object(f"stage {node.stage} gave {instruction}, which has no place here")

    # Failure.

    def _refused(self, node: Node, event: ev.Event, error: ProtocolError, breach: Breach | None) -> None:
        self._say(node, f"refuses: {error}")
        if breach is None:
            self._object(f"stage {node.stage} refused {event}, which keeps the contract: {error}")
        elif unnamed := [word for word in breach.words if word not in str(error)]:
            self._object(f"the refusal of {breach.parcel.id} does not name {', '.join(unnamed)}: {error}")
        failure = Ending.REFUSED, Origin(node.stage, None, f"ProtocolError: {error}")
        self._abort(node.stage, failure)
        self._spread(failure, self._agenda.now)

    def _foretell(self, death: Death) -> None:
        """Who will learn of ``death``, and when."""
        error = PeerLostError(death.stage, "its connection ended or fell silent")
        failure = Ending.ABORTED, Origin(death.stage, None, f"{type(error).__name__}: {error.reason}")
        self._spread(failure, death.at + death.detection)

    def _spread(self, failure: tuple[Ending, Origin], time: float) -> None:
        """From ``time`` on the word of a failure travels from stage to stage."""
        origin = failure[1].stage
        for node in self._nodes:
            if node.stage != origin:
                delay = self._scenario.control_latency * abs(origin - node.stage)
                self._agenda.put(time + delay, node.stage, self._abort, failure)

    def _abort(self, stage: int, failure: tuple[Ending, Origin]) -> None:
        node, (ending, origin) = self._nodes[stage], failure
        if node.origin is not None:
            return  # only the first failure counts
        if self._first is None and ending is Ending.ABORTED and self._all_finished():
            return  # everybody had left in order before anybody noticed
        self._say(node, f"is told of a failure: {origin}")
        node.origin = origin
        self._first = self._first or failure
        for instruction in node.core.apply(ev.Aborted(origin)):
            if isinstance(instruction, ev.Abort):
                node.aborts.append(instruction.origin)
            else:
                self._object(f"stage {stage} answers an abort with {instruction}")

    def _object(self, what: str) -> None:
        self._objections.append(what)

    def _say(self, node: Node, what: str) -> None:
        if self._trace is not None:
            self._trace(f"{self._agenda.now:10.4f}  stage {node.stage} {what}")
