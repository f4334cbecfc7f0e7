"""What a rank holds in a simulated step, counted anew and never asked of its core: slots (D) and bytes."""

from __future__ import annotations

from rrfp.core.admission import Limit
from rrfp.core.graph import Graph
from rrfp.core.tasks import Kind, Mode, StepId, Task


class MemoryWitness:
    """Counts for one rank.

    Args:
        graph: the dependency graph.
        stage: its stage.
        limit: what the stage may hold.
        own_bytes: what a microbatch holds here on a chunk, from its forward to its last task.
        most_bytes: the same on that rank of its group that holds the most.
        is_forced: some kind runs in microbatch order somewhere.
    """

    def __init__(
        self, graph: Graph, stage: int, limit: Limit, own_bytes: int, most_bytes: int, *, is_forced: bool
    ) -> None:
        self._graph = graph
        self._stage = stage
        chunks = graph.placement.chunks
        self._slots = None if limit.microbatches is None else limit.microbatches * chunks
        #: By how much D may pass K * C: under the paper's rule by C, where what is drained frees memory.
        self._excess = chunks if limit.rule == "paper" and chunks > 1 else 0
        self._own_bytes = own_bytes
        # One forward of each chunk may start on any size: the first, whose size nobody knows, and the one that nothing
        # held from its chunk on will make room for. In a forced order so may the lowest microbatch of each.
        extra = chunks * most_bytes * (2 if is_forced else 1)
        self._most_bytes = None if limit.bytes is None else limit.bytes + extra
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
        most = None if self._slots is None else self._slots + (self._excess if is_training else 0)
        wrong = None
        if most is not None and self._held > most:
            wrong = f"holds {self._held} chunk tasks after starting {task}, the most allowed is {most}"
        self._held -= is_training and task.kind is self._graph.last_kind(task.virtual_stage, Mode.TRAIN)
        return wrong

    def left_by(self, task: Task) -> int:
        """The bytes that ``task`` leaves behind for its microbatch."""
        return 0 if task.kind is self._graph.last_kind(task.virtual_stage, Mode.TRAIN) else self._own_bytes

    def complete(self, task: Task) -> str | None:
        """``task`` has completed; returns what is wrong with what is held then, if anything."""
        wrong = None
        if self._most_bytes is not None:
            self._bytes[task.microbatch, task.virtual_stage] = self.left_by(task)
            total = sum(self._bytes.values())
            if total > self._most_bytes:
                wrong = f"holds {total} bytes after {task}, the most allowed is {self._most_bytes}"
        if self._mode is Mode.FORWARD:
            self._await_readers(task)
        return wrong

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
