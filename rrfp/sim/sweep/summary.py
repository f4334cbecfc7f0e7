"""What the rows of a sweep say together: mean and spread over seeds, and the speed-up over a fixed order.

It knows rows, not how they were made.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rrfp.sim.sweep.rows import Row

#: The columns that a workload has beside its seed, and those of a method.
WORKLOAD_COLUMNS = (
    *("costs", "profile", "stages", "microbatches", "chunks", "placement", "split", "tp", "jitter", "latency"),
)
METHOD_COLUMNS = ("method", "kind", "limit", "admission", "sends", "coordination")
#: The columns that have a spread, and those that only groups of ranks have.
NUMBERS = ("makespan", "ratio", "peak_max", "received_peak_max", "busy_share")
GROUP_NUMBERS = ("coordination_share", "failed_rounds_per_task", "messages_per_task")


@dataclass(frozen=True, slots=True)
class Spread:
    """Several measurements of one thing.

    Attributes:
        mean, min, max: of all.
        std: sample standard deviation (of n - 1); None for one measurement, which says nothing of it.
    """

    mean: float
    min: float
    max: float
    std: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of at least one value."""
        sample = list(values)
        std = statistics.stdev(sample) if len(sample) > 1 else None
        return cls(statistics.fmean(sample), min(sample), max(sample), std)


@dataclass(frozen=True, slots=True)
class Group:
    """One method on one workload, over all its seeds.

    Attributes:
        rows: a row a seed, at least one.
        baseline: the rows of the first strict method on the same workload; empty where there is none.
    """

    rows: tuple[Row, ...]
    baseline: tuple[Row, ...]

    @property
    def workload(self) -> Mapping[str, Any]:
        """The values of `WORKLOAD_COLUMNS`."""
        return _values(self.rows[0], WORKLOAD_COLUMNS)

    @property
    def method(self) -> Mapping[str, Any]:
        """The values of `METHOD_COLUMNS`."""
        return _values(self.rows[0], METHOD_COLUMNS)

    @property
    def label(self) -> str:
        """The method in a few words."""
        return label(self.rows[0])

    @property
    def has_groups(self) -> bool:
        """Whether its stages are groups of ranks."""
        return self.rows[0].tp is not None

    def spread(self, column: str) -> Spread:
        """Of one of the columns that hold numbers."""
        return Spread.of(getattr(row, column) for row in self.rows)

    @property
    def speed_up(self) -> Spread | None:
        """The baseline's makespan over this one's, seed by seed: above 1, this method is faster."""
        makespans = {row.seed: row.makespan for row in self.baseline}
        pairs = [(makespans[row.seed], row.makespan) for row in self.rows if row.seed in makespans]
        return Spread.of(before / after if after else 1.0 for before, after in pairs) if pairs else None

    def to_json(self) -> dict[str, Any]:
        """As ``rrfp sweep --json`` prints it."""
        numbers = (*NUMBERS, *(GROUP_NUMBERS if self.has_groups else ()))
        speed_up = self.speed_up
        over = None if speed_up is None else {"over": label(self.baseline[0]), **asdict(speed_up)}
        return {
            **self.workload,
            **self.method,
            "seeds": [row.seed for row in self.rows],
            **{column: asdict(self.spread(column)) for column in numbers},
            "speed_up": over,
        }


def summarise(rows: Sequence[Row]) -> list[Group]:
    """The groups of rows that differ in the seed only, in the order in which they first appear."""
    by_workload: dict[tuple[Any, ...], dict[tuple[Any, ...], list[Row]]] = {}
    for row in rows:
        methods = by_workload.setdefault(tuple(_values(row, WORKLOAD_COLUMNS).values()), {})
        methods.setdefault(tuple(_values(row, METHOD_COLUMNS).values()), []).append(row)
    groups = []
    for methods in by_workload.values():
        strict = (runs for runs in methods.values() if runs[0].kind == "strict")
        baseline = tuple(next(strict, ()))
        groups += [Group(tuple(runs), baseline) for runs in methods.values()]
    return groups


def label(row: Row) -> str:
    """A method in a few words: what it is, and the memory that it may hold."""
    if row.kind == "strict":
        return f"{row.method} (strict)" + (", blocking sends" if row.sends == "blocking" else "")
    rule = ", paper's rule" if row.admission == "paper" else ""
    return f"{row.method}, limit {row.limit}" + rule + (f", {row.coordination}" if row.coordination else "")


def varied(rows: Sequence[Row], columns: Iterable[str]) -> list[str]:
    """Those of the columns that do not have the same value in all rows."""
    return [column for column in columns if len({getattr(row, column) for row in rows}) > 1]


def changing(rows: Sequence[Row]) -> list[str]:
    """The columns in which workloads differ. Not chunks beside a graph, whose stages need not have equally many."""
    return [column for column in varied(rows, WORKLOAD_COLUMNS) if column != "chunks" or not _have_graph(rows)]


def shown(column: str, value: Any) -> str:
    """A workload's value in a table."""
    if column == "placement" and value == "table":
        return "a graph"
    return "-" if value is None else str(value)


def named(column: str, value: Any) -> str:
    """A workload's value with its name, "stages 8"; words that speak for themselves stand alone."""
    if column == "split":
        return "split backward" if value else "whole backward"
    return shown(column, value) if column in ("costs", "profile", "placement", "jitter") else f"{column} {value}"


def in_common(rows: Sequence[Row]) -> str:
    """What the workloads of all rows share, in one line."""
    first = rows[0]
    alike = set(WORKLOAD_COLUMNS).difference(varied(rows, WORKLOAD_COLUMNS))
    if _have_graph(rows):
        alike -= {"chunks"}
    elif {row.chunks for row in rows} == {1}:
        alike -= {"chunks", "placement"}
    values = {column: getattr(first, column) for column in WORKLOAD_COLUMNS if column in alike}
    fixed = ", ".join(named(column, value) for column, value in values.items() if value is not None)
    seeds = {row.seed for row in rows}
    if len(seeds) > 1:
        return f"{fixed}; {len(seeds)} seeds: mean, least and most"
    return fixed if first.seed is None else f"{fixed}, seed {first.seed}"


def _have_graph(rows: Sequence[Row]) -> bool:
    return any(row.placement == "table" for row in rows)


def _values(row: Row, columns: Iterable[str]) -> dict[str, Any]:
    return {column: getattr(row, column) for column in columns}
