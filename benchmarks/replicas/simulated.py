"""Steps of replicas of which one has a slow rank, or two have one, by the engine and by the cores of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np

from benchmarks.replicas.claimed import PooledStep
from benchmarks.replicas.settings import FACTORS, LATENCY_S, LAYOUTS, TENSOR_BYTES, Layout, seconds_of, table_of
from rrfp.core.usage import Peaks
from rrfp.costs.table import CostTable
from rrfp.lab.cluster.ranks import Rank
from rrfp.lab.generators.jitter import with_jitter
from rrfp.lab.generators.profiles import make_costs
from rrfp.lab.simulation import simulate
from rrfp.model.tasks import F, Task
from rrfp.runtime.steps.deal import Deal, dealt
from rrfp.runtime.steps.dealer import FEW, Paces
from rrfp.runtime.steps.reports import StageReport
from rrfp.trace.breakdown import Breakdown

#: Of microbatches and tasks: of one size, with messages of a millisecond, with jitter, of different sizes; and a rank
#: that becomes slow in mid-step, which no step before has shown.
KINDS = ("J0", "1 ms", "J2", "uneven", "late")

#: Of a cost table.
_TIMES = ("forward", "backward")

#: Kinds of which every step is as the one before, once paces are known.
_ALIKE = ("J0", "1 ms", "late")

#: Measured steps; the dealing begins after `FEW` others.
STEPS = 8

#: Slow ranks: one, or two of different stages and replicas.
SLOW_RANKS = (1, 2)


@dataclass(frozen=True, slots=True)
class Row:
    """Times of a step over that of equal replicas.

    Attributes:
        layout: of the ranks.
        kind: of `KINDS`.
        factor: how much slower the slow ranks are.
        slow: how many there are.
        plain: each replica runs its own.
        dealt: with ``share_replicas="dealt"``.
        claimed: with ``share_replicas=True``.
        dropped: the others run all; None where no replica is slow, or two are.
        bound: no way to share microbatches, whole or stage by stage, takes less; of J0 only.
        moved: microbatches that cross replicas in a step that is dealt.
        dealt_bytes: their inputs.
        claimed_bytes: inputs, activations and gradients that cross replicas in a claimed step.
    """

    layout: str
    kind: str
    factor: float
    slow: int
    plain: float
    dealt: float
    claimed: float
    dropped: float | None
    bound: float | None
    moved: float
    dealt_bytes: float
    claimed_bytes: float


def rows(layouts: tuple[Layout, ...] = LAYOUTS, steps: int = STEPS, kinds: Sequence[str] = KINDS) -> Iterator[Row]:
    """All slow ranks of some layouts and kinds."""
    for layout in layouts:
        for kind in kinds:
            count = 1 if kind in _ALIKE else steps
            equal = mean(_plain(Case(layout, kind, 1.0), step) for step in range(FEW, FEW + count))
            for factor in FACTORS:
                for slow in SLOW_RANKS[: 1 if factor == 1 or kind == "late" else None]:
                    yield _row(Case(layout, kind, factor, slow), equal, count)


@dataclass(frozen=True, slots=True)
class Case:
    """Replicas of which the first has a rank that is so much slower; or the second as well, its first one."""

    layout: Layout
    kind: str
    factor: float
    slow: int = 1

    @property
    def latency(self) -> float:
        """Seconds that a message takes."""
        return LATENCY_S if self.kind == "1 ms" else 0.0

    def slow_stage(self, replica: int) -> int | None:
        """The stage whose rank is slow in a replica."""
        return {0: self.layout.slow_stage, 1: 0}.get(replica) if replica < self.slow else None

    def sizes(self, step: int) -> list[list[float]]:
        """Of the microbatches of each replica's caller."""
        shape = self.layout.replicas, self.layout.microbatches
        if self.kind != "uneven":
            return [[1.0] * shape[1] for _ in range(shape[0])]
        found: list[list[float]] = np.random.default_rng(step).lognormal(-0.125, 0.5, shape).tolist()
        return found

    def table(self, step: int, replica: int, sizes: Sequence[float]) -> CostTable:
        """A step of one replica."""
        stage = None if self.kind == "late" else self.slow_stage(replica)
        plain = table_of(self.layout, sizes, 1.0 if stage is None else self.factor, stage, self.latency)
        return with_jitter(plain, "J2" if self.kind == "J2" else "J0", seed=replica, step=step)

    def seconds(self, table: CostTable, sizes: Sequence[float]) -> float:
        """The time of a step of one replica."""
        return seconds_of(table, sizes if self.kind == "uneven" else None)

    def pooled(self, step: int, replicas: Sequence[int], paces: Sequence[Sequence[float]]) -> PooledStep:
        """A step of some replicas that share their forwards."""
        sizes = self.sizes(step)
        count = self.layout.microbatches
        flat = [size for r in replicas for size in sizes[r]]
        # A replica's own come first in its table: with them it has the jitter that it would have alone.
        turned = [[*flat[copy * count :], *flat[: copy * count]] for copy in range(len(replicas))]
        tables = [self.table(step, replica, own) for replica, own in zip(replicas, turned, strict=True)]
        times = [(table.forward.tolist(), table.backward.tolist()) for table in tables]
        half = seconds_of(table_of(self.layout, [1.0] * self.layout.microbatches)) / 2

        def seconds(rank: Rank, task: Task, now: float) -> float:
            column = (task.microbatch - rank.replica * count) % len(flat)
            own: float = times[rank.replica][task.kind is not F][task.virtual_stage][column]
            is_late = self.kind == "late" and now >= half and rank.stage == self.slow_stage(replicas[rank.replica])
            return own * self.factor if is_late else own

        return PooledStep(
            self.layout._replace(replicas=len(replicas)),
            [copy for copy in range(len(replicas)) for _ in range(count)],
            seconds,
            paces,
            sizes=flat if self.kind == "uneven" else None,
            latency=lambda sender, receiver: self.latency,
        )


