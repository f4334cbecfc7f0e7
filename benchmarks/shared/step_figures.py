"""The figures of each method in each cell, from its undisturbed steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.shared.comparison import Cell, Comparison
from benchmarks.shared.figures import median_interval
from benchmarks.shared.overhead import Overhead
from benchmarks.shared.steps import Step
from rrfp.engine.bound import lower_bound


@dataclass(frozen=True, slots=True)
class Judged:
    """A measured step beside its table.

    Attributes:
        step: the step.
        bound: seconds that no order, memory or transport can beat on its table.
        reference_bound: the same on the table of reference, whatever its own form.
        overhead: over its own order.
        alone: seconds that its method's order alone would take on its table.
        held_bytes: of each stage, the most.
    """

    step: Step
    bound: float
    reference_bound: float
    overhead: Overhead
    alone: float
    held_bytes: tuple[int, ...]

    @classmethod
    def of(cls, step: Step, settings: Comparison) -> Judged:
        """Check a step, and compare it with its table."""
        table = settings.table(step.turn)
        step.check(table)
        bounds = lower_bound(table, None), lower_bound(settings.reference(step.turn), None)
        overhead, alone = Overhead.of(step, table), settings.order_alone(step.turn)
        if alone is None:
            alone = step.seconds / (1 + overhead.total)
        return cls(step, *bounds, overhead, alone, step.held_bytes(table))


@dataclass(frozen=True, slots=True)
class Ratio:
    """A method's time over a peer's in the same rounds, median.

    Attributes:
        value: the ratio.
        interval: 95% of it, see `median_interval`.
        alone: the same of what their orders alone would take.
        is_disturbed: no round was undisturbed for both.
    """

    value: float
    interval: tuple[float, float]
    alone: float
    is_disturbed: bool


@dataclass(frozen=True, slots=True)
class Figures:
    """One method in one cell: medians over the steps that are used.

    Attributes:
        used: rounds whose steps are used.
        others: the most cores that other processes took in a step that is used; None where it is not known.
        discarded: rounds whose steps were disturbed; by round the cores that other processes took.
        is_disturbed: all steps were disturbed, and all are used.
        seconds: of a step.
        per_bound: over the lower bound on the table of reference.
        per_bound_interval: 95% of that, see `median_interval`.
        alone_per_bound: what the method's order alone would take, over that bound.
        per_alone: over what the method's order alone would take.
        per_own_bound: over the lower bound of the method's own table.
        per_peer: over each peer that was measured.
        overhead: over its own order.
        overhead_interval: 95% of its total, see `median_interval`.
        cpu_s: processor time a task, of all ranks, by group of threads.
        held: the most microbatches of each stage.
        held_bytes: the most bytes of each stage, as the tables have them; median.
        begin_s: from the call to the first task of stage 0.
        end_s: from the end of the last task until the last rank has returned.
    """

    used: tuple[int, ...]
    others: float | None
    discarded: Mapping[int, float]
    is_disturbed: bool
    seconds: float
    per_bound: float
    per_bound_interval: tuple[float, float]
    alone_per_bound: float
    per_alone: float
    per_own_bound: float
    per_peer: Mapping[str, Ratio]
    overhead: Overhead
    overhead_interval: tuple[float, float]
    cpu_s: Mapping[str, float]
    held: tuple[float, ...]
    held_bytes: tuple[float, ...]
    begin_s: float
    end_s: float

    @property
    def cpu_per_task(self) -> float:
        """Processor seconds of all threads."""
        return sum(self.cpu_s.values())

    @classmethod
    def of(cls, steps: Sequence[Judged], peers: Mapping[str, Sequence[Judged]]) -> Figures:
        """The figures of ``steps``, beside those of its peers in the same cell."""
        used = undisturbed(steps) or list(steps)

        def middle(figure: Callable[[Judged], float]) -> float:
            return median(map(figure, used))

        groups = used[0].step.cpu
        return cls(
            used=tuple(each.step.turn.number for each in used),
            others=max((each.step.others for each in used if each.step.others is not None), default=None),
            discarded={each.step.turn.number: each.step.others or 0.0 for each in steps if each not in used},
            is_disturbed=used[0].step.is_disturbed,
            seconds=middle(lambda each: each.step.seconds),
            per_bound=middle(lambda each: each.step.seconds / each.reference_bound),
            per_bound_interval=median_interval([each.step.seconds / each.reference_bound for each in used]),
            alone_per_bound=middle(lambda each: each.alone / each.reference_bound),
            per_alone=middle(lambda each: each.step.seconds / each.alone),
            per_own_bound=middle(lambda each: each.step.seconds / each.bound),
            per_peer={name: ratio_of(steps, other) for name, other in peers.items()},
            overhead=Overhead(middle(lambda each: each.overhead.total), middle(lambda each: each.overhead.in_sleeps)),
            overhead_interval=median_interval([each.overhead.total for each in used]),
            cpu_s={group: middle(lambda each: each.step.cpu[group] / each.step.tasks) for group in groups},  # noqa: B023
            held=tuple(max(held) for held in zip(*(each.step.held for each in used), strict=True)),
            held_bytes=tuple(median(held) for held in zip(*(each.held_bytes for each in used), strict=True)),
            begin_s=middle(lambda each: each.step.begin_s),
            end_s=middle(lambda each: each.step.end_s),
        )


def undisturbed(steps: Iterable[Judged]) -> list[Judged]:
    """Those of ``steps`` in which other processes took little."""
    return [each for each in steps if not each.step.is_disturbed]


def ratio_of(steps: Sequence[Judged], others: Sequence[Judged]) -> Ratio:
    """The time of ``steps`` over that of ``others`` in the same rounds: those undisturbed in both, if there are any."""

    def pairs(mine: Iterable[Judged], theirs: Iterable[Judged]) -> list[tuple[Judged, Judged]]:
        by_round = {each.step.turn.number: each for each in theirs}
        return [(each, by_round[each.step.turn.number]) for each in mine if each.step.turn.number in by_round]

    quiet = pairs(undisturbed(steps), undisturbed(others))
    used = quiet or pairs(steps, others)
    ratios = [mine.step.seconds / theirs.step.seconds for mine, theirs in used]
    alone = median(mine.alone / theirs.alone for mine, theirs in used)
    return Ratio(median(ratios), median_interval(ratios), alone, not quiet)


#: The figures of a run.
Results = Mapping[Cell, Mapping[str, Figures]]


def results_of(settings: Comparison, steps: Iterable[Step]) -> Results:
    """By cell and method; the steps that warm up are left out."""
    judged: dict[Cell, dict[str, list[Judged]]] = defaultdict(lambda: defaultdict(list))
    for step in steps:
        if step.turn.number > 0:
            judged[step.turn.cell][step.turn.method].append(Judged.of(step, settings))
    results = {}
    for cell, methods in judged.items():
        peers = {name: methods[name] for name in settings.PEERS if name in methods}
        results[cell] = {name: Figures.of(methods[name], peers) for name in settings.METHODS if name in methods}
    return results
