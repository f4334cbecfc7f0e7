"""Steps of replicas of which one has a slow rank, by the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import mean

from benchmarks.replicas.settings import FACTORS, LAYOUTS, Layout, seconds_of, table_of
from rrfp.core.usage import Peaks
from rrfp.costs.table import CostTable
from rrfp.lab.generators.jitter import with_jitter
from rrfp.runtime.steps.deal import dealt
from rrfp.runtime.steps.dealer import FEW, Paces
from rrfp.runtime.steps.reports import StageReport
from rrfp.trace.breakdown import Breakdown

JITTERS = ("J0", "J2")

#: Measured steps; the dealing begins after `FEW` others.
STEPS = 8


@dataclass(frozen=True, slots=True)
class Row:
    """Times of a step over that of equal replicas.

    Attributes:
        layout: of the ranks.
        jitter: of every task's time.
        factor: how much slower the slow rank is.
        plain: each replica runs its own.
        dealt: with ``share_replicas="dealt"``.
        dropped: the others run all; None where no replica is slow.
        bound: no way to share microbatches, whole or stage by stage, takes less (J0 only).
        moved: microbatches that cross replicas in a step.
    """

    layout: str
    jitter: str
    factor: float
    plain: float
    dealt: float
    dropped: float | None
    bound: float | None
    moved: float


def rows(layouts: tuple[Layout, ...] = LAYOUTS, steps: int = STEPS) -> Iterator[Row]:
    """All layouts, with and without jitter."""
    for layout in layouts:
        for jitter in JITTERS:
            equal = mean(_plain(layout, jitter, 1.0, step) for step in range(FEW, FEW + steps))
            for factor in FACTORS:
                yield _row(layout, jitter, factor, equal, steps)


def _row(layout: Layout, jitter: str, factor: float, equal: float, steps: int) -> Row:
    numbers = range(FEW, FEW + steps)
    found = [*_dealt(layout, jitter, factor, steps)]
    dropped = mean(_dropped(layout, jitter, step) for step in numbers) / equal if factor > 1 else None
    return Row(
        str(layout),
        jitter,
        factor,
        mean(_plain(layout, jitter, factor, step) for step in numbers) / equal,
        mean(seconds for seconds, _ in found) / equal,
        dropped,
        bound(layout, factor) / equal if jitter == "J0" else None,
        mean(moved for _, moved in found),
    )


def _tables(layout: Layout, jitter: str, factor: float, step: int) -> Callable[[int, int], CostTable]:
    """The table of a replica, for any number of microbatches."""

    def table(replica: int, microbatches: int) -> CostTable:
        plain = table_of(layout, microbatches, factor if replica == 0 else 1.0)
        return with_jitter(plain, jitter, seed=replica, step=step)

    return table


def _plain(layout: Layout, jitter: str, factor: float, step: int) -> float:
    table = _tables(layout, jitter, factor, step)
    return max(seconds_of(table(replica, layout.microbatches)) for replica in range(layout.replicas))


def _dropped(layout: Layout, jitter: str, step: int) -> float:
    """A step of the healthy replicas, which run all microbatches."""
    table, others = _tables(layout, jitter, 1.0, step), layout.replicas - 1
    count = -(-layout.microbatches * layout.replicas // others)
    return max(seconds_of(table(replica, count)) for replica in range(1, layout.replicas))


def _dealt(layout: Layout, jitter: str, factor: float, steps: int) -> Iterator[tuple[float, int]]:
    """The time of each measured step, and the microbatches that moved; as a job deals them."""
    given = (layout.microbatches,) * layout.replicas
    paces = Paces([replica for replica in range(layout.replicas) for _ in range(layout.stages)])
    for step in range(FEW + steps):
        known = paces.by_replica()
        counts = given if known is None else dealt(given, known)
        table = _tables(layout, jitter, factor, step)
        tables = [table(replica, count) for replica, count in enumerate(counts)]
        paces.observe(
            [
                StageReport(stage, 1.0, Breakdown(1.0, sum(own)), Peaks(), microbatches=each.microbatches)
                for each in tables
                for stage, own in enumerate((each.forward + each.backward).tolist())
            ]
        )
        if step >= FEW:
            yield max(map(seconds_of, tables)), sum(max(0, count - layout.microbatches) for count in counts)


def bound(layout: Layout, factor: float) -> float:
    """A time that no way to share the microbatches of a step among replicas can beat.

    Each stage has to run all microbatches on its copies, behind a forward through the stages before it and in front of
    a backward through them.
    """
    of_one = table_of(layout, 1)
    each: list[float] = (of_one.forward + of_one.backward)[:, 0].tolist()
    total = layout.microbatches * layout.replicas
    return max(
        sum(each[:stage]) + total * own / (layout.replicas - 1 + 1 / (factor if stage == layout.slow_stage else 1.0))
        for stage, own in enumerate(each)
    )
