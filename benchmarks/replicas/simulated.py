"""Steps of replicas of which one has a slow rank, by the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np

from benchmarks.replicas.settings import FACTORS, LAYOUTS, Layout, seconds_of, table_of
from rrfp.core.usage import Peaks
from rrfp.costs.table import CostTable
from rrfp.lab.generators.jitter import with_jitter
from rrfp.runtime.steps.deal import Deal, dealt
from rrfp.runtime.steps.dealer import FEW, Paces
from rrfp.runtime.steps.reports import StageReport
from rrfp.trace.breakdown import Breakdown

#: Of microbatches and tasks: of one size, with jitter, of different sizes.
KINDS = ("J0", "J2", "uneven")

#: Measured steps; the dealing begins after `FEW` others.
STEPS = 8


@dataclass(frozen=True, slots=True)
class Row:
    """Times of a step over that of equal replicas.

    Attributes:
        layout: of the ranks.
        kind: of `KINDS`.
        factor: how much slower the slow rank is.
        plain: each replica runs its own.
        dealt: with ``share_replicas="dealt"``.
        dropped: the others run all; None where no replica is slow.
        bound: no way to share microbatches, whole or stage by stage, takes less; of J0 only.
        moved: microbatches that cross replicas in a step.
    """

    layout: str
    kind: str
    factor: float
    plain: float
    dealt: float
    dropped: float | None
    bound: float | None
    moved: float


def rows(layouts: tuple[Layout, ...] = LAYOUTS, steps: int = STEPS) -> Iterator[Row]:
    """All layouts and kinds."""
    for layout in layouts:
        for kind in KINDS:
            equal = mean(_plain(Case(layout, kind, 1.0), step) for step in range(FEW, FEW + steps))
            for factor in FACTORS:
                yield _row(Case(layout, kind, factor), equal, steps)


@dataclass(frozen=True, slots=True)
class Case:
    """Replicas of which the first has a rank that is so much slower."""

    layout: Layout
    kind: str
    factor: float

    def sizes(self, step: int) -> list[list[float]]:
        """Of the microbatches of each replica's caller."""
        shape = self.layout.replicas, self.layout.microbatches
        if self.kind != "uneven":
            return [[1.0] * shape[1] for _ in range(shape[0])]
        found: list[list[float]] = np.random.default_rng(step).lognormal(-0.125, 0.5, shape).tolist()
        return found

    def table(self, step: int, replica: int, sizes: Sequence[float]) -> CostTable:
        """A step of one replica."""
        plain = table_of(self.layout, sizes, self.factor if replica == 0 else 1.0)
        return with_jitter(plain, "J2" if self.kind == "J2" else "J0", seed=replica, step=step)

    def seconds(self, table: CostTable, sizes: Sequence[float]) -> float:
        """The time of a step of one replica."""
        return seconds_of(table, sizes if self.kind == "uneven" else None)


def _row(case: Case, equal: float, steps: int) -> Row:
    numbers = range(FEW, FEW + steps)
    found = [*_dealt(case, steps)]
    return Row(
        str(case.layout),
        case.kind,
        case.factor,
        mean(_plain(case, step) for step in numbers) / equal,
        mean(seconds for seconds, _ in found) / equal,
        mean(_dropped(case, step) for step in numbers) / equal if case.factor > 1 else None,
        bound(case.layout, case.factor) / equal if case.kind == "J0" else None,
        mean(moved for _, moved in found),
    )


def _longest(case: Case, step: int, sizes: Mapping[int, Sequence[float]]) -> float:
    """A step of replicas that run microbatches of these sizes."""
    return max(case.seconds(case.table(step, replica, own), own) for replica, own in sizes.items())


def _plain(case: Case, step: int) -> float:
    return _longest(case, step, dict(enumerate(case.sizes(step))))


def _dropped(case: Case, step: int) -> float:
    """A step of the healthy replicas, which run all microbatches."""
    lost, *others = case.sizes(step)
    return _longest(case, step, {r + 1: [*own, *lost[r :: len(others)]] for r, own in enumerate(others)})


def _dealt(case: Case, steps: int) -> Iterator[tuple[float, int]]:
    """The time of each measured step, and the microbatches that moved; as a job deals them."""
    layout = case.layout
    paces = Paces([replica for replica in range(layout.replicas) for _ in range(layout.stages)])
    for step in range(FEW + steps):
        sizes, known = case.sizes(step), paces.by_replica()
        deal = Deal.alone([*map(len, sizes)]) if known is None else dealt(sizes, known)
        own = [[sizes[home.replica][home.microbatch] for home in homes] for homes in deal.homes]
        tables = [case.table(step, replica, each) for replica, each in enumerate(own)]
        paces.observe(
            [
                StageReport(stage, 1.0, Breakdown(1.0, sum(busy)), Peaks(), microbatches=len(each), size=sum(each))
                for each, table in zip(own, tables, strict=True)
                for stage, busy in enumerate((table.forward + table.backward).tolist())
            ]
        )
        if step >= FEW:
            moved = sum(home.replica != r for r, homes in enumerate(deal.homes) for home in homes)
            yield max(map(case.seconds, tables, own)), moved


def bound(layout: Layout, factor: float) -> float:
    """A time that no way to share the microbatches of a step among replicas can beat.

    Each stage has to run all microbatches on its copies, behind a forward through the stages before it and in front of
    a backward through them.
    """
    of_one = table_of(layout, [1.0])
    each: list[float] = (of_one.forward + of_one.backward)[:, 0].tolist()
    total = layout.microbatches * layout.replicas
    return max(
        sum(each[:stage]) + total * own / (layout.replicas - 1 + 1 / (factor if stage == layout.slow_stage else 1.0))
        for stage, own in enumerate(each)
    )
