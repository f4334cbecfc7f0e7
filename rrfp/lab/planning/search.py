"""Searches the settings under which recorded steps are shortest, each candidate by simulation on the same steps.

First layouts, under one method: for each placement a few cuts (as now, even, balanced by means, balanced by means and
spread), and from the best of them those neighbours whose stages are most even; never more by means alone, which mislead
where microbatches are of several kinds. Then limits, hints and split for the best layout of each placement. The best
are judged on steps on which nothing was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from rrfp.costs.table import Matrix
from rrfp.errors import ConfigError
from rrfp.hints.registry import DEFAULT_HINT, HintSpec, check_order, default_hint
from rrfp.lab.advice.advice import HINTS
from rrfp.lab.advice.causes import WEIGHT_PARTS
from rrfp.lab.advice.replays import Method
from rrfp.lab.planning.layers import ModelLayout, balanced
from rrfp.lab.planning.rebuilt import RebuiltSteps, StepShape
from rrfp.memory.admission import Limit
from rrfp.model.placement import Placement

#: Layouts of one placement are compared on so many steps first; those that take this much longer than the best are
#: then given up.
FIRST_STEPS, GIVEN_UP = 3, 1.02

#: From the best layout of a placement, so many times the nearest neighbours that are the most even are tried.
ROUNDS, NEIGHBOURS = 3, 5

#: Layouts of other placements keep on being tried if they take at most this much longer than the best.
NEAR = 1.05

#: Rows that are judged, and those of one layout and split among them.
ROWS, ROWS_OF_LAYOUT = 8, 2

#: The most simulated tasks: a minute or two on one core.
MOST_TASKS = 2_000_000


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan: a layout of the layers (None: as recorded), whether backward is split, M, and a method."""

    layout: ModelLayout | None
    split: bool
    microbatches: int
    method: Method
    recompute: tuple[int, ...] = ()

    def shape(self, weight_part: float | None) -> StepShape:
        return StepShape(self.layout, self.split, weight_part, self.microbatches, self.recompute)


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """A candidate on some steps."""

    #: Seconds of each step, for as many microbatches as the recorded ones have.
    seconds: Matrix
    #: The same with the least and the most that weight gradients may take of backward, where nobody has measured it.
    brackets: tuple[Matrix, ...]
    #: The most that a stage held, in microbatches and in bytes.
    held: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Budget:
    """What may be searched."""

    #: The most bytes that microbatches may hold on a stage; None: limits up to 2N.
    num_bytes: int | None = None
    #: The numbers of microbatches; none: that of the trace.
    microbatches: tuple[int, ...] = ()
    tasks: int = MOST_TASKS
    #: Whether limits and hints are tried, which only what varies tells apart.
    methods: bool = True


