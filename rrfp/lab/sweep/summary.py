"""What the rows of a sweep say together: mean and spread over seeds, and the speed-up over a fixed order.

It knows rows, not how they were made.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rrfp.lab.limit_texts import SAME_BYTES
from rrfp.lab.sweep.runs import SweepRow
from rrfp.memory.admission import DEFAULT_RULE, Limit

#: The columns that a workload has beside its seed, and those of a method.
WORKLOAD_COLUMNS = (
    *("costs", "profile", "stages", "microbatches", "chunks", "placement", "split", "tp", "jitter", "latency"),
)
METHOD_COLUMNS = ("method", "kind", "limit", "admission", "sends", "coordination", "sizes", "order")
#: The columns that have a spread, and those that only groups of ranks have.
NUMBERS = ("makespan", "ratio", "peak_max", "received_peak_max", "busy_share")
GROUP_NUMBERS = ("coordination_share", "failed_rounds_per_task", "messages_per_task")

#: A makespan that is shorter by no more than this, relatively, is the same.
SAME_STEP = 0.002
#: A stage that waits for memory for a smaller part of the makespan does not make it longer by much.
HARDLY_WAITS = 0.005


@dataclass(frozen=True, slots=True)
class Spread:
    """Several measurements of one thing."""

    #: mean, min, max: of all.
    mean: float
    min: float
    max: float
    #: Sample standard deviation (of n - 1); None for one measurement, which says nothing of it.
    std: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        sample = list(values)
        std = statistics.stdev(sample) if len(sample) > 1 else None
        return cls(statistics.fmean(sample), min(sample), max(sample), std)


@dataclass(frozen=True, slots=True)
class MethodSummary:
    """One method on one workload, over all its seeds."""

    #: a row a seed, at least one.
    rows: tuple[SweepRow, ...]
    #: The rows of the first strict method on the same workload; empty where there is none.
    baseline: tuple[SweepRow, ...]

    @property
    def workload(self) -> Mapping[str, Any]:
        return _values(self.rows[0], WORKLOAD_COLUMNS)

    @property
    def method(self) -> Mapping[str, Any]:
        return _values(self.rows[0], METHOD_COLUMNS)

    @property
    def label(self) -> str:
        return label(self.rows[0])

    @property
    def has_groups(self) -> bool:
        return self.rows[0].tp is not None

    def spread(self, column: str) -> Spread:
        return Spread.of(getattr(row, column) for row in self.rows)

    @property
    def speed_up(self) -> Spread | None:
        """The baseline's makespan over this one's, seed by seed."""
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


def summarise(rows: Sequence[SweepRow]) -> list[MethodSummary]:
    """The groups of rows that differ in the seed only, in order."""
    by_workload: dict[tuple[Any, ...], dict[tuple[Any, ...], list[SweepRow]]] = {}
    for row in rows:
        methods = by_workload.setdefault(tuple(_values(row, WORKLOAD_COLUMNS).values()), {})
        methods.setdefault(tuple(_values(row, METHOD_COLUMNS).values()), []).append(row)
    groups = []
    for methods in by_workload.values():
        strict = (runs for runs in methods.values() if runs[0].kind == "strict")
        baseline = tuple(next(strict, ()))
        groups += [MethodSummary(tuple(runs), baseline) for runs in methods.values()]
    return groups


def useless_limits(groups: Sequence[MethodSummary]) -> list[tuple[MethodSummary, MethodSummary]]:
    """Pairs of neighbouring limits of which the larger is no faster."""
    by_hint: dict[tuple[Any, ...], list[MethodSummary]] = {}
    columns = (*WORKLOAD_COLUMNS, *(column for column in METHOD_COLUMNS if column != "limit"))
    for group in groups:
        if group.rows[0].kind == "hint" and not _limits_of(group)[0].auto:
            kind = _limits_of(group)[0].bytes is None, str(group.rows[0].limit).startswith(SAME_BYTES)
            by_hint.setdefault((*_values(group.rows[0], columns).values(), *kind), []).append(group)
    pairs = (pair for same in by_hint.values() for pair in itertools.pairwise(sorted(same, key=_amount)))
    return [
        (smaller, larger)
        for smaller, larger in pairs
        if _amount(smaller) < _amount(larger)
        and larger.spread("makespan").mean >= (1 - SAME_STEP) * smaller.spread("makespan").mean
    ]


def why_useless(smaller: MethodSummary, larger: MethodSummary) -> str:
    before, after = (group.spread("memory_wait_share").mean for group in (smaller, larger))
    stage = max(smaller.rows, key=lambda row: row.memory_wait_share).memory_wait_stage
    few, many = smaller.rows[0].limit, larger.rows[0].limit
    ratio = larger.spread("ratio").mean
    if ratio <= 1 + SAME_STEP:
        return f"with {few} the step is already at the lower bound of {many}: no order is faster"
    rest = f"; the step is {ratio:.3f} x its lower bound"
    if stage is None or before < HARDLY_WAITS:
        less = "" if stage is None else f" for more than {before:.1%} of the step"
        return f"with {few} no stage idles for memory{less}{rest}"
    own = [_limits_of(group)[stage].microbatches for group in (smaller, larger)]
    if own[0] is not None and own[0] == own[1] and smaller.rows[0].placement != "table":
        entry = ", and every microbatch passes it" if stage == 0 and smaller.rows[0].chunks == 1 else ""
        return f"stage {stage} holds at most {own[0]} under both{entry}; it idles {before:.1%} of the step for memory"
    if after < before:
        return (
            f"stage {stage} idles {before:.1%} of the step for memory with {few}, and with {many} at most {after:.1%}: "
            f"it waits for inputs, or has nothing left, instead{rest}"
        )
    return f"a stage idles {after:.1%} of the step for memory with {many} too{rest}"


def _limits_of(group: MethodSummary) -> list[Limit]:
    row = group.rows[0]
    text = str(row.limit).removeprefix(SAME_BYTES)
    return [Limit.resolve(text, stage, row.stages) for stage in range(row.stages)]


def _amount(group: MethodSummary) -> int:
    """What all stages may hold, to order limits of one kind."""
    return sum(limit.bytes or limit.microbatches or 0 for limit in _limits_of(group))


def label(row: SweepRow) -> str:
    if row.kind == "strict":
        return f"strict {row.method}" + (", blocking sends" if row.sends == "blocking" else "")
    rule = "" if row.admission in (None, DEFAULT_RULE) else f", {row.admission} rule"
    order = ", natural order" if row.order == "natural" else ""
    sizes = f", {'no' if row.sizes == 'none' else row.sizes} sizes" if row.sizes in ("none", "planned") else ""
    group = f", {row.coordination}" if row.coordination else ""
    return f"{row.method}, limit {row.limit}{rule}{order}{group}{sizes}"


def varied(rows: Sequence[SweepRow], columns: Iterable[str]) -> list[str]:
    return [column for column in columns if len({getattr(row, column) for row in rows}) > 1]


def changing(rows: Sequence[SweepRow]) -> list[str]:
    # Not chunks beside a graph, whose stages need not have equally many.
    return [column for column in varied(rows, WORKLOAD_COLUMNS) if column != "chunks" or not _have_graph(rows)]


def shown(column: str, value: Any) -> str:
    if column == "placement" and value == "table":
        return "a graph"
    return "-" if value is None else str(value)


def named(column: str, value: Any) -> str:
    """A value with its name, "stages 8", unless it speaks for itself."""
    if column == "split":
        return "split backward" if value else "whole backward"
    return shown(column, value) if column in ("costs", "profile", "placement", "jitter") else f"{column} {value}"


def in_common(rows: Sequence[SweepRow]) -> str:
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


def _have_graph(rows: Sequence[SweepRow]) -> bool:
    return any(row.placement == "table" for row in rows)


def _values(row: SweepRow, columns: Iterable[str]) -> dict[str, Any]:
    return {column: getattr(row, column) for column in columns}
