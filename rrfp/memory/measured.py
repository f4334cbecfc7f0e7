"""Measured sizes and durations of the tasks of a virtual stage; a checkpoint keeps them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rrfp.model.tasks import Kind


@dataclass(slots=True)
class Largest:
    """The largest sizes of one chunk."""

    #: Bytes that one microbatch held after a task, with the task's output.
    held: int = 0
    #: Bytes that a backward added to what the forward had left.
    growth: int = 0
    #: The same, over what the forward had left.
    growth_share: float = 0.0

    def cover(self, held: int = 0, growth: int = 0, growth_share: float = 0.0) -> None:
        self.held = max(self.held, held)
        self.growth = max(self.growth, growth)
        self.growth_share = max(self.growth_share, growth_share)


@dataclass(frozen=True, slots=True)
class Spent:
    """The measured durations of one kind of task."""

    #: F, B or W.
    kind: str
    count: int
    #: Their sum.
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements on one virtual stage."""

    #: 0..V-1.
    virtual_stage: int
    durations: tuple[Spent, ...] = ()
    #: Of the newest training steps, oldest first; empty without a limit on bytes.
    training_sizes: tuple[Largest, ...] = ()
    #: The same of evaluations.
    evaluation_sizes: tuple[Largest, ...] = ()


class MeanDurations:
    """Running means of task durations in seconds, by kind and local chunk; they outlive steps."""

    def __init__(self) -> None:
        #: How many, and their sum.
        self._sums: dict[tuple[Kind, int], tuple[int, float]] = {}

    def add(self, kind: Kind, chunk: int, seconds: float) -> None:
        key = (kind, chunk)
        count, total = self._sums.get(key, _NOTHING)
        self._sums[key] = (count + 1, total + seconds)

    def mean(self, kind: Kind, chunk: int) -> float | None:
        """The mean, or None before the first measurement."""
        count, total = self._sums.get((kind, chunk), _NOTHING)
        return total / count if count else None

    def of(self, chunk: int) -> tuple[Spent, ...]:
        return tuple(Spent(kind.value, *sums) for (kind, on), sums in sorted(self._sums.items()) if on == chunk)

    def restore(self, chunk: int, spent: Iterable[Spent]) -> None:
        self._sums = {key: sums for key, sums in self._sums.items() if key[1] != chunk}
        self._sums |= {(Kind(each.kind), chunk): (each.count, each.seconds) for each in spent}


_NOTHING = (0, 0.0)