class Search:
    """The candidates that were tried, and what they take."""

    def __init__(self, method: Method, steps: RebuiltSteps, budget: Budget, ran: Callable[[], object]) -> None:
        self._steps = steps
        self._budget = budget
        self._ran = ran
        self._costs = costs = steps.costs
        layers = steps.layers
        layout = None if layers is None else layers.layout
        #: As the job runs now.
        self.now = Candidate(layout, costs.split, costs.microbatches, method)
        hint = method.hint or default_hint(method.order)
        #: Its order of tasks where it has one of its own, otherwise the default hint's.
        self._method = replace(method, hint=hint, strict=None, limit=method.limit or "n")
        self._known: dict[tuple[Candidate, int], tuple[list[float], float, int]] = {}
        self._tasks = 0
        self.is_interrupted = False
        #: What was not tried, one line each.
        self.left_out: list[str] = []
        #: Layouts, and candidates, that were tried.
        self.layouts: set[ModelLayout] = set()
        self.tried: set[Candidate] = set()
        #: The best first, on the steps that `results` are of.
        self.ranked: list[Candidate] = []
        self.numbers: Sequence[int] = steps.searched
        #: The best with a split backward where nobody has measured weight gradients, on which no plan rests.
        self.guessed: Candidate | None = None
        #: Torch's schedules by name, each on the cut that suits it best.
        self.peers: dict[str, Candidate] = {}

    def run(self) -> None:
        """Try all; after Ctrl-C, rank what is known so far, if anything is."""
        try:
            self.result(self.now, self._steps.searched)
            self._try_layouts()
            self._try_methods()
            self._rank()
            self._find_peers()
            self._judge()
        except KeyboardInterrupt:
            self.is_interrupted = True
            self._rank()
            if not self.ranked:
                raise

    def result(self, candidate: Candidate, numbers: Sequence[int]) -> Result:
        runs = [self._run(candidate, number) for number in numbers]
        brackets = tuple(np.array(column) for column in zip(*(seconds for seconds, _, _ in runs), strict=True))
        mean = np.mean(brackets, axis=0)
        return Result(mean, brackets, max(held for _, held, _ in runs), max(num_bytes for *_, num_bytes in runs))

    def _run(self, candidate: Candidate, number: int) -> tuple[list[float], float, int]:
        if (known := self._known.get((candidate, number))) is not None:
            return known
        seconds, held, num_bytes = [], 0.0, 0
        for part in WEIGHT_PARTS if self._is_guessed(candidate) else (None,):
            step = self._steps.step(candidate.shape(part), number)
            result = candidate.method.run(step.table())
            self._tasks += step.costs.num_tasks
            self._ran()
            per_step = self._costs.microbatches / candidate.microbatches
            seconds.append((result.makespan + step.closing) * per_step)
            chunks = step.costs.chunks
            held = max(held, *(peaks.held / chunks for peaks in result.peaks))
            num_bytes = max(num_bytes, *(peaks.num_bytes for peaks in result.peaks))
        self._known[candidate, number] = (seconds, held, num_bytes)
        self.tried.add(candidate)
        return seconds, held, num_bytes

    def _is_guessed(self, candidate: Candidate) -> bool:
        """Whether its weight gradients are tasks, and not in the trace."""
        return candidate.split and not self._costs.split

    def _mean(self, candidate: Candidate, numbers: Sequence[int] | None = None) -> float:
        return float(self.result(candidate, self._steps.searched if numbers is None else numbers).seconds.mean())

    def _is_over(self, what: str) -> bool:
        """Whether the effort is spent; then ``what`` was left out."""
        if self._tasks < self._budget.tasks:
            return False
        line = f"{what}: {self._budget.tasks} tasks were simulated before (--tasks)"
        if line not in self.left_out:
            self.left_out.append(line)
        return True

    def fits(self, candidate: Candidate) -> bool:
        """Whether it held no more than the budget in any of the searched steps."""
        most = self._budget.num_bytes
        return most is None or self.result(candidate, self._steps.searched).num_bytes <= most

    # Layouts.

    def _try_layouts(self) -> None:
        layers = self._steps.layers
        if layers is None:
            self.left_out.append("cut and placement: layer times are not known (--layers)")
            self._best_layouts: list[ModelLayout | None] = [None]
            return
        best: dict[str, ModelLayout] = {}
        for where in self._placements():
            tried = self._starts(where)
            if self._is_over(f"layouts of {ModelLayout(where, ()).placement}"):
                continue
            best[where.layout if where.chunks > 1 else "one"] = self._climbed(tried)
        if not best:
            self._best_layouts = []
            return
        ordered = sorted(best.values(), key=lambda layout: self._mean(self._base(layout)))
        quickest = self._mean(self._base(ordered[0]))
        near = [each for each in ordered if self._mean(self._base(each)) <= NEAR * quickest]
        for each in ordered:
            if each not in near:
                slower = self._mean(self._base(each)) / quickest - 1
                self.left_out.append(f"limits and hints of {each.placement}: its best cut takes {slower:.0%} longer")
        self._best_layouts = [*near]

    def _placements(self) -> Iterator[Placement]:
        layers, stages = self._steps.layers, self._costs.stages
        assert layers is not None
        yield Placement(stages)
        if stages > 1:
            for layout in ("v", "looped"):
                if 2 * stages <= layers.count:
                    yield Placement(stages, 2, layout)
                else:
                    self.left_out.append(f"2 chunks, {layout}: {layers.count} layers make no {2 * stages} parts")
        own = layers.layout.where
        if own.chunks > 2:
            yield own

    def _starts(self, where: Placement) -> list[ModelLayout]:
        layers, steps = self._steps.layers, self._steps
        assert layers is not None
        own = layers.layout
        is_alike = own.where.chunks == where.chunks and (where.chunks == 1 or own.where.layout == where.layout)
        cuts = [own.cuts] if is_alike else []
        cuts += [layers.even(where), balanced(steps.seconds(), where, steps.slow)]
        cuts.append(balanced(steps.seconds() + steps.spread(), where, steps.slow))
        return [
            own if each == own.cuts and where == own.where else ModelLayout(where, each) for each in dict.fromkeys(cuts)
        ]

    def _base(self, layout: ModelLayout | None) -> Candidate:
        """A layout under the job's method, or the nearest that fits."""
        limit = self._method.limit
        if layout is not None and layout.where.chunks > 1 and limit == "1f1b":
            limit = "n"
        if self._budget.num_bytes is not None:
            limit = Limit(bytes=self._budget.num_bytes)
        return replace(self.now, layout=layout, method=replace(self._method, limit=limit))

    def _climbed(self, starts: Sequence[ModelLayout]) -> ModelLayout:
        """The best of some layouts of one placement, and of neighbours."""
        best = self._race(starts)
        for _ in range(ROUNDS):
            if self._is_over(f"more cuts of {best.placement}"):
                break
            found = self._race([best, *self._neighbours(best)])
            if found == best:
                break
            best = found
        return best

    def _race(self, layouts: Sequence[ModelLayout]) -> ModelLayout:
        self.layouts |= {*layouts}
        first = self._steps.searched[:FIRST_STEPS]
        early = {each: self._mean(self._base(each), first) for each in layouts}
        kept = [each for each in layouts if early[each] <= GIVEN_UP * min(early.values())]
        return min(kept, key=lambda each: self._mean(self._base(each)))

    def _neighbours(self, layout: ModelLayout) -> list[ModelLayout]:
        """The most even of those that are one layer away, also of several cuts together, and were not tried."""
        layers, steps = self._steps.layers, self._steps
        assert layers is not None
        sums = np.concatenate([[0.0], np.cumsum(steps.seconds())])
        where, slow = layout.where, np.array(steps.slow)

        def rating(each: ModelLayout) -> tuple[float, float]:
            work = np.zeros(where.stages)
            for v, part in enumerate(each.pieces(layers.count)):
                work[where.stage_of(v)] += sums[part.stop] - sums[part.start]
            work *= slow
            return float(work.max()), float((work**2).sum())

        found = set()
        for start in range(len(layout.cuts)):
            for stop in range(start + 1, len(layout.cuts) + 1):
                for by in (-1, 1):
                    cuts = [cut + by * (start <= n < stop) for n, cut in enumerate(layout.cuts)]
                    if all(a < b for a, b in pairwise((0, *cuts, layers.count))):
                        found.add(ModelLayout(where, tuple(cuts)))
        return sorted(found - self.layouts, key=lambda each: (rating(each), each.cuts))[:NEIGHBOURS]

    # Methods.

    def _try_methods(self) -> None:
        if not self._budget.methods:
            self.left_out.append("limits and hints: nothing varies by which they differ; plan again from a trace")
        elif self._budget.num_bytes is None:
            self.left_out.append("limits above 2n but auto: no budget in bytes a stage is given (--memory)")
        if not self._budget.microbatches:
            self.left_out.append("other numbers of microbatches: they change the batch (--microbatches)")
        if self._steps.recomputed is None:
            self.left_out.append(
                "recomputation by stage: it is not measured; a trace of the job with it says (--recomputed)"
            )
        methods = (self._with_limits, self._with_recompute, self._with_hints) if self._budget.methods else ()
        for layout in self._best_layouts:
            best = self._base(layout)
            for more in (*methods, self._with_split, self._with_microbatches):
                if self._is_over(f"limits, hints and split of {'the layout' if layout is None else layout.placement}"):
                    return
                found = [each for each in (best, *more(best)) if self.fits(each)]
                times = {each: self._mean(each) for each in found}
                best = min((each for each in found if not self._is_guessed(each)), key=times.__getitem__, default=best)

    def _with_limits(self, base: Candidate) -> Iterator[Candidate]:
        chunks = self._costs.chunks if base.layout is None else base.layout.where.chunks
        num_bytes = self._budget.num_bytes
        for name in ("n", "2n", "auto") if chunks > 1 else ("1f1b", "n", "2n", "auto"):
            limit: Limit | str = name
            if num_bytes is not None:
                if name == "1f1b":
                    continue
                limit = replace(Limit.resolve(name, 0, self._costs.stages), bytes=num_bytes)
            yield replace(base, method=replace(base.method, limit=limit))

    def _with_recompute(self, base: Candidate) -> Iterator[Candidate]:
        """Ever more stages, first those that would hold the most bytes in 1F1B."""
        stages = self._steps.may_recompute(base.layout)
        if not stages:
            return
        costs = self._steps.step(base.shape(None), 0).costs
        assert costs.held is not None
        means = costs.held.mean(axis=1)
        wanted = {s: (costs.stages - s) * sum(means[list(costs.virtual_stages_of(s))]) for s in stages}
        ordered = sorted(stages, key=wanted.__getitem__, reverse=True)
        for count in range(1, len(ordered) + 1):
            yield replace(base, recompute=tuple(sorted(ordered[:count])))

    def _with_hints(self, base: Candidate) -> Iterator[Candidate]:
        tried = (hint for hint in (DEFAULT_HINT, *HINTS) if self._has(hint, base))
        return (replace(base, method=replace(base.method, hint=hint)) for hint in tried)

    def _has(self, hint: HintSpec, base: Candidate) -> bool:
        try:
            check_order(hint, base.method.order)
        except ConfigError:
            return False
        return hint != "bfw" or base.split

    def _with_split(self, base: Candidate) -> Iterator[Candidate]:
        other = replace(base, split=not base.split)
        if base.recompute and self._is_guessed(other):  # what is guessed of backward is no part of the forward in it
            return
        if other.split or base.method.hint != "bfw":
            yield other
        if other.split and self._has("bfw", other):
            yield replace(other, method=replace(other.method, hint="bfw"))

    def _with_microbatches(self, base: Candidate) -> Iterator[Candidate]:
        return (replace(base, microbatches=count) for count in self._budget.microbatches)

    # The best, and the others beside them.

    def _rank(self) -> None:
        """Those that ran all searched steps and fit, the best first."""
        whole = [
            each
            for each in self.tried
            if each.method.hint is not None
            and all((each, number) in self._known for number in self._steps.searched)
            and self.fits(each)
        ]
        ordered = sorted(whole, key=lambda each: self._order(each, self._steps.searched))
        self.ranked = [each for each in ordered if not self._is_guessed(each)]
        self.guessed = next((each for each in ordered if self._is_guessed(each)), None)
        self.numbers = self._steps.searched

    def _order(self, candidate: Candidate, numbers: Sequence[int]) -> tuple[float, bool, str]:
        """By time; of equals the one with the job's own hint."""
        return self._mean(candidate, numbers), candidate.method.hint != self._method.hint, str(candidate)

    def _find_peers(self) -> None:
        """Torch's fixed orders: 1F1B on the cut as it is and on the best one, ZBV on the best V."""
        own = self._costs
        one = [each for each in self._layouts_of(1) if own.chunks == 1 or each is not None]
        found = [self._strict("1f1b", each, split=False) for each in one]
        if found:
            self.peers["torch's 1F1B"] = min(found, key=self._mean)
        else:
            self.left_out.append("torch's 1F1B: the trace has several chunks a stage, and layer times are not known")
        is_v = own.placement == "v" and own.chunks == 2
        v = [each for each in self._layouts_of(2, "v") if is_v or each is not None]
        if v:
            self.peers["torch's ZBV"] = min((self._strict("zb-v", each, split=True) for each in v), key=self._mean)
        else:
            self.left_out.append("torch's ZBV: it needs layer times and two chunks a stage")

    def _layouts_of(self, chunks: int, layout: str = "looped") -> list[ModelLayout | None]:
        """The recorded one and the best of a placement, where they are of it."""
        if self._steps.layers is None:
            return [None]
        fit = [
            each
            for each in self.layouts
            if each.where.chunks == chunks
            and (chunks == 1 or each.where.layout == layout)
            and all((self._base(each), number) in self._known for number in self._steps.searched)
        ]
        best = min(fit, key=lambda each: (self._mean(self._base(each)), each.cuts), default=None)
        recorded = self.now.layout
        own = [recorded] if recorded in fit else []
        return [*dict.fromkeys([*own, *([] if best is None else [best])])]

    def _strict(self, name: str, layout: ModelLayout | None, *, split: bool) -> Candidate:
        return Candidate(layout, split, self._costs.microbatches, Method(None, None, name))

    def _judge(self) -> None:
        """The best ones on other steps, and ranked by these."""
        chosen: list[Candidate] = []
        for each in self.ranked:
            alike = sum(other.layout == each.layout and other.split == each.split for other in chosen)
            if self._steps.layers is None or alike < ROWS_OF_LAYOUT:
                chosen.append(each)
        chosen = chosen[:ROWS]
        for each in (self.now, *self.peers.values(), *([] if self.guessed is None else [self.guessed]), *chosen):
            self.result(each, self._steps.judged)
        self.ranked = sorted(chosen, key=lambda each: self._order(each, self._steps.judged))
        self.numbers = self._steps.judged
