"""Recorded steps on the engine, with the method that ran them or with another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rrfp.core.ready_set import MicrobatchOrder, forced_by
from rrfp.costs.table import MATRICES, CostTable, Matrix
from rrfp.engine.engine import graph_of, run
from rrfp.engine.record import EngineResult
from rrfp.hints.registry import HintSpec, create_hint, create_strict
from rrfp.lab.advice.recorded import RecordedStep
from rrfp.lab.simulation import resolve_limits, sizes_known
from rrfp.memory.admission import Limit
from rrfp.plugins import name_of
from rrfp.schedules.registry import ScheduleSpec

#: How many times steps are drawn for an interval, and the part of the draws that it leaves out at each end.
DRAWS, TAIL = 2000, 0.05


@dataclass(frozen=True, slots=True)
class Method:
    """How a step is ordered: by a hint under a limit, or strictly."""

    hint: HintSpec | None
    limit: Limit | int | str | None = None
    strict: ScheduleSpec | None = None
    order: MicrobatchOrder = "free"
    takes_offers: bool = False

    def __str__(self) -> str:
        if self.hint is None:
            return f"strict {self.strict}"
        return f"{hint_text(self.hint)}, limit {limit_text(self.limit)}"

    def run(self, costs: CostTable) -> EngineResult:
        if self.hint is None:
            hints, limits = [create_strict(self.strict or "") for _ in range(costs.stages)], [Limit()] * costs.stages
        else:
            hints = [create_hint(self.hint) for _ in range(costs.stages)]
            limits = [Limit()] * costs.stages if self.limit is None else resolve_limits(costs, self.limit)
        return run(
            costs,
            hints,
            limits,
            **sizes_known(costs, limits),
            in_order=forced_by(self.order, graph_of(costs)),
            takes_offers=self.takes_offers,
        )


def hint_text(hint: HintSpec) -> str:
    return f"hint {hint if isinstance(hint, str) else getattr(hint, 'text', None) or name_of(hint)}"


def limit_text(limit: Limit | int | str | None) -> str:
    """A limit as `rrfp.Pipeline` takes it, or in words."""
    if not isinstance(limit, Limit):
        return "none" if limit is None else str(limit)
    parts = [str(limit.microbatches)] if limit.microbatches is not None else []
    parts += [f"{limit.bytes}B"] if limit.bytes is not None else []
    parts += ["auto"] if limit.auto else []
    return " and ".join(parts) or "none"


@dataclass(frozen=True, slots=True)
class Interval:
    """A part of the step, and where it lies in nine of ten draws of the steps."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """In percent, with the larger side of the interval."""
        around = max(self.high - self.value, self.value - self.low)
        return f"{100 * self.value:.1f} +- {100 * around:.1f}%"


@dataclass(frozen=True, slots=True, eq=False)
class Replays:
    """Each recorded step under some change, in seconds."""

    seconds: Matrix
    #: The most chunk tasks that a stage held in any of them.
    held: int

    def saved(self, base: Matrix) -> Interval:
        drawn = np.random.default_rng(0).integers(len(base), size=(DRAWS, len(base)))
        parts = 1 - self.seconds[drawn].sum(axis=1) / base[drawn].sum(axis=1)
        low, high = np.quantile(parts, [TAIL, 1 - TAIL])
        return Interval(float(1 - self.seconds.sum() / base.sum()), float(low), float(high))


@dataclass(frozen=True, slots=True)
class Replayer:
    """Replays steps, and counts the runs."""

    steps: Sequence[RecordedStep]
    #: Called after each run.
    ran: Callable[[], object]

    def __call__(self, method: Method, steps: Sequence[RecordedStep] | None = None) -> Replays:
        """The steps, or changed ones in their place, under a method."""
        return self.each([method] * len(self.steps), self.steps if steps is None else steps)

    def each(self, methods: Sequence[Method], steps: Sequence[RecordedStep]) -> Replays:
        seconds, held = [], 0
        for method, step in zip(methods, steps, strict=True):
            result = method.run(step.table())
            self.ran()
            seconds.append(result.makespan + step.closing)
            held = max(held, *(peaks.held for peaks in result.peaks))
        return Replays(np.array(seconds), held)


def joined(first: RecordedStep, second: RecordedStep) -> RecordedStep:
    a, b = first.costs, second.costs
    fields: dict[str, Any] = {"microbatches": a.microbatches + b.microbatches, "sizes": None}
    for name in MATRICES.values():
        ours, theirs = getattr(a, name), getattr(b, name)
        is_in_both = ours is not None and theirs is not None
        fields[name] = np.concatenate([ours, theirs], axis=1) if is_in_both else None
    if a.sizes is not None and b.sizes is not None:
        fields["sizes"] = (*a.sizes, *b.sizes)
    if a.skipped or b.skipped:
        fields["skipped"] = tuple(each.visits.skipped_by(m) for each in (a, b) for m in range(each.microbatches))
    dispatch, order = (
        {kind: np.concatenate([rows, later[kind]], axis=1) for kind, rows in earlier.items()}
        for earlier, later in ((first.dispatch, second.dispatch), (first.order, second.order))
    )
    seconds = first.seconds + second.seconds
    return RecordedStep(replace(a, **fields), dispatch, order, first.opening, second.closing, seconds)