def _row(case: Case, equal: float, steps: int) -> Row:
    numbers = range(FEW, FEW + steps)
    found, shared = [*_dealt(case, steps)], [*_claimed(case, steps)]
    has_others = case.factor > 1 and case.slow == 1 and case.kind != "late"
    moved = mean(moved for _, moved in found)
    return Row(
        str(case.layout),
        case.kind,
        case.factor,
        case.slow if case.factor > 1 else 0,
        mean(_plain(case, step) for step in numbers) / equal,
        mean(seconds for seconds, _ in found) / equal,
        mean(seconds for seconds, _ in shared) / equal,
        mean(_dropped(case, step) for step in numbers) / equal if has_others else None,
        bound(case) / equal if case.kind == "J0" else None,
        moved,
        TENSOR_BYTES * moved,
        TENSOR_BYTES * mean(crossed for _, crossed in shared),
    )


def _longest(case: Case, step: int, sizes: Mapping[int, Sequence[float]]) -> float:
    """A step of replicas that run microbatches of these sizes."""
    return max(case.seconds(case.table(step, replica, own), own) for replica, own in sizes.items())


def _plain(case: Case, step: int) -> float:
    if case.kind == "late":  # the engine's durations do not depend on the time
        return max(case.pooled(step, [replica], ()).run() for replica in range(case.layout.replicas))
    return _longest(case, step, dict(enumerate(case.sizes(step))))


def _dropped(case: Case, step: int) -> float:
    """A step of the healthy replicas, which run all microbatches."""
    lost, *others = case.sizes(step)
    return _longest(case, step, {r + 1: [*own, *lost[r :: len(others)]] for r, own in enumerate(others)})


def _paces_of(layout: Layout) -> Paces:
    return Paces([replica for _ in range(layout.stages) for replica in range(layout.replicas)])


def _report(stage: int, seconds: float, microbatches: int, size: float) -> StageReport:
    return StageReport(stage, 1.0, Breakdown(1.0, seconds), Peaks(), microbatches=microbatches, size=size)


def _dealt(case: Case, steps: int) -> Iterator[tuple[float, int]]:
    """The time of each measured step, and the microbatches that moved; as a job deals them."""
    layout, paces = case.layout, _paces_of(case.layout)
    if case.kind == "late":  # steps before were equal, so nothing moves
        yield from ((_plain(case, step), 0) for step in range(FEW, FEW + steps))
        return
    for step in range(FEW + steps):
        sizes, known = case.sizes(step), paces.by_replica()
        deal = Deal.alone([*map(len, sizes)]) if known is None else dealt(sizes, known)
        own = [[sizes[home.replica][home.microbatch] for home in homes] for homes in deal.homes]
        tables = [case.table(step, replica, each) for replica, each in enumerate(own)]
        busy = [(table.forward + table.backward).sum(axis=1) for table in tables]
        here = [layout.graph.placement.virtual_stages(stage) for stage in range(layout.stages)]
        paces.observe(
            [
                _report(stage, float(busy[replica][[*here[stage]]].sum()), len(own[replica]), sum(own[replica]))
                for stage in range(layout.stages)
                for replica in range(layout.replicas)
            ]
        )
        if step >= FEW:
            moved = sum(home.replica != r for r, homes in enumerate(deal.homes) for home in homes)
            yield max(map(case.seconds, tables, own)), moved


