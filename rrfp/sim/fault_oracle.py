"""What must be true of a run with faults, worked out from the contracts alone and never asked of the cores.

A `Witness` watches one stage: which message keeps the transport's contract and which breaks it, how much memory is
taken, that every task runs once, where it belongs, on the right inputs. `REQUIRED` says how a run may end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rrfp.core.admission import Limit
from rrfp.core.graph import Graph
from rrfp.core.tasks import Kind, Mode, StepId, Task
from rrfp.sim.fault_network import Parcel
from rrfp.sim.fault_values import Reference


class Ending(StrEnum):
    """How a run ends."""

    FINISHED = "finished"  # every task ran once, on the right inputs
    REFUSED = "refused"  # a core raised ProtocolError, which names the message
    STALLED = "stalled"  # nothing can happen any longer; the report names the message and the stage that owes it
    ABORTED = "aborted"  # every living core was told which rank died
    CRASHED = "crashed"  # an exception that is no ProtocolError, or events without end: always wrong
    UNFIT = "unfit"  # the hint said, by a ConfigError, that it is not made for this pipeline


_FINISHED = frozenset({Ending.FINISHED})

#: How a run with only this fault may end. Which of two it is, the rules below say for each run:
#: - lose: refused if a later message of the channel and step arrives, stalled if none does;
#: - swap, delay of the message itself: refused if a later one of the channel and step overtakes it, else harmless;
#: - death: aborted, unless every stage had finished.
#: Credits name their task and are in no order: swapped or late ones are harmless.
REQUIRED: Mapping[str, frozenset[Ending]] = {
    "spike": _FINISHED,
    "pause": _FINISHED,
    "death": frozenset({Ending.ABORTED, Ending.FINISHED}),
    "lose": frozenset({Ending.REFUSED, Ending.STALLED}),
    "lose credit": frozenset({Ending.STALLED}),
    "duplicate": frozenset({Ending.REFUSED}),
    "duplicate credit": frozenset({Ending.REFUSED}),
    "swap": frozenset({Ending.REFUSED, Ending.FINISHED}),
    "swap credit": _FINISHED,
    "delay": frozenset({Ending.REFUSED, Ending.FINISHED}),
    "delay credit": _FINISHED,
    "delay copy": frozenset({Ending.REFUSED}),
    "delay copy credit": frozenset({Ending.REFUSED}),
}


@dataclass(frozen=True, slots=True)
class Breach:
    """A message that breaks the transport's contract as its receiver takes it in. The core must refuse it.

    Attributes:
        parcel: the message.
        how: in what way.
        words: what the refusal must name.
    """

    parcel: Parcel
    how: str
    words: tuple[str, ...]


class Witness:
    """Watches one stage.

    Args:
        graph: the dependency graph.
        stage: this stage.
        limit: what it may hold.
    """

    def __init__(self, graph: Graph, stage: int, limit: Limit) -> None:
        self._graph = graph
        self._stage = stage
        place = graph.placement
        self._slots = None if limit.microbatches is None else limit.microbatches * place.chunks
        #: By how much D may pass K * C: under the paper's rule by C, where what is served frees memory.
        self._excess = place.chunks if limit.rule == "paper" and place.chunks > 1 else 0
        #: What the oracle objects to.
        self.objections: list[str] = []
        self.step: StepId | None = None
        self.is_step_over = True
        self._next_number = 0
        self._early: list[Parcel] = []
        self._due: dict[tuple[int, int, str], int] = {}
        self._credited: set[tuple[Task, int]] = set()
        self._reference: Reference | None = None
        self._enqueued: set[Task] = set()
        self._completed: set[Task] = set()
        self._held = 0
        #: Forward only: readers of a forward that have not consumed its output: a stage, or a task here.
        self._readers: dict[Task, set[int | Task]] = {}

    # Messages.

    def open_step(self, step: StepId, reference: Reference) -> Breach | None:
        """The step opens, and what came early is taken in; returns the first breach among that."""
        self.step, self.is_step_over, self._reference = step, False, reference
        self._next_number = step.number + 1
        self._due, self._credited = {}, set()
        self._enqueued, self._completed, self._readers, self._held = set(), set(), {}, 0
        early, self._early = self._early, []
        breaches = [breach for parcel in early if (breach := self.arrive(parcel))]
        return breaches[0] if breaches else None

    def is_early(self, parcel: Parcel) -> bool:
        """Whether ``parcel`` is for the step that opens next."""
        return parcel.step.number == self._next_number and not parcel.id.is_credit

    def arrive(self, parcel: Parcel) -> Breach | None:
        """``parcel`` reaches the stage; returns how it breaks the contract, if it does."""
        if self.is_early(parcel):
            self._early.append(parcel)
            return None
        one = parcel.id
        task, sender = str(one.task), f"stage {one.sender}"
        if self.step is None or parcel.step != self.step or self.is_step_over:
            return Breach(parcel, "belongs to another step", (task, sender, f"step {parcel.step.number}"))
        if one.is_credit:
            if (one.task, one.sender) in self._credited:
                return Breach(parcel, "arrived twice", (task, sender))
            self._credited.add((one.task, one.sender))
            self._consume(one.task, one.sender)
            return None
        due = self._due.get(one.channel, 0)
        self._due[one.channel] = max(due, parcel.place + 1)
        if parcel.place < due:
            return Breach(parcel, "arrived twice", (task, "twice"))
        if parcel.place > due:
            return Breach(parcel, "overtook another message, or that was lost", (task, sender, f"message {due} is due"))
        return None

    # Tasks.

    def enqueued(self, task: Task) -> None:
        """The core started ``task``."""
        assert self.step is not None
        if self._graph.placement.stage_of(task.virtual_stage) != self._stage:
            self._object(f"started {task}, which runs elsewhere")
        if task in self._enqueued:
            self._object(f"started {task} twice")
        self._enqueued.add(task)
        # A lane runs its tasks in order: D as it is when the lane comes to this one.
        is_training = self.step.mode is Mode.TRAIN
        self._held += task.kind is Kind.F
        most = None if self._slots is None else self._slots + (self._excess if is_training else 0)
        if most is not None and self._held > most:
            self._object(f"holds {self._held} chunk tasks after starting {task}, the most allowed is {most}")
        self._held -= is_training and task.kind is self._graph.last_kind(task.virtual_stage, Mode.TRAIN)

    def completed(self, task: Task, value: int) -> None:
        """``task`` has computed ``value``."""
        assert self.step is not None
        assert self._reference is not None
        if value != self._reference.values.get(task):
            self._object(f"computed a wrong value in {task}: it read a wrong or stale input")
        self._completed.add(task)
        if self.step.mode is Mode.TRAIN:
            return
        where = self._graph.placement.stage_of
        for source in self._graph.inputs(task):
            if where(source.virtual_stage) == self._stage:
                self._consume(source, task)
        readers = [task._replace(virtual_stage=w) for w in self._graph.successors[task.virtual_stage]]
        stages = [where(reader.virtual_stage) for reader in readers]
        self._readers[task] = {r if s == self._stage else s for r, s in zip(readers, stages, strict=True)}
        self._forget_if_read(task, self._readers[task])

    def _consume(self, task: Task, reader: int | Task) -> None:
        readers = self._readers.get(task)
        if readers is not None:
            readers.discard(reader)
            self._forget_if_read(task, readers)

    def _forget_if_read(self, task: Task, readers: set[int | Task]) -> None:
        if not readers:
            self._readers.pop(task, None)
            self._held -= 1

    def finish_step(self, gradients: Mapping[int, int]) -> None:
        """The core says that its step is done; ``gradients`` are the sums, by virtual stage."""
        assert self.step is not None
        assert self._reference is not None
        self.is_step_over = True
        undone = {*self._graph.tasks(self._stage, self.step.microbatches, self.step.mode)} - self._completed
        if undone:
            self._object(f"finished without {' '.join(map(str, sorted(undone)))}")
        for v in self._graph.placement.virtual_stages(self._stage):
            if gradients.get(v, 0) != self._reference.gradients.get(v, 0):
                self._object(f"has a wrong gradient on virtual stage {v}")

    def _object(self, what: str) -> None:
        self.objections.append(f"stage {self._stage} {what}, in {self.step}")
