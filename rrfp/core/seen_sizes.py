"""What microbatches of a stage were seen to hold: what a limit on bytes expects of those to come.

Sizes differ between microbatches and between steps, and are known only once a task has run. What is remembered of each
chunk, over this step and the `REMEMBERED_STEPS` before it:

- the largest figures: what one microbatch held after a task, the task's output included; by how much its backward
  raised what its forward had left, in bytes and in proportion. (After a split backward a microbatch keeps inputs and
  output gradients of its layers, which may be more than its activations were.)
- for each signature of a forward the most that such a microbatch held;
- for each number that is known of a forward before it runs (`Preview`) the largest number, and the most bytes for one
  unit of it.

So the microbatch's own bytes are expected: those of its signature where an earlier forward had it; else, in proportion
to its numbers, the most that no microbatch seen was above, but not more than the largest one held unless a number is
larger than all that were seen. Of several numbers the one that expects least counts, for each by itself covers all that
were seen. Where nothing is known of the microbatch the largest is expected.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile
from typing import Self

from rrfp.core.measured import Largest

#: Steps after which a size no longer counts. Forgetting sooner would pass the limit whenever some small batches come
#: before a large one; remembering longer leaves room unused for longer after one.
REMEMBERED_STEPS = 8


@dataclass(frozen=True, slots=True)
class Preview:
    """What is known of a microbatch on a chunk before its forward runs.

    Attributes:
        size: of the microbatch, as the caller gives it, in any unit; None: not given.
        input_bytes: of the forward's inputs; None: not known.
        signature: see `rrfp.core.events.Previewed`.
    """

    size: float | None = None
    input_bytes: int | None = None
    signature: Hashable = None

    @property
    def numbers(self) -> tuple[float | None, ...]:
        """The numbers with which the bytes may grow."""
        return self.size, self.input_bytes


@dataclass(slots=True)
class _Scale:
    """How the bytes of a chunk go with one of the numbers of `Preview`."""

    #: The largest number seen; the most and the least bytes for one unit.
    largest: float = 0.0
    most: float = 0.0
    least: float = math.inf

    def cover(self, largest: float, most: float, least: float) -> None:
        self.largest = max(self.largest, largest)
        self.most = max(self.most, most)
        self.least = min(self.least, least)

    @property
    def spread(self) -> float:
        """1 where the bytes are in proportion to the number, and more the less it decides them."""
        return self.most / self.least if self.least else math.inf

    def expect(self, number: float, held: int) -> float:
        """No less than any microbatch seen would have held at ``number``; ``held`` is the most of any."""
        return min(self.most * number, held * max(1.0, number / self.largest))


class _Step:
    """What one step has shown, by chunk."""

    def __init__(self, num_chunks: int) -> None:
        self.largest = [Largest() for _ in range(num_chunks)]
        self.scales = [[_Scale() for _ in Preview().numbers] for _ in range(num_chunks)]
        #: By chunk and signature of a forward; see `SeenSizes.saw_signature`.
        self.of_signature: dict[tuple[int, Hashable], int] = {}

    def cover(self, other: _Step) -> None:
        """Be at least as large, signatures aside."""
        for own, seen in zip(self.largest, other.largest, strict=True):
            own.cover(seen.held, seen.growth, seen.growth_share)
        for own_scales, scales in zip(self.scales, other.scales, strict=True):
            for scale, seen_scale in zip(own_scales, scales, strict=True):
                scale.cover(seen_scale.largest, seen_scale.most, seen_scale.least)


class SeenSizes:
    """See the module's docstring. One for each mode, as forward only a microbatch holds much less."""

    def __init__(self, num_chunks: int) -> None:
        self._num_chunks = num_chunks
        self._steps: deque[_Step] = deque(maxlen=REMEMBERED_STEPS + 1)
        #: The largest of the current step so far and of those remembered.
        self._all: _Step
        self.open_step()

    @property
    def expected(self) -> list[Largest]:
        """By chunk, the largest figures."""
        return self._all.largest

    def open_step(self) -> Self:
        """A step begins; the oldest one is forgotten. Returns itself."""
        self._steps.append(_Step(self._num_chunks))
        self._all = _Step(self._num_chunks)
        for step in self._steps:
            self._all.cover(step)
        return self

    def expect(self, chunk: int, preview: Preview) -> int:
        """What a microbatch is expected to hold on ``chunk``; see the module's docstring."""
        if preview.signature is not None:
            shown = max(self._held_by(chunk, preview.signature))
            if shown:
                return shown
        largest = self._all.largest[chunk].held
        scales = zip(preview.numbers, self._all.scales[chunk], strict=True)
        # Of nothing nothing is expected to grow; and a number that was never seen says nothing.
        known = [(scale.spread, -scale.expect(number, largest)) for number, scale in scales if number and scale.most]
        return math.ceil(-min(known)[1]) if known else largest

    def saw(self, chunk: int, num_bytes: int, preview: Preview = Preview()) -> None:
        """A microbatch held so much on ``chunk`` after a task; ``preview``: what was known of it before."""
        for step in (self._steps[-1], self._all):
            step.largest[chunk].cover(held=num_bytes)
            for number, scale in zip(preview.numbers, step.scales[chunk], strict=True):
                if number:
                    scale.cover(number, num_bytes / number, num_bytes / number)
        key = (chunk, preview.signature)
        of_signature = self._steps[-1].of_signature
        if key in of_signature:
            of_signature[key] = max(of_signature[key], num_bytes)

    def saw_signature(self, chunk: int, signature: Hashable, num_bytes: int) -> None:
        """A forward on ``chunk`` with ``signature`` has shown its size."""
        of_signature = self._steps[-1].of_signature
        of_signature[chunk, signature] = max(of_signature.get((chunk, signature), 0), num_bytes)

    def has_seen(self, chunk: int, signature: Hashable) -> bool:
        """Whether a forward on ``chunk`` with ``signature`` has shown its size."""
        return any((chunk, signature) in step.of_signature for step in self._steps)

    def _held_by(self, chunk: int, signature: Hashable) -> Iterator[int]:
        return (step.of_signature.get((chunk, signature), 0) for step in self._steps)

    def saw_growth(self, chunk: int, before: int, after: int) -> None:
        """A backward on ``chunk`` made ``after`` bytes of ``before``."""
        if after > before:
            for step in (self._steps[-1], self._all):
                step.largest[chunk].cover(growth=after - before, growth_share=(after - before) / max(before, 1))

    def of(self, chunk: int) -> tuple[Largest, ...]:
        """The largest sizes on ``chunk`` of each step that is remembered, oldest first, from the first with any."""
        sizes = [replace(step.largest[chunk]) for step in self._steps]
        return tuple(dropwhile(Largest().__eq__, sizes))

    def restore(self, sizes: Sequence[Sequence[Largest]]) -> None:
        """Remember the ``sizes`` of each chunk, as `of` returns them, instead of those seen here.

        Signatures and numbers are not among them: forwards show them anew.
        """
        length = max(1, *map(len, sizes))
        padded = [[Largest()] * (length - len(own)) + list(own) for own in sizes]
        self._steps.clear()
        for number in range(length):
            step = _Step(self._num_chunks)
            step.largest = [replace(own[number]) for own in padded]
            self._steps.append(step)
