"""How long tasks have taken, for hints that want to know."""

from __future__ import annotations

from collections.abc import Iterable

from rrfp.core.measured import Spent
from rrfp.core.tasks import Kind


class MeanDurations:
    """Running means of task durations in seconds, by kind and local chunk; they outlive steps."""

    def __init__(self) -> None:
        #: How many, and their sum.
        self._sums: dict[tuple[Kind, int], tuple[int, float]] = {}

    def add(self, kind: Kind, chunk: int, seconds: float) -> None:
        """One more measurement."""
        key = (kind, chunk)
        count, total = self._sums.get(key, _NOTHING)
        self._sums[key] = (count + 1, total + seconds)

    def mean(self, kind: Kind, chunk: int) -> float | None:
        """The mean, or None before the first measurement."""
        count, total = self._sums.get((kind, chunk), _NOTHING)
        return total / count if count else None

    def of(self, chunk: int) -> tuple[Spent, ...]:
        """All measurements of ``chunk``."""
        return tuple(Spent(kind.value, *sums) for (kind, on), sums in sorted(self._sums.items()) if on == chunk)

    def restore(self, chunk: int, spent: Iterable[Spent]) -> None:
        """Replace the measurements of ``chunk``."""
        self._sums = {key: sums for key, sums in self._sums.items() if key[1] != chunk}
        self._sums |= {(Kind(each.kind), chunk): (each.count, each.seconds) for each in spent}


_NOTHING = (0, 0.0)
