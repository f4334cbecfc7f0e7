"""Counts anew what one rank of a simulated cluster runs and holds. It never asks the core.

Every task runs once, where it belongs, after all of its inputs; D and bytes keep their limits.
"""

from __future__ import annotations

from collections.abc import Callable

from rrfp.core.admission import Limit
from rrfp.core.graph import Graph
from rrfp.core.tasks import Kind, Mode, StepId, Task


class MemoryChecker:
    """Counts the slots (D) and bytes that one rank holds.

    Args:
        graph: the dependency graph.
        stage: its stage.
        limit: what the stage may hold.
        most_bytes: what it may hold in bytes at most; None: any number.
    """

    def __init__(self, graph: Graph, stage: int, limit: Limit, most_bytes: int | None = None) -> None:
        self._graph = graph
        self._stage = stage
        chunks = graph.placement.chunks
        self._slots = None if limit.microbatches is None else limit.microbatches * chunks
        #: By how much D may pass K * C: under the paper's rule by C, where what is served frees memory.
        self._excess = chunks if limit.rule == "paper" and chunks > 1 else 0
        self._most_bytes = most_bytes
        self._mode = Mode.TRAIN
        self._held = 0
        self._bytes: dict[tuple[int, int], int] = {}
        #: Forward only: readers of a forward that have not consumed its output: a stage, or a task here.
        self._readers: dict[Task, set[int | Task]] = {}

    def open(self, step: StepId) -> None:
        """A step begins, with nothing held."""
        self._mode, self._held = step.mode, 0
        self._bytes, self._readers = {}, {}

    def enqueue(self, task: Task) -> str | None:
        """``task`` was started; returns what is wrong with that, if anything."""
        # A lane runs its tasks in order: D as it is when the lane comes to this one.
        is_training = self._mode is Mode.TRAIN
        self._held += task.kind is Kind.F
        most, wrong = self.most_held, None
        if most is not None and self._held > most:
            wrong = f"holds {self._held} chunk tasks after starting {task}, the most allowed is {most}"
        self._held -= is_training and task.kind is self._graph.last_kind(task.virtual_stage, Mode.TRAIN)
        return wrong

    def complete(self, task: Task, num_bytes: int) -> str | None:
        """``task`` has completed and left ``num_bytes``; returns what is wrong with what is held then, if anything."""
        self._bytes[task.microbatch, task.virtual_stage] = num_bytes
        wrong = None
        if self._most_bytes is not None and self.num_bytes > self._most_bytes:
            wrong = f"holds {self.num_bytes} bytes after {task}, the most allowed is {self._most_bytes}"
        if self._mode is Mode.FORWARD:
            self._await_readers(task)
        return wrong

    @property
    def most_held(self) -> int | None:
        """The bound on D in this step."""
        if self._slots is None:
            return None
        return self._slots + (self._excess if self._mode is Mode.TRAIN else 0)

    @property
    def num_bytes(self) -> int:
        """The bytes held, outputs not counted."""
        return sum(self._bytes.values())

    def consume(self, task: Task, reader: int | Task) -> None:
        """Forward only: a stage, or a task here, is done with the output of ``task``."""
        readers = self._readers.get(task)
        if readers is not None:
            readers.discard(reader)
            self._forget_if_read(task, readers)

    def _await_readers(self, task: Task) -> None:
        where = self._graph.placement.stage_of
        for source in self._graph.inputs(task):
            if where(source.virtual_stage) == self._stage:
                self.consume(source, task)
        readers = [task._replace(virtual_stage=w) for w in self._graph.successors[task.virtual_stage]]
        stages = [where(reader.virtual_stage) for reader in readers]
        self._readers[task] = {r if s == self._stage else s for r, s in zip(readers, stages, strict=True)}
        self._forget_if_read(task, self._readers[task])

    def _forget_if_read(self, task: Task, readers: set[int | Task]) -> None:
        if not readers:
            self._readers.pop(task, None)
            self._bytes.pop((task.microbatch, task.virtual_stage), None)
            self._held -= 1


class RankChecker:
    """Checks what one rank runs.

    Args:
        graph: the dependency graph.
        stage: its stage.
        memory: counts what it holds.
        object_to: called with what is wrong.
    """

    def __init__(self, graph: Graph, stage: int, memory: MemoryChecker, object_to: Callable[[str], None]) -> None:
        self.memory = memory
        self.object_to = object_to
        self.step: StepId | None = None
        self._graph = graph
        self._stage = stage
        #: Outputs that arrived, with their steps' numbers: a message may come a step early.
        self._arrived: set[tuple[int, Task]] = set()
        self._enqueued: set[Task] = set()
        self._completed: set[Task] = set()

    def open(self, step: StepId) -> None:
        """``step`` opens."""
        self._arrived = {(number, task) for number, task in self._arrived if number >= step.number}
        self.step = step
        self._enqueued, self._completed = set(), set()
        self.memory.open(step)

    def arrive(self, step: StepId, task: Task) -> None:
        """The output of ``task``, which ran on another stage in ``step``, is here."""
        self._arrived.add((step.number, task))

    def lacks(self, task: Task, step: StepId) -> list[Task]:
        """The outputs of other stages that ``task`` needs in ``step`` and that have not arrived."""
        where = self._graph.placement.stage_of
        sources = [source for source in self._graph.inputs(task) if where(source.virtual_stage) != self._stage]
        if step != self.step:
            return sources
        return [source for source in sources if (step.number, source) not in self._arrived]

    def enqueue(self, task: Task) -> None:
        """The core started ``task``."""
        if self._graph.placement.stage_of(task.virtual_stage) != self._stage:
            self.object_to(f"started {task}, which runs elsewhere")
        if task in self._enqueued:
            self.object_to(f"started {task} twice")
        assert self.step is not None, "no step was opened"
        for source in self._graph.inputs(task):
            is_remote = self._graph.placement.stage_of(source.virtual_stage) != self._stage
            is_here = (self.step.number, source) in self._arrived if is_remote else source in self._enqueued
            if not is_here:
                self.object_to(f"started {task} before {source}")
        self._enqueued.add(task)
        if wrong := self.memory.enqueue(task):
            self.object_to(wrong)

    def complete(self, task: Task, num_bytes: int) -> None:
        """``task`` has completed, and left ``num_bytes`` for its microbatch."""
        self._completed.add(task)
        if wrong := self.memory.complete(task, num_bytes):
            self.object_to(wrong)

    def finish(self, step: StepId) -> None:
        """The core says that ``step`` is done."""
        if step != self.step:
            self.object_to(f"finished {step}")
        expected = {*self._graph.tasks(self._stage, step.microbatches, step.mode)}
        if undone := expected - self._completed:
            self.object_to(f"finished without {' '.join(map(str, sorted(undone)))}")
        if strange := self._completed - expected:
            self.object_to(f"ran {' '.join(map(str, sorted(strange)))}, which it does not run in this step")
