"""Runs the compared methods on the cost tables of one draw, in several processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import Progress

from rrfp.costs import CostTable, make_costs, microbatch_sizes
from rrfp.engine.engine import run
from rrfp.engine.record import EngineResult
from rrfp.hints.registry import DEFAULT_HINT, create_hint, create_strict
from rrfp.lab.simulation import shown_rooms
from rrfp.lab.sweep.pool import run_all
from rrfp.memory.admission import Limit

COUNTS = ("1f1b", "n", "2n")
#: Bytes are whole numbers, so that proportions are a byte off; a limit would be missed by that byte.
SLACK = 1.001
#: Microbatches a stage.
PER_STAGE = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One draw of a workload: a profile, PP, jitter level and seed."""

    profile: str
    stages: int
    jitter: str
    seed: int

    def costs(self, **form: Any) -> CostTable:
        """Its table in one form, with sizes."""
        options: dict[str, Any] = {"seed": self.seed, "jitter": self.jitter, "sized": True}
        return make_costs(self.profile, self.stages, PER_STAGE * self.stages, **options, **form)

    def sizes(self) -> tuple[float, ...]:
        """Planned times."""
        return microbatch_sizes(self.profile, self.stages, PER_STAGE * self.stages, seed=self.seed)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The makespans of one case in seconds, by method.

    Attributes:
        case: the draw.
        seconds: by the names of `benchmarks.profiles.figures.COMPARISONS`.
        more_bytes: by how many percent the default hint held more bytes than bfw, mean over the stages, by count.
        passed: by how many percent a stage passed its limit on bytes at most.
    """

    case: Case
    seconds: dict[str, float]
    more_bytes: dict[str, float]
    passed: float


class _Table:
    """Runs on one table. Arguments: the table, and the sizes that hints receive."""

    def __init__(self, costs: CostTable, sizes: Sequence[float]) -> None:
        self._costs = costs
        self._sizes = sizes

    def counted(self, hint: str, count: str) -> EngineResult:
        """Within a number of microbatches."""
        stages = self._costs.stages
        return self.within(hint, [Limit.resolve(count, stage, stages) for stage in range(stages)])

    def within(self, hint: str, limits: Sequence[Limit], *, knows_room: bool = True) -> EngineResult:
        """Within the limit of each stage; without knowledge of their room, pyramids are made in any bytes."""
        rooms = shown_rooms(self._costs, limits) if knows_room else None
        return run(self._costs, [create_hint(hint) for _ in limits], limits, sizes=self._sizes, byte_rooms=rooms)

    def strict(self, schedule: str) -> float:
        """The makespan of a schedule with eager sends."""
        stages = self._costs.stages
        return run(self._costs, [create_strict(schedule) for _ in range(stages)], [Limit()] * stages).makespan


def run_case(case: Case) -> Outcome:
    """All methods on one case."""
    sizes = case.sizes()
    split = case.costs(split=True)
    whole, one = _Table(split.to_unsplit(), sizes), _Table(split, sizes)
    v = _Table(case.costs(split=True, chunks=2, placement="v"), sizes)
    seconds: dict[str, float] = {}
    more_bytes: dict[str, float] = {}
    passed = []
    for count in COUNTS:
        base, ours = one.counted("bfw", count), one.counted(DEFAULT_HINT, count)
        seconds |= {f"bfw, {count}": base.makespan, f"default, {count}": ours.makespan}
        more_bytes[count] = 100 * (_held(ours) / _held(base) - 1)
        if count == "2n":
            continue
        fullest = [Limit(bytes=int(max(peaks.num_bytes for peaks in base.peaks) * SLACK))] * case.stages
        for name, hint in (("default", DEFAULT_HINT), ("bfw", "bfw")):
            seconds[f"{name}, bytes a rank, {count}"] = one.within(hint, fullest).makespan
        for whose, counted in (("own", ours), ("bfw's", base)):
            limits = [Limit(bytes=int(peaks.num_bytes * SLACK)) for peaks in counted.peaks]
            in_bytes = one.within(DEFAULT_HINT, limits)
            seconds[f"default, {whose} bytes, {count}"] = in_bytes.makespan
            pyramids = one.within(DEFAULT_HINT, limits, knows_room=False).makespan
            callers = one.within("slot-aware", limits).makespan
            seconds |= {f"pyramids, {whose} bytes, {count}": pyramids, f"caller's, {whose} bytes, {count}": callers}
            seconds[f"better of both, {whose} bytes, {count}"] = min(pyramids, callers)
            over = (peaks.num_bytes / (limit.bytes or 1) for peaks, limit in zip(in_bytes.peaks, limits, strict=True))
            passed.append(100 * (max(over) - 1))
    seconds |= {"1f1b": one.strict("1f1b"), "zb-h1": one.strict("zb-h1"), "zb-v": v.strict("zb-v")}
    seconds["default, V, n"] = v.counted(DEFAULT_HINT, "n").makespan
    seconds["whole 1f1b"] = whole.strict("1f1b")
    for count in ("1f1b", "2n"):
        seconds[f"whole default, {count}"] = whole.counted(DEFAULT_HINT, count).makespan
        seconds[f"whole bf, {count}"] = whole.counted("bf", count).makespan
    return Outcome(case, seconds, more_bytes, max(passed))


def _held(result: EngineResult) -> float:
    """The mean over the stages of the most bytes held."""
    return fmean(peaks.num_bytes for peaks in result.peaks)


def run_cases(cases: Sequence[Case], jobs: int) -> Iterator[Outcome]:
    """All cases, in their order; shows its progress on stderr."""
    with (
        Progress(console=Console(stderr=True), transient=True) as progress,
        closing(run_all(run_case, cases, jobs=jobs)) as outcomes,
    ):
        yield from progress.track(outcomes, len(cases), description="tables")
