"""What the runs of the hints benchmark add up to: means over cells, gains at equal memory, winners."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from benchmarks.hints.runs import LIMITS, STRICT, Row

BASE = "bfw"
#: A cell is one of these, averaged over the seeds.
CellKey = tuple[str, int, str]


@dataclass(frozen=True, slots=True)
class Figure:
    """A mean over some cells, and the standard deviation over the seeds of each seed's mean (0 with one seed)."""

    mean: float
    spread: float

    @classmethod
    def of(cls, rows: Iterable[Row], value: Callable[[Row], float]) -> Figure | None:
        """None where there is no row."""
        by_seed: dict[int, list[float]] = {}
        for row in rows:
            by_seed.setdefault(row.case.seed, []).append(value(row))
        means = [fmean(values) for values in by_seed.values()]
        if not means:
            return None
        return cls(fmean(means), stdev(means) if len(means) > 1 else 0.0)


class Figures:
    """Looks rows up.

    Args:
        rows: every run.
        hints: in the order in which they are shown.
    """

    def __init__(self, rows: Sequence[Row], hints: Sequence[str]) -> None:
        self.rows = rows
        self.hints = tuple(hints)
        self.profiles = tuple(dict.fromkeys(sorted(row.case.profile for row in rows)))
        self.strict = {name: limit for name, limit in STRICT.items() if any(row.method == name for row in rows)}
        self.stages = tuple(sorted({row.case.stages for row in rows}))
        self.jitters = tuple(sorted({row.case.jitter for row in rows}))
        self._by_run = {(row.case, row.method, row.limit): row for row in rows}

    def runs(self) -> Iterator[tuple[str, str]]:
        """Every (method, limit) that was run, schedules first."""
        yield from self.strict.items()
        for hint in self.hints:
            yield from ((hint, limit) for limit in LIMITS)

    def select(
        self, profile: str, method: str, limit: str, *, stages: int | None = None, jitter: str | None = None
    ) -> list[Row]:
        """Runs of one method within one limit."""
        return [
            row
            for row in self.rows
            if (row.case.profile, row.method, row.limit) == (profile, method, limit)
            and stages in (None, row.case.stages)
            and jitter in (None, row.case.jitter)
        ]

    def gain(self, row: Row) -> float:
        """Percent less makespan than `BASE` needs on the same table within the same limit."""
        return 100 * (1 - row.makespan / self._by_run[row.case, BASE, row.limit].makespan)

    def speed(self, row: Row) -> float:
        """Percent less makespan than `BASE` needs on the same table within 1F1B's memory."""
        return 100 * (1 - row.makespan / self._by_run[row.case, BASE, "1f1b"].makespan)

    def worst(self, profile: str, method: str, limit: str) -> tuple[float, CellKey]:
        """The smallest gain of a cell, averaged over the seeds, and which cell that is."""
        return min(
            (fmean(map(self.gain, self.select(profile, method, limit, stages=n, jitter=j))), (profile, n, j))
            for n in self.stages
            for j in self.jitters
        )

    def winner(self, profile: str, stages: int, limit: str, jitter: str) -> tuple[str, float, float]:
        """The hint with the least mean makespan, its gain over `BASE`, and its percent above the bound.

        Of equal ones the first in the order of the hints.
        """
        found = [(hint, self.select(profile, hint, limit, stages=stages, jitter=jitter)) for hint in self.hints]
        hint, rows = max(found, key=lambda item: round(fmean(map(self.gain, item[1])), 9))
        return hint, fmean(map(self.gain, rows)), fmean(row.above for row in rows)
