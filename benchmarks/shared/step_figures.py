"""The figures of each method in each cell, from its undisturbed steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.shared.comparison import Cell, Comparison
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
        held_bytes: of each stage, the most.
    """

    step: Step
    bound: float
    reference_bound: float
    overhead: Overhead
    held_bytes: tuple[int, ...]

    @classmethod
    def of(cls, step: Step, settings: Comparison) -> Judged:
        """Check a step, and compare it with its table."""
        table = settings.table(step.turn)
        step.check(table)
        bounds = lower_bound(table, None), lower_bound(settings.reference(step.turn), None)
        return cls(step, *bounds, Overhead.of(step, table), step.held_bytes(table))


@dataclass(frozen=True, slots=True)
class Ratio:
    """A method's time over a peer's in the same rounds, median.

    Attributes:
        value: the ratio.
        is_disturbed: no round was undisturbed for both.
    """

    value: float
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
        per_own_bound: over the lower bound of the method's own table.
        per_peer: over each peer that was measured.
        overhead: over its own order.
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
    per_own_bound: float
    per_peer: Mapping[str, Ratio]
    overhead: Overhead
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
            per_own_bound=middle(lambda each: each.step.seconds / each.bound),
            per_peer={name: ratio_of(steps, other) for name, other in peers.items()},
            overhead=Overhead(middle(lambda each: each.overhead.total), middle(lambda each: each.overhead.in_sleeps)),
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

    def ratios(mine: Iterable[Judged], theirs: Iterable[Judged]) -> list[float]:
        by_round = {each.step.turn.number: each.step.seconds for each in theirs}
        return [
            each.step.seconds / by_round[each.step.turn.number] for each in mine if each.step.turn.number in by_round
        ]

    quiet = ratios(undisturbed(steps), undisturbed(others))
    return Ratio(median(quiet or ratios(steps, others)), not quiet)


#: The figures of a run.
Results = Mapping[Cell, Mapping[str, Figures]]


def results_of(settings: Comparison, steps: Iterable[Step]) -> Results:
    """By cell and method; the steps that warm up are left out."""
    judged: dict[Cell, dict[str, list[Judged]]] = defaultdict(lambda: defaultdict(list))
    for step in steps:
        if step.turn.number:
            judged[step.turn.cell][step.turn.method].append(Judged.of(step, settings))
    results = {}
    for cell, methods in judged.items():
        peers = {name: methods[name] for name in settings.PEERS if name in methods}
        results[cell] = {name: Figures.of(methods[name], peers) for name in settings.METHODS if name in methods}
    return results
