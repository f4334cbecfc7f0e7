"""The gain from knowing the sizes of microbatches: by a limit on bytes, and by one order of a whole step.

    python benchmarks/own_sizes/run.py [--seeds 4] [--stages 8 16] [--jitter J0 J2] [--unsplit]
                               [--only bytes|order] [--quick] [--json]

Simulated, hint slot-aware-pyramid, no latency, seeds from 1000 on, every comparison on the same cost table. Sizes are
planned times. A gain is percent less makespan; ± is a 95% interval over the runs, and "worst" the smallest gain.

**Bytes**: 4 N microbatches. A count of slots (1f1b: N - s on stage s; N) against a limit on bytes, on each stage the
most that the count held there, and a thousandth. A microbatch holds bytes in proportion to its planned time on the
stage. "inputs": a forward shows how large it is when its inputs arrive, as in a pipeline; "sizes": it does not, and the
step's sizes are all that is known. The last column is the most by which a stage passed its limit, in percent of it.

**Order**: 8 N microbatches. One pyramid a step, and the shipped rule, against runs of 4 N. The rule reads the
correlation of sizes and measured times off the step before, with its own microbatches and jitter; the last column is
its mean.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.shared.options import parsed, parser_of
from rrfp.costs import JITTER_LEVELS, CostTable, make_costs, microbatch_sizes
from rrfp.engine.engine import run
from rrfp.engine.record import EngineResult
from rrfp.hints.pyramid import ORDERS_ALL
from rrfp.hints.registry import DEFAULT_HINT, create_hint
from rrfp.lab.simulation import shown_correlation
from rrfp.memory.admission import Limit

FIRST_SEED = 1000
COUNTS = ("1f1b", "n")
#: Bytes in the table are whole numbers, so that proportions are a byte off; the limit would be missed by that byte.
SLACK = 1.001
ORDER_LIMITS = ("1f1b", "n", "2n")
#: Of several modalities, and of one size for all stages.
PROFILES = ("mllm", "modalities", "zipf", "bimodal")


@dataclass(frozen=True, slots=True)
class Cell:
    """Gains of one way over its base, in percent."""

    profile: str
    limit: str
    way: str
    mean: float
    interval: float
    worst: float
    extra: float

    @classmethod
    def of(cls, profile: str, limit: str, way: str, gains: Sequence[float], extra: float) -> Cell:
        """``extra``: the last column."""
        interval = 1.96 * stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
        return cls(profile, limit, way, fmean(gains), interval, min(gains), extra)


class Study:
    """Runs on one profile. Arguments as on the command line."""

    def __init__(self, profile: str, arguments: argparse.Namespace) -> None:
        self.profile = profile
        self._arguments = arguments

    def tables(self, per_stage: int, step: int = 0) -> Iterator[tuple[CostTable, tuple[float, ...]]]:
        """Every cost table with its sizes."""
        for stages in self._arguments.stages:
            for jitter in self._arguments.jitter:
                for seed in range(FIRST_SEED, FIRST_SEED + self._arguments.seeds):
                    shape = (self.profile, stages, per_stage * stages)
                    split = not self._arguments.unsplit
                    costs = make_costs(*shape, split=split, seed=seed, step=step, jitter=jitter, sized=True)
                    yield costs, microbatch_sizes(*shape, seed=seed, step=step)

    def bytes(self) -> Iterator[Cell]:
        """Own bytes against counts, at the same peak bytes."""
        for name in COUNTS:
            gains: dict[str, list[float]] = {"inputs": [], "sizes": []}
            over = dict.fromkeys(gains, 0.0)
            for costs, sizes in self.tables(4):
                counted = dispatch(costs, counts(name, costs.stages), sizes)
                limits = [Limit(bytes=int(peaks.num_bytes * SLACK)) for peaks in counted.peaks]
                for way, each in gains.items():
                    result = dispatch(costs, limits, sizes, shows_inputs=way == "inputs")
                    each.append(gain(result, counted))
                    over[way] = max(over[way], _over(result, limits))
            for way, each in gains.items():
                yield Cell.of(self.profile, name, way, each, over[way])

    def order(self) -> Iterator[Cell]:
        """One pyramid, and the rule, against runs of 4 N."""
        for name in ORDER_LIMITS:
            gains: dict[str, list[float]] = {"one": [], "rule": []}
            measured = []
            for (before, its_sizes), (costs, sizes) in zip(self.tables(8), self.tables(8, 1), strict=True):
                limits = counts(name, costs.stages)
                base = dispatch(costs, limits, sizes)
                one = dispatch(costs, limits, sizes, size_correlation=1.0)
                shown = shown_by(before, its_sizes)
                rule = one if shown is not None and shown > ORDERS_ALL else base
                gains["one"].append(gain(one, base))
                gains["rule"].append(gain(rule, base))
                measured.append(0.0 if shown is None else shown)
            for way, each in gains.items():
                yield Cell.of(self.profile, name, way, each, fmean(measured))


def dispatch(costs: CostTable, limits: Sequence[Limit], sizes: Sequence[float], **known: Any) -> EngineResult:
    """One run."""
    return run(costs, [create_hint(DEFAULT_HINT) for _ in limits], limits, sizes=sizes, **known)


def counts(name: str, stages: int) -> list[Limit]:
    """The limit of each stage."""
    return [Limit.resolve(name, stage, stages) for stage in range(stages)]


def gain(result: EngineResult, base: EngineResult) -> float:
    """Percent less makespan."""
    return 100 * (1 - result.makespan / base.makespan)


def shown_by(costs: CostTable, sizes: Sequence[float]) -> float | None:
    """The least correlation of sizes with the times of a stage, as its tasks measure them."""
    return shown_correlation(replace(costs, sizes=tuple(sizes)))


def _over(result: EngineResult, limits: Sequence[Limit]) -> float:
    pairs = zip(result.peaks, limits, strict=True)
    return max(100 * (peaks.num_bytes / (limit.bytes or 1) - 1) for peaks, limit in pairs)


def main() -> None:
    """Run and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=4, help="draws of every workload, at least 1")
    parser.add_argument("--stages", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--jitter", nargs="+", choices=list(JITTER_LEVELS), default=["J0", "J2"])
    parser.add_argument("--unsplit", action="store_true", help="backward is one task")
    parser.add_argument("--only", choices=["bytes", "order"], help="one of the two tables")
    arguments = parsed(parser, "seeds")
    if arguments.quick:
        arguments.seeds, arguments.stages, arguments.jitter = 1, [2], ["J2"]
    tables = {"bytes": "passed by %", "order": "correlation"}
    cells: dict[str, list[Cell]] = {}
    for name, last in tables.items():
        if arguments.only in (None, name):
            studies = [Study(profile, arguments) for profile in PROFILES]
            cells[name] = [cell for study in studies for cell in getattr(study, name)()]
            if not arguments.json:
                show(name, last, cells[name])
    if arguments.json:
        print(json.dumps({name: list(map(asdict, each)) for name, each in cells.items()}))


def show(name: str, last: str, cells: Sequence[Cell]) -> None:
    """A table."""
    table = Table("profile", "limit", "way", "gain %", "worst", last, title=name)
    for cell in cells:
        figures = (f"{cell.mean:+.1f} ± {cell.interval:.1f}", f"{cell.worst:+.1f}", f"{cell.extra:.2f}")
        table.add_row(cell.profile, cell.limit, cell.way, *figures)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
