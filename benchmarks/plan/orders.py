"""What an order of microbatches that is searched ahead of a step would gain over the order that the default hint makes.

Split backward, one chunk, 4 N microbatches, messages that take no time. Before a step its times are predicted:

- exact: without jitter they are known;
- 20% off: each stage's time for a microbatch is off by a factor of its own, log-normal, and its bytes are known;
- by sizes: a microbatch takes, and holds, what is usual on a stage for its size, the one number that a step is given.

On these times the engine tries 100 orders under the default hint: the hint's own, the caller's, a pyramid, then changes
of the best so far at random (two change places, one moves, a run is reversed), kept where they are no slower. The best
one, on all ranks, then runs on the true times, without jitter (J0) and with jitter drawn anew, beside the order that
the hint makes by itself: percent less makespan. "3 tried": the best of the first three.

Limits: 1f1b (N - s on stage s), n, 2n; and bytes, on each stage what `bfw` holds there within 1f1b or n.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import fmean, median, stdev
from typing import Any, Literal, get_args

import numpy as np
from rich.console import Console

from benchmarks.shared.figures import table_of
from rrfp.core.hint import View
from rrfp.costs import JITTER_LEVELS, CostTable, make_costs, microbatch_sizes
from rrfp.engine.engine import run
from rrfp.engine.record import EngineResult
from rrfp.hints.pyramid import LENGTH_PER_STAGE, Pyramids, pyramids
from rrfp.hints.registry import create_hint
from rrfp.hints.slot_aware import SlotAware
from rrfp.lab.generators.jitter import with_jitter
from rrfp.lab.simulation import sizes_known
from rrfp.memory.admission import Limit

#: How well times are predicted.
Knowledge = Literal["exact", "20% off", "by sizes"]
KNOWLEDGE: tuple[Knowledge, ...] = get_args(Knowledge)

#: Orders that are tried; those of them that are no change of another.
EVALUATIONS, FIRST = 100, 3

#: The deviation of times that are off.
ERROR = 0.2

#: Of the workloads; microbatches a stage; draws of each level of jitter.
FIRST_SEED, PER_STAGE, JITTER_DRAWS = 2000, 4, 2

#: Bytes are whole numbers, so that a limit would be missed by one.
SLACK = 1.001

COUNTS, IN_BYTES = ("1f1b", "n", "2n"), ("1f1b", "n")
TRIED = ("3 tried", "all")


@dataclass(frozen=True, slots=True)
class Case:
    """A step whose order is searched.

    Attributes:
        profile: of the workload.
        stages: N.
        draw: its number.
        knowledge: how well its times are predicted.
        evaluations: orders that are tried.
    """

    profile: str
    stages: int
    draw: int
    knowledge: Knowledge
    evaluations: int


@dataclass(frozen=True, slots=True)
class Found:
    """What the searched orders of a step gain.

    Attributes:
        case: the step.
        gains: by limit, orders tried and level of jitter, percent less makespan; a mean over draws of jitter.
        seconds: processor time of one search.
        step: seconds that the step takes by the default order, within n.
    """

    case: Case
    gains: dict[str, dict[str, dict[str, float]]]
    seconds: float
    step: float

    def realised(self, limit: str, tried: str = TRIED[-1]) -> float:
        """The mean over levels of jitter but J0."""
        return fmean(gain for level, gain in self.gains[limit][tried].items() if level != "J0")


class Ordered(Pyramids):
    """The default hint in a given order, or in its own, which is kept."""

    def __init__(self, order: Sequence[int] | None = None) -> None:
        super().__init__(SlotAware())
        self._given = order
        self.order = order

    def microbatch_order(self, view: View) -> Sequence[int] | None:
        """The order of a step."""
        self.order = super().microbatch_order(view) if self._given is None else self._given
        return self.order


class _Steps:
    """Runs under one limit."""

    def __init__(self, limits: Sequence[Limit], known: Mapping[str, Any]) -> None:
        self._limits = limits
        self._known = known

    def seconds(self, costs: CostTable, order: Sequence[int] | None) -> float:
        """The makespan in an order; None: the hint's own."""
        return run(costs, [Ordered(order) for _ in self._limits], self._limits, **self._known).makespan

    def own_order(self, costs: CostTable) -> list[int]:
        """The order that the hint makes."""
        hints = [Ordered() for _ in self._limits]
        run(costs, hints, self._limits, **self._known)
        return [*range(costs.microbatches)] if hints[0].order is None else [*hints[0].order]


