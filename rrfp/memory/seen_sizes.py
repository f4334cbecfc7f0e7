"""Observed sizes of microbatches, from which a limit on bytes predicts those of later ones.

Sizes differ between microbatches and between steps, and are known only once a task has run. What is remembered of each
chunk, over this step and the `REMEMBERED_STEPS` before it:

- the largest figures: what one microbatch held after a task, the task's output included; by how much its backward
  raised what its forward had left, in bytes and in proportion. (After a split backward a microbatch keeps inputs and
  output gradients of its layers, which may be more than its activations were.)
- for each signature of a forward the most that such a microbatch held;
- for each number that is known of a forward before it runs (`KnownSizes`) how bytes go with it: the least concave curve
  (`ConcaveEnvelope`) that no microbatch seen was above, and by how much its expectations were wrong.

So the microbatch's own bytes are expected: those of its signature where an earlier forward had it; else what the curve
of one of its numbers says. For each curve covers all that were seen, the number counts whose expectations were best;
where they were equally good, the one that expects more. Where nothing is known of the microbatch the largest is
expected.

Only forwards show how good an expectation is: what later tasks leave is less, often nothing, whatever the number was.

Rejected: to take the number with the least spread of bytes for one unit. Bytes of which a part is the same for all,
such as an output, spread widely where the number is small, although the number decides the rest.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile
from typing import Any, Self

from rrfp.memory.measured import Largest

Point = tuple[float, float]


class ConcaveEnvelope:
    """The smallest concave, non-decreasing upper envelope through zero of some points.

    Numbers of points are more than 0, and their bytes are not negative. Bytes in proportion to the number lie on the
    curve; so do bytes of which a part is the same for all, such as an output, from the smallest number seen on.

    Rejected: the steepest proportion of any point, capped by the highest point. One point with a number near zero, such
    as that of a microbatch that passes an encoder without an image and still sends an output, then puts all others at
    the cap.
    """

    __slots__ = ("corners", "largest")

    def __init__(self) -> None:
        #: Where the curve bends, by rising number and bytes; after the last one it is level.
        self.corners: list[Point] = [(0.0, 0.0)]
        self.largest = 0.0

    def __bool__(self) -> bool:
        return len(self.corners) > 1

    def add(self, number: float, num_bytes: float) -> None:
        """No longer lie below a point. Takes little more than a search among the corners."""
        self.largest = max(self.largest, number)
        if num_bytes <= self._at(number):
            return
        corners, point = self.corners, (number, num_bytes)
        begin = end = bisect_left(corners, (number,))
        while end < len(corners) and _slope(point, corners[end]) <= self._slope_after(end):
            end += 1
        while begin > 1 and _slope(corners[begin - 2], corners[begin - 1]) <= _slope(corners[begin - 1], point):
            begin -= 1
        corners[begin:end] = [point]

    def cover(self, other: ConcaveEnvelope) -> None:
        """Nowhere lie below ``other``, up to its largest number."""
        for number, num_bytes in other.corners[1:]:
            self.add(number, num_bytes)
        self.largest = max(self.largest, other.largest)

    def at(self, number: float) -> float:
        """The curve, and beyond the largest number of any point its height there in proportion."""
        return self._at(number) * max(1.0, number / self.largest) if self.largest else 0.0

    def _at(self, number: float) -> float:
        corners = self.corners
        after = bisect_left(corners, (number,))
        if after == len(corners):
            return corners[-1][1]
        (left, low), (right, high) = corners[max(0, after - 1)], corners[after]
        return min(high, low + (number - left) * _slope((left, low), (right, high)))

    def _slope_after(self, corner: int) -> float:
        """Of the curve behind one of its corners."""
        corners = self.corners
        return _slope(corners[corner], corners[corner + 1]) if corner + 1 < len(corners) else 0.0


def _slope(left: Point, right: Point) -> float:
    """Of the line between two points, of which the second is lower where they have one number."""
    run = right[0] - left[0]
    return (right[1] - left[1]) / run if run else -math.inf


#: Steps after which a size no longer counts. Forgetting sooner would pass the limit whenever some small batches come
#: before a large one; remembering longer leaves room unused for longer after one.
REMEMBERED_STEPS = 8
#: Expectations end here; sizes of any magnitude may make them infinite.
_NO_MACHINE_HAS = 2.0**63


@dataclass(frozen=True, slots=True)
class KnownSizes:
    """What is known of a microbatch on a chunk before its forward runs."""

    #: Of the microbatch, as the caller gives it, in any unit; None: not given.
    size: float | None = None
    #: Of the forward's inputs; None: not known.
    input_bytes: int | None = None
    #: See `rrfp.core.events.Previewed`.
    signature: Hashable = None

    @property
    def numbers(self) -> tuple[float | None, ...]:
        """The numbers with which the bytes may grow."""
        return self.size, self.input_bytes


class _Scale:
    """How the bytes of a chunk go with one of the numbers of `KnownSizes`."""

    def __init__(self) -> None:
        self.curve = ConcaveEnvelope()
        self._errors, self._count = 0.0, 0

    def cover(self, other: _Scale) -> None:
        """Remember what ``other`` does too."""
        self.curve.cover(other.curve)
        self._errors += other._errors
        self._count += other._count

    def to_plain(self) -> list[Any]:
        return [[*self.curve.corners], self.curve.largest, self._errors, self._count]

    def restore(self, corners: Sequence[Sequence[float]], largest: float, errors: float, count: int) -> None:
        """Be as `to_plain` said."""
        self.curve.corners[:] = [(number, num_bytes) for number, num_bytes in corners]
        self.curve.largest = largest
        self._errors, self._count = errors, count

    def judge(self, error: float) -> None:
        self._errors += error
        self._count += 1

    @property
    def error(self) -> float:
        """By how much expectations were wrong, mean; what is not a percent apart is equal."""
        return round(self._errors / self._count, 2) if self._count else 0.0


class _Step:
    def __init__(self, num_chunks: int) -> None:
        self.largest = [Largest() for _ in range(num_chunks)]
        self.scales = [[_Scale() for _ in KnownSizes().numbers] for _ in range(num_chunks)]
        #: By chunk, by how much what a backward sends is larger than what its microbatch held.
        self.left_over = [0] * num_chunks
        #: By chunk and signature of a forward; see `SeenSizes.saw_signature`.
        self.of_signature: dict[tuple[int, Hashable], int] = {}

    def to_plain(self) -> dict[str, Any]:
        return {
            "largest": [[each.held, each.growth, each.growth_share] for each in self.largest],
            "scales": [[scale.to_plain() for scale in scales] for scales in self.scales],
            "left_over": [*self.left_over],
            "of_signature": [[*key, num_bytes] for key, num_bytes in self.of_signature.items()],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        step = cls(len(plain["largest"]))
        step.largest = [Largest(*each) for each in plain["largest"]]
        for scales, plain_scales in zip(step.scales, plain["scales"], strict=True):
            for scale, plain_scale in zip(scales, plain_scales, strict=True):
                scale.restore(*plain_scale)
        step.left_over = [*plain["left_over"]]
        step.of_signature = {(chunk, signature): num_bytes for chunk, signature, num_bytes in plain["of_signature"]}
        return step

    def cover(self, other: _Step) -> None:
        """Be at least as large, signatures aside."""
        self.left_over = list(map(max, self.left_over, other.left_over))
        for own, seen in zip(self.largest, other.largest, strict=True):
            own.cover(seen.held, seen.growth, seen.growth_share)
        for own_scales, scales in zip(self.scales, other.scales, strict=True):
            for scale, seen_scale in zip(own_scales, scales, strict=True):
                scale.cover(seen_scale)


class SeenSizes:
    """The sizes seen in one mode; a forward-only microbatch holds much less."""

    def __init__(self, num_chunks: int) -> None:
        self._num_chunks = num_chunks
        self._steps: deque[_Step] = deque(maxlen=REMEMBERED_STEPS + 1)
        #: The largest of the current step so far and of those remembered.
        self._all: _Step
        self.open_step()

    @property
    def expected(self) -> list[Largest]:
        return self._all.largest

    def left_over(self, chunk: int) -> int:
        """The most by which what a backward on ``chunk`` sent was larger than what its microbatch held."""
        return self._all.left_over[chunk]

    def open_step(self) -> Self:
        """A step begins; the oldest one is forgotten. Returns itself."""
        self._steps.append(_Step(self._num_chunks))
        self._all = _Step(self._num_chunks)
        for step in self._steps:
            self._all.cover(step)
        return self

    def expect(self, chunk: int, preview: KnownSizes) -> int:
        """What a microbatch is expected to hold on ``chunk``; see the module's docstring."""
        if preview.signature is not None:
            shown = max(self._held_by(chunk, preview.signature))
            if shown:
                return shown
        scales = zip(preview.numbers, self._all.scales[chunk], strict=True)
        # Of nothing nothing is expected to grow; and a number that was never seen says nothing.
        known = [(scale.error, -scale.curve.at(number)) for number, scale in scales if number and scale.curve]
        return math.ceil(min(-min(known)[1], _NO_MACHINE_HAS)) if known else self._all.largest[chunk].held

    def judge(self, chunk: int, num_bytes: int, preview: KnownSizes) -> None:
        """Compare what a forward on ``chunk`` has left with what was expected of it. Called before `saw`."""
        for number, of_step, of_all in zip(
            preview.numbers, self._steps[-1].scales[chunk], self._all.scales[chunk], strict=True
        ):
            if number and of_all.curve:
                error = _error(of_all.curve.at(number), num_bytes)
                of_step.judge(error)
                of_all.judge(error)

    def saw(self, chunk: int, num_bytes: int, preview: KnownSizes = KnownSizes()) -> None:
        """A microbatch held so much on ``chunk`` after a task; ``preview``: what was known of it before."""
        for step in (self._steps[-1], self._all):
            step.largest[chunk].cover(held=num_bytes)
            for number, scale in zip(preview.numbers, step.scales[chunk], strict=True):
                if number:
                    scale.curve.add(number, num_bytes)
        key = (chunk, preview.signature)
        of_signature = self._steps[-1].of_signature
        if key in of_signature:
            of_signature[key] = max(of_signature[key], num_bytes)

    def saw_signature(self, chunk: int, signature: Hashable, num_bytes: int) -> None:
        of_signature = self._steps[-1].of_signature
        of_signature[chunk, signature] = max(of_signature.get((chunk, signature), 0), num_bytes)

    def has_seen(self, chunk: int, signature: Hashable) -> bool:
        return any((chunk, signature) in step.of_signature for step in self._steps)

    def _held_by(self, chunk: int, signature: Hashable) -> Iterator[int]:
        return (step.of_signature.get((chunk, signature), 0) for step in self._steps)

    def saw_growth(self, chunk: int, before: int, after: int, output: int = 0) -> None:
        """A backward on ``chunk`` made ``after`` bytes of ``before``, the ``output`` that it sends among them."""
        if after > before:
            for step in (self._steps[-1], self._all):
                step.largest[chunk].cover(growth=after - before, growth_share=(after - before) / max(before, 1))
                step.left_over[chunk] = max(step.left_over[chunk], output - before)

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

    def to_plain(self) -> list[dict[str, Any]]:
        return [step.to_plain() for step in self._steps]

    def restore_plain(self, steps: Sequence[Mapping[str, Any]]) -> None:
        """Remember what `to_plain` made, instead of what was seen here."""
        self._steps.clear()
        self._steps.extend(_Step.from_plain(step) for step in steps)


def _error(expected: float, actual: float) -> float:
    """By how much an expectation is wrong, 0 to 1: one that is wrong beyond measure must not outweigh all others."""
    return abs(expected - actual) / max(expected, actual, 1.0)
