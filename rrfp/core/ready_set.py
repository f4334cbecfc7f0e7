"""The ready set of one stage: sorted heads for each kind and chunk, forwards behind the admission gate.

Kept sorted, because scanning a thousand ready tasks for each decision costs more than running the decision.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Literal

from rrfp.core.admission import Admission
from rrfp.core.tasks import Kind, Task

#: "deeper": forwards of the deeper chunk first. "paper": Algorithm 1's order, the shallower chunk first.
ChunkOrder = Literal["deeper", "paper"]


class ReadySet:
    """Tasks of one stage whose inputs are all present; a forward counts as ready only if admission allows it.

    Hints read it: ``head``, ``first``, iteration (F, B, W; deeper chunk first; then by microbatch), ``in``, ``bool``.
    Only the core adds and removes.

    Args:
        virtual_stages: the stage's virtual stages in chunk order.
        admission: gates forwards.
    """

    __slots__ = ("_admission", "_chunk_of", "_deeper_first", "_next_forward", "_queues", "_started", "_virtual_stages")

    def __init__(self, virtual_stages: Sequence[int], admission: Admission) -> None:
        self._virtual_stages = tuple(virtual_stages)
        self._deeper_first = tuple(reversed(range(len(virtual_stages))))
        self._chunk_of = {v: chunk for chunk, v in enumerate(virtual_stages)}
        self._admission = admission
        self._queues: dict[Kind, list[list[int]]] = {kind: [[] for _ in virtual_stages] for kind in Kind}
        # For the reserve rule: per chunk, the lowest microbatch not yet forwarded and the started ones above it.
        self._next_forward = [0] * len(virtual_stages)
        self._started: list[set[int]] = [set() for _ in virtual_stages]

    @property
    def num_chunks(self) -> int:
        """C, the chunks of this stage."""
        return len(self._virtual_stages)

    def head(self, kind: Kind, chunk: int) -> Task | None:
        """The lowest ready microbatch of ``kind`` on local ``chunk``, or None."""
        queue = self._queues[kind][chunk]
        if not queue or (kind is Kind.F and not self._allows(chunk, queue[0])):
            return None
        return Task(kind, queue[0], self._virtual_stages[chunk])

    def first(self, kind: Kind, chunk_order: ChunkOrder = "deeper") -> Task | None:
        """The best-ranked ready task of ``kind``: deeper chunk first, then the lowest microbatch.

        Args:
            kind: F, B or W.
            chunk_order: for F only; ``"paper"`` takes the shallower chunk first.
        """
        chunks = reversed(self._deeper_first) if kind is Kind.F and chunk_order == "paper" else self._deeper_first
        for chunk in chunks:
            if (task := self.head(kind, chunk)) is not None:
                return task
        return None

    def heads(self) -> Iterator[Task]:
        """The lowest ready microbatch of each kind and chunk that has one."""
        for kind in Kind:
            for chunk in self._deeper_first:
                if (task := self.head(kind, chunk)) is not None:
                    yield task

    def __contains__(self, task: object) -> bool:
        if not isinstance(task, Task):
            return False
        kind, microbatch, virtual_stage = task
        chunk = self._chunk_of.get(virtual_stage)
        if chunk is None or not _has(self._queues[kind][chunk], microbatch):
            return False
        return kind is not Kind.F or self._allows(chunk, microbatch)

    def __iter__(self) -> Iterator[Task]:
        for kind in Kind:
            for chunk in self._deeper_first:
                for microbatch in self._queues[kind][chunk]:
                    if kind is not Kind.F or self._allows(chunk, microbatch):
                        yield Task(kind, microbatch, self._virtual_stages[chunk])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        for kind, queues in self._queues.items():
            for chunk, queue in enumerate(queues):
                if queue and (kind is not Kind.F or self._allows(chunk, queue[0])):
                    return True
        return False

    def __repr__(self) -> str:
        return f"ReadySet({' '.join(map(str, self))})"

    def add(self, task: Task) -> None:
        """All inputs of ``task`` are present. For the core only."""
        insort(self._queues[task.kind][self._chunk_of[task.virtual_stage]], task.microbatch)

    def remove(self, task: Task) -> bool:
        """``task`` was enqueued. For the core only. False if its inputs were not all present."""
        chunk = self._chunk_of.get(task.virtual_stage)
        if chunk is None:
            return False
        queue = self._queues[task.kind][chunk]
        if not _has(queue, task.microbatch):
            return False
        del queue[bisect_left(queue, task.microbatch)]
        if task.kind is Kind.F:
            self._note_forward(chunk, task.microbatch)
        return True

    def gated(self) -> Iterator[Task]:
        """Forwards whose inputs are present and which memory keeps out."""
        for chunk in self._deeper_first:
            for microbatch in self._queues[Kind.F][chunk]:
                if not self._allows(chunk, microbatch):
                    yield Task(Kind.F, microbatch, self._virtual_stages[chunk])

    def _allows(self, chunk: int, microbatch: int) -> bool:
        return self._admission.allows(chunk, microbatch, self._next_forward[chunk])

    def _note_forward(self, chunk: int, microbatch: int) -> None:
        started = self._started[chunk]
        started.add(microbatch)
        while self._next_forward[chunk] in started:
            started.discard(self._next_forward[chunk])
            self._next_forward[chunk] += 1


def _has(queue: list[int], microbatch: int) -> bool:
    at = bisect_left(queue, microbatch)
    return at < len(queue) and queue[at] == microbatch