def searched(case: Case) -> Found:
    """Search an order under each limit, and run it."""
    shape = case.profile, case.stages, PER_STAGE * case.stages
    seed = FIRST_SEED + case.draw
    true = make_costs(*shape, split=True, seed=seed, sized=True)
    true = replace(true, sizes=microbatch_sizes(*shape, seed=seed))
    random = np.random.default_rng([seed, case.stages])
    predicted = _predicted(true, case.knowledge, random)
    gains: dict[str, dict[str, dict[str, float]]] = {}
    taken: list[float] = []
    step = 0.0
    for name, limits in _limits(true).items():
        steps = _Steps(limits, sizes_known(true, limits))
        own, began = steps.own_order(true), time.process_time()
        orders = _best(partial(steps.seconds, predicted), own, true, case.evaluations, random)
        taken.append(time.process_time() - began)
        gains[name] = {tried: {} for tried in TRIED}
        for level in JITTER_LEVELS:
            draws = range(1 if level == "J0" else JITTER_DRAWS)
            tables = [with_jitter(true, level, seed=seed, step=draw) for draw in draws]
            usual = [steps.seconds(table, own) for table in tables]
            for tried, order in zip(TRIED, orders, strict=True):
                ours = [steps.seconds(table, order) for table in tables]
                gains[name][tried][level] = fmean(100 * (1 - a / b) for a, b in zip(ours, usual, strict=True))
            step = usual[0] if (name, level) == ("n", "J0") else step
    return Found(case, gains, fmean(taken), step)


def _predicted(true: CostTable, knowledge: Knowledge, random: np.random.Generator) -> CostTable:
    assert true.weight is not None
    assert true.held is not None
    rows = {"forward": true.forward, "backward": true.backward, "weight": true.weight}
    if knowledge == "exact":
        return true
    if knowledge == "20% off":
        factors = np.exp(ERROR * random.standard_normal(true.forward.shape))
        times: Any = {name: own * factors for name, own in rows.items()}
    else:
        sizes = np.array(true.sizes)
        part = sizes / sizes.mean()
        times = {name: own.mean(axis=1, keepdims=True) * part for name, own in {**rows, "held": true.held}.items()}
    return replace(true, **times)


def _limits(costs: CostTable) -> dict[str, list[Limit]]:
    stages = costs.stages
    found = {count: [Limit.resolve(count, stage, stages) for stage in range(stages)] for count in COUNTS}
    for count in IN_BYTES:
        held: EngineResult = run(costs, [create_hint("bfw") for _ in range(stages)], found[count], sizes=costs.sizes)
        found[f"bytes of {count}"] = [Limit(bytes=int(peaks.num_bytes * SLACK)) for peaks in held.peaks]
    return found


def _best(
    seconds: Callable[[Sequence[int]], float],
    own: Sequence[int],
    costs: CostTable,
    evaluations: int,
    random: np.random.Generator,
) -> tuple[Sequence[int], Sequence[int]]:
    """The best of the first orders, and the best of all."""
    assert costs.sizes is not None
    starts = [
        tuple(own),
        tuple(range(costs.microbatches)),
        tuple(pyramids(costs.sizes, LENGTH_PER_STAGE * costs.stages)),
    ]
    known = {order: seconds(order) for order in dict.fromkeys(starts)}
    first = best = here = min(known, key=known.__getitem__)
    least = known[first]
    for _ in range(evaluations - FIRST):
        order = _changed(here, random)
        taken = seconds(order)
        if taken <= least:
            here = order
        if taken < least:
            best, least = order, taken
    return first, best


def _changed(order: Sequence[int], random: np.random.Generator) -> tuple[int, ...]:
    """Two change places, one moves, or a run is reversed."""
    changed = [*order]
    first, second = sorted(random.choice(len(order), 2, replace=False).tolist())
    match int(random.integers(3)):
        case 0:
            changed[first], changed[second] = changed[second], changed[first]
        case 1:
            changed.insert(first, changed.pop(second))
        case _:
            changed[first : second + 1] = changed[first : second + 1][::-1]
    return tuple(changed)


def print_orders(found: Sequence[Found]) -> None:
    """For people."""
    knowledge = [*dict.fromkeys(one.case.knowledge for one in found)]
    heads = "limit", "times known", "orders", *JITTER_LEVELS, "J1 to J3", "steps that lose > 1%"
    table = table_of("percent less makespan", *heads)
    for limit, known, tried in product(found[0].gains, knowledge, TRIED):
        own = [one for one in found if one.case.knowledge == known]
        levels = (f"{fmean(one.gains[limit][tried][level] for one in own):.1f}" for level in JITTER_LEVELS)
        realised = [one.realised(limit, tried) for one in own]
        around = f" ± {1.96 * stdev(realised) / len(realised) ** 0.5:.1f}" if len(realised) > 1 else ""
        losing = sum(gain < -1 for gain in realised) / len(realised)
        table.add_row(limit, known, tried, *levels, f"{fmean(realised):.1f}{around}", f"{losing:.0%}")
    console = Console(width=max(Console().width, 140))
    console.print(table)
    for known in knowledge:
        table = table_of(f"J1 to J3 by profile, times known: {known}", "profile", *found[0].gains)
        for profile in dict.fromkeys(one.case.profile for one in found):
            own = [one for one in found if (one.case.profile, one.case.knowledge) == (profile, known)]
            table.add_row(profile, *(f"{fmean(one.realised(limit) for one in own):.1f}" for limit in found[0].gains))
        console.print(table)
    for stages in dict.fromkeys(one.case.stages for one in found):
        own = [one for one in found if one.case.stages == stages]
        searching, step = median(one.seconds for one in own), median(one.step for one in own)
        print(f"PP {stages}: a search took {searching:.1f} s of one core, a step {step:.1f} s")
