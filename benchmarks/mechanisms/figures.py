"""What each mechanism changes, in real processes and in the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from benchmarks.mechanisms.settings import BLOCKING, LATE_BLOCKING, MECHANISMS, METHODS, Settings, paper_ratio
from benchmarks.shared.comparison import Cell, Turn
from benchmarks.shared.figures import median_interval
from benchmarks.shared.step_figures import Figures, Judged
from benchmarks.shared.steps import Step
from rrfp.engine.bound import lower_bound
from rrfp.lab.simulation import simulate

#: Cells that are simulated only: M is four times as large as N.
SIMULATED = tuple(
    Cell(stages, profile, jitter) for stages in (4, 8, 16) for profile in ("llm", "mllm") for jitter in ("J0", "J3")
)
_DRAWS = 3


@dataclass(frozen=True, slots=True)
class Row:
    """A method beside another one, by which a mechanism is set apart.

    Attributes:
        mechanism: its name.
        cell: where.
        method: its name.
        base: the other one.
        seconds: of a step, median of the rounds that are used.
        per_bound: over the lower bound.
        per_bound_interval: 95% of that, see `median_interval`.
        simulated_per_bound: what the engine says of the same tables, where messages take no time but what is late.
        held: the most microbatches on a stage, and the sum over all stages.
        ratio: over the base in the same rounds, median.
        ratio_interval: 95% of that.
        simulated: the same in the engine.
        paper: the paper's, where it has one.
        rounds: of the ratio.
        is_disturbed: no round was undisturbed for both.
    """

    mechanism: str
    cell: Cell
    method: str
    base: str
    seconds: float
    per_bound: float
    per_bound_interval: tuple[float, float]
    simulated_per_bound: float
    held: tuple[float, float]
    ratio: float
    ratio_interval: tuple[float, float]
    simulated: float
    paper: float | None
    rounds: int
    is_disturbed: bool


def engine_s(settings: Settings, turn: Turn) -> float:
    """Seconds of a step in the engine."""
    options: Any = {name: each for name, each in METHODS[turn.method].options.items() if name != "split"}
    if turn.method in (BLOCKING, LATE_BLOCKING):
        options = {"strict": "1f1b", "sends": "blocking"}
    elif "strict" not in options and "hint" not in options:
        options["hint"] = "slot-aware-pyramid"
    return simulate(settings.late_table(turn), **options).makespan


def rows_of(settings: Settings, steps: Sequence[Step]) -> Iterator[Row]:
    """A row for each pair of each mechanism in each cell, of the methods that were measured."""
    judged: dict[tuple[Cell, str], dict[int, Judged]] = {}
    for step in steps:
        if step.turn.number:
            judged.setdefault((step.turn.cell, step.turn.method), {})[step.turn.number] = Judged.of(step, settings)
    for cell in dict.fromkeys(cell for cell, _ in judged):
        for mechanism, pairs in MECHANISMS.items():
            for method, base in pairs:
                if (cell, method) in judged and (cell, base) in judged:
                    yield _row(settings, mechanism, cell, (method, judged[cell, method]), (base, judged[cell, base]))


def _row(
    settings: Settings,
    mechanism: str,
    cell: Cell,
    own: tuple[str, Mapping[int, Judged]],
    other: tuple[str, Mapping[int, Judged]],
) -> Row:
    (method, mine), (base, theirs) = own, other
    common = sorted(mine.keys() & theirs.keys())
    quiet = [n for n in common if not mine[n].step.is_disturbed and not theirs[n].step.is_disturbed]
    used = quiet or common
    per_bound = [mine[n].step.seconds / mine[n].reference_bound for n in used]
    ratios = [mine[n].step.seconds / theirs[n].step.seconds for n in used]
    planned = {n: engine_s(settings, Turn(cell, n, method)) for n in used}
    held = Figures.of(list(mine.values()), {}).held
    return Row(
        mechanism,
        cell,
        method,
        base,
        seconds=median(mine[n].step.seconds for n in used),
        per_bound=median(per_bound),
        per_bound_interval=median_interval(per_bound),
        simulated_per_bound=median(planned[n] / mine[n].reference_bound for n in used),
        held=(max(held), sum(held)),
        ratio=median(ratios),
        ratio_interval=median_interval(ratios),
        simulated=median(planned[n] / engine_s(settings, Turn(cell, n, base)) for n in used),
        paper=paper_ratio(method, base, cell.profile),
        rounds=len(used),
        is_disturbed=not quiet,
    )


@dataclass(frozen=True, slots=True)
class Simulated:
    """A method beside another one in the engine alone: mean over some draws."""

    mechanism: str
    method: str
    base: str
    cell: Cell
    ratio: float
    per_bound: float


def simulated(cells: Sequence[Cell] = SIMULATED, draws: int = _DRAWS) -> Iterator[Simulated]:
    """Every pair of every mechanism in every cell."""
    for cell in cells:
        settings = Settings(cell.stages, (cell.profile,), (cell.jitter,), tuple(METHODS), 4 * cell.stages)
        numbers = range(1, draws + 1)
        seconds = {name: [engine_s(settings, Turn(cell, number, name)) for number in numbers] for name in METHODS}
        bounds = [lower_bound(settings.reference(Turn(cell, number, BLOCKING)), None) for number in numbers]
        for mechanism, pairs in MECHANISMS.items():
            for method, base in pairs:
                ratio = fmean(own / other for own, other in zip(seconds[method], seconds[base], strict=True))
                per_bound = fmean(own / bound for own, bound in zip(seconds[method], bounds, strict=True))
                yield Simulated(mechanism, method, base, cell, ratio, per_bound)


def steps_data(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Every measured step, as plain data."""
    return [
        {**asdict_of(step.turn), "seconds": step.seconds, "others": step.others} for step in steps if step.turn.number
    ]


def asdict_of(turn: Turn) -> dict[str, Any]:
    """A turn as plain data."""
    return {**turn.cell._asdict(), "round": turn.number, "method": turn.method}


def plain(row: Row | Simulated) -> dict[str, Any]:
    """A row as plain data."""
    return {**asdict(row), "cell": str(row.cell)}
