"""What microbatches of a stage were seen to hold: what a limit on bytes expects of those to come.

Sizes differ between microbatches and between steps, and are known only once a task has run. For each chunk three
figures are remembered, the largest ones of this step and of the `REMEMBERED_STEPS` before it: what one microbatch held
after a task, the task's output included; by how much its backward raised what its forward had left, in bytes and in
proportion. (After a split backward a microbatch keeps inputs and output gradients of its layers, which may be more than
its activations were.) And of the forwards, their signatures, by which a size is known before a forward runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Self

#: Steps after which a size no longer counts. Forgetting sooner would pass the limit whenever some small batches come
#: before a large one; remembering longer leaves room unused for longer after one.
REMEMBERED_STEPS = 8


@dataclass(slots=True)
class Largest:
    """The largest sizes of one chunk.

    Attributes:
        held: bytes that one microbatch held after a task, with the task's output.
        growth: bytes that a backward added to what the forward had left.
        growth_share: the same, over what the forward had left.
    """

    held: int = 0
    growth: int = 0
    growth_share: float = 0.0

    def cover(self, held: int = 0, growth: int = 0, growth_share: float = 0.0) -> None:
        """Be at least this large."""
        self.held = max(self.held, held)
        self.growth = max(self.growth, growth)
        self.growth_share = max(self.growth_share, growth_share)


class SeenSizes:
    """See the module's docstring. One for each mode, as forward only a microbatch holds much less."""

    def __init__(self, num_chunks: int) -> None:
        self._num_chunks = num_chunks
        #: By chunk, the largest of the current step so far and of those remembered.
        self.expected: list[Largest]
        self._steps: deque[list[Largest]] = deque(maxlen=REMEMBERED_STEPS + 1)
        #: Chunks with the signatures of their forwards, of the same steps.
        self._signatures: deque[set[tuple[int, Hashable]]] = deque(maxlen=REMEMBERED_STEPS + 1)
        self.open_step()

    def open_step(self) -> Self:
        """A step begins; the oldest one is forgotten. Returns itself."""
        self._steps.append([Largest() for _ in range(self._num_chunks)])
        self._signatures.append(set())
        self.expected = [Largest() for _ in range(self._num_chunks)]
        for step in self._steps:
            for largest, seen in zip(self.expected, step, strict=True):
                largest.cover(seen.held, seen.growth, seen.growth_share)
        return self

    def saw(self, chunk: int, num_bytes: int) -> None:
        """A microbatch held so much on ``chunk`` after a task."""
        for largest in (self._steps[-1][chunk], self.expected[chunk]):
            largest.cover(held=num_bytes)

    def saw_signature(self, chunk: int, signature: Hashable) -> None:
        """A forward on ``chunk`` with ``signature`` has shown its size."""
        self._signatures[-1].add((chunk, signature))

    def has_seen(self, chunk: int, signature: Hashable) -> bool:
        """Whether a forward on ``chunk`` with ``signature`` has shown its size."""
        return any((chunk, signature) in step for step in self._signatures)

    def saw_growth(self, chunk: int, before: int, after: int) -> None:
        """A backward on ``chunk`` made ``after`` bytes of ``before``."""
        if after > before:
            for largest in (self._steps[-1][chunk], self.expected[chunk]):
                largest.cover(growth=after - before, growth_share=(after - before) / max(before, 1))
