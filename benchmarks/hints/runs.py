"""Runs every hint on every cost table, in several processes; knows nothing of how the results are shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass
from functools import partial
from statistics import fmean

import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from rrfp.costs import CostTable, make_costs, microbatch_sizes
from rrfp.engine.bound import lower_bound
from rrfp.engine.engine import run
from rrfp.engine.record import EngineResult
from rrfp.hints.registry import create_hint, create_strict
from rrfp.lab.sweep.pool import run_all
from rrfp.memory.admission import Limit

#: bf and bfw are one rule: a weight task, where there is one, is what runs when nothing else is ready.
HINTS = ("bfw", "fb", "b-priority", "f-priority", "slot-aware", "bfw-pyramid", "slot-aware-pyramid")
ALIASES = {"bfw": "bf, bfw"}
#: Schedules, consumed strictly, and the limit whose memory their own order takes.
STRICT = {"1f1b": "1f1b", "zb-h1": "N"}
NEEDS_SPLIT = ("zb-h1",)
#: What a hint does where all sizes are equal.
_WITHOUT_SIZES = {"bfw-pyramid": "bfw", "slot-aware-pyramid": "slot-aware"}
LIMITS = ("1f1b", "N", "2N")


@dataclass(frozen=True, slots=True)
class Case:
    """One cost table."""

    profile: str
    stages: int
    microbatches: int
    jitter: str
    latency: str
    seed: int
    #: How wrong the sizes are that hints receive: the deviation of the error's logarithm.
    size_error: float = 0.0
    split: bool = True

    def costs(self) -> CostTable:
        """The table."""
        return make_costs(
            self.profile,
            self.stages,
            self.microbatches,
            split=self.split,
            seed=self.seed,
            jitter=self.jitter,
            latency=self.latency,
        )

    def sizes(self) -> list[float]:
        """The sizes that hints receive."""
        planned = np.array(microbatch_sizes(self.profile, self.stages, self.microbatches, seed=self.seed))
        error = np.random.default_rng(self.seed).standard_normal(self.microbatches)
        sizes: list[float] = (planned * np.exp(self.size_error * error)).tolist()
        return sizes

    def limits(self, name: str) -> list[int]:
        """K of every stage."""
        if name == "1f1b":
            return [self.stages - stage for stage in range(self.stages)]
        return [self.stages * (2 if name == "2N" else 1)] * self.stages


@dataclass(frozen=True, slots=True)
class Row:
    """One run.

    Attributes:
        case: on which table.
        method: hint or schedule.
        limit: a name of `LIMITS`; of a schedule, the one whose memory it takes.
        makespan: seconds.
        bound: what no order within the same memory can beat, in seconds.
        peak: the largest D of any stage, microbatches.
        mean_peak: the mean over the stages of their largest D.
    """

    case: Case
    method: str
    limit: str
    makespan: float
    bound: float
    peak: int
    mean_peak: float

    @property
    def above(self) -> float:
        """Percent above the bound."""
        return 100 * (self.makespan / self.bound - 1)


def run_case(case: Case, hints: Sequence[str]) -> list[Row]:
    """Every hint within every limit, and the strict schedules, on one table."""
    costs = case.costs()
    sizes = case.sizes()
    rows = []
    # The same run is not made twice: limits beyond M never bind, and without sizes a pyramid is the hint within it.
    known: dict[tuple[str, tuple[int, ...]], Row] = {}
    for limit in LIMITS:
        counts = case.limits(limit)
        memory = [min(count, case.microbatches) for count in counts]
        for hint in hints:
            acts_as = _WITHOUT_SIZES.get(hint, hint) if min(sizes) == max(sizes) else hint
            key = (acts_as, tuple(memory))
            if key not in known:
                result = run(costs, [create_hint(hint) for _ in counts], list(map(Limit, counts)), sizes=sizes)
                known[key] = _row(case, hint, limit, result, lower_bound(costs, memory))
            same = known[key]
            rows.append(Row(case, hint, limit, same.makespan, same.bound, same.peak, same.mean_peak))
    for name, limit in STRICT.items():
        if name in NEEDS_SPLIT and not case.split:
            continue
        result = run(costs, [create_strict(name) for _ in range(case.stages)], [Limit()] * case.stages)
        counts = case.limits(limit)
        assert all(peak.held <= count for peak, count in zip(result.peaks, counts, strict=True)), name
        rows.append(_row(case, name, limit, result, lower_bound(costs, counts)))
    return rows


def _row(case: Case, method: str, limit: str, result: EngineResult, bound: float) -> Row:
    peaks = [peak.held for peak in result.peaks]
    return Row(case, method, limit, result.makespan, bound, max(peaks), fmean(peaks))


def run_cases(cases: Sequence[Case], hints: Sequence[str], jobs: int) -> Iterator[Row]:
    """All cases; a table that several seeds share is run once. Shows its progress on stderr."""
    sharing: dict[str, list[Case]] = {}
    for case in cases:
        sharing.setdefault(f"{case.costs().digest()} {case.sizes()}", []).append(case)
    # Long ones first: no straggler at the end.
    groups = sorted(sharing.values(), key=lambda group: -group[0].stages * group[0].microbatches)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with (
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
        closing(run_all(partial(run_case, hints=hints), [group[0] for group in groups], jobs=jobs)) as outcomes,
    ):
        bar = progress.add_task("tasks", total=sum(group[0].stages * group[0].microbatches for group in groups))
        for group, rows in zip(groups, outcomes, strict=True):
            for case in group:
                for row in rows:
                    yield Row(case, *astuple(row)[1:])
            progress.advance(bar, group[0].stages * group[0].microbatches)