def _claimed(case: Case, steps: int) -> Iterator[tuple[float, int]]:
    """The time of each measured step, and the tensors that crossed replicas; with paces as a job measures them."""
    layout, paces = case.layout, _paces_of(case.layout)
    copies = range(layout.replicas)
    ranks = [[stage * layout.replicas + copy for copy in copies] for stage in range(layout.stages)]
    for step in range(FEW + steps):
        # What is slow only now was not seen before.
        known = [] if case.kind == "late" else [paces.of(own) for own in ranks]
        pooled = case.pooled(step, copies, known)
        seconds = pooled.run()
        paces.observe(
            [
                _report(rank // layout.replicas, spent, ran, 0.0)
                for rank, (spent, ran) in enumerate(zip(pooled.spent, pooled.forwards, strict=True))
            ]
        )
        if step >= FEW:
            yield seconds, pooled.crossed


def seconds_by(method: str, case: Case) -> float:
    """A step by one of `METHODS`, once paces are known."""
    if method == "plain":
        return _plain(case, FEW)
    found = _dealt(case, 1) if method == "dealt" else _claimed(case, 1)
    return mean(seconds for seconds, _ in found)


def bound(case: Case) -> float:
    """A time that no way to share the microbatches of a step among replicas can beat.

    Each stage has to run all microbatches on its copies, behind a forward through what comes before its first chunk and
    in front of a backward through that.
    """
    layout, of_one = case.layout, table_of(case.layout, [1.0])
    each: list[float] = (of_one.forward + of_one.backward)[:, 0].tolist()
    total, copies, slowest = layout.microbatches * layout.replicas, range(layout.replicas), 0.0
    for stage in range(layout.stages):
        speed = sum(1 / (case.factor if case.slow_stage(copy) == stage else 1.0) for copy in copies)
        own = layout.graph.placement.virtual_stages(stage)
        slowest = max(slowest, sum(each[: own[0]]) + total * sum(each[v] for v in own) / speed)
    return slowest


@dataclass(frozen=True, slots=True)
class Gain:
    """Replicas of which none is slow, over the slowest of those that run their own; means over seeds and two limits.

    Attributes:
        profile: ``even``, or one of `rrfp.lab.generators.workloads.PROFILES`.
        jitter: its level.
        replicas: how many.
        average: the mean over replicas that run their own.
        bound: no way to share microbatches takes less.
        claimed: with ``share_replicas=True``; nobody knows sizes.
        crossed: activations that cross replicas for each microbatch.
    """

    profile: str
    jitter: str
    replicas: int
    average: float
    bound: float
    claimed: float
    crossed: float


def gains(replicas: Sequence[int] = (2, 4, 8), seeds: int = 2) -> Iterator[Gain]:
    """What claims gain by it that a step need not wait for the replica that has most to do."""
    for profile in ("even", "llm", "mllm"):
        for jitter in ("J0", "J2"):
            for count in replicas:
                found = [_gain(profile, jitter, count, seed, n) for seed in range(seeds) for n in (1, 2)]
                yield Gain(profile, jitter, count, *map(mean, zip(*found, strict=True)))


def _gain(profile: str, jitter: str, replicas: int, seed: int, rounds: int) -> tuple[float, float, float, float]:
    """The figures of a `Gain`, with a limit of so many times the stages."""
    stages, each = 4, Layout(4, replicas).microbatches

    def table(replica: int) -> CostTable:
        number = seed * replicas + replica
        if profile != "even":
            return make_costs(profile, stages, each, jitter=jitter, seed=number)
        return with_jitter(table_of(Layout(stages, replicas), [1.0] * each), jitter, seed=number)

    tables = [table(replica) for replica in range(replicas)]
    limit = rounds * stages
    alone = [simulate(own, hint="slot-aware-pyramid", limit=limit).makespan for own in tables]
    forward, backward = (np.concatenate([getattr(own, name) for own in tables], axis=1) for name in _TIMES)

    def seconds(rank: Rank, task: Task, _: float) -> float:
        return float((forward if task.kind is F else backward)[rank.stage, task.microbatch])

    homes = [replica for replica in range(replicas) for _ in range(each)]
    pooled = PooledStep(Layout(stages, replicas), homes, seconds, limits=[limit] * stages)
    both = forward + backward
    least = float(max(both[:stage].sum(axis=0).min() + both[stage].sum() / replicas for stage in range(stages)))
    slowest = max(alone)
    return mean(alone) / slowest, least / slowest, pooled.run() / slowest, pooled.crossed / (2 * len(homes))
