"""Hints, latencies and short forms for the tests of tensor-parallel groups."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import strategies as st

from rrfp import Hint, View
from rrfp.core.events import Arrived, Event
from rrfp.core.ready_set import ReadySet
from rrfp.costs import CostTable
from rrfp.hints.registry import create_hint
from rrfp.lab.generators.latency import RankLatencies
from rrfp.memory.admission import Limit
from rrfp.model.tasks import Kind, Task

PURE = ("bf", "fb", "b-priority", "f-priority", "bfw")


class FirstCome(Hint):
    """First come, first served: not a function of the ready set, since ranks see messages come in different orders."""

    def __init__(self) -> None:
        self._place: dict[tuple[Kind, int], int] = {}

    def open_step(self, view: View) -> None:
        self._place.clear()

    def observe(self, event: Event) -> None:
        if isinstance(event, Arrived):
            self._place.setdefault((event.task.kind, event.task.microbatch), len(self._place))

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        return min(ready, key=lambda task: self._place.get((task.kind, task.microbatch), -1))


class AnyReady(Hint):
    """Takes any ready task, by a generator of its own."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        return self._random.choice(list(ready))


class Downstream(Hint):
    """Feeds a successor that has used all it was sent: ranks hear of that at different times, and all in the end."""

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        is_hungry = view.consumed_downstream == view.num_enqueued(Kind.F)
        first, second = (Kind.F, Kind.B) if is_hungry else (Kind.B, Kind.F)
        return ready.first(first) or ready.first(second) or ready.first(Kind.W)


def makers(names: Sequence[str]) -> st.SearchStrategy[Callable[[], Hint]]:
    """Something that makes fresh hints, by name."""
    return st.sampled_from(names).map(lambda name: lambda: create_hint(name))


def settled_makers() -> st.SearchStrategy[Callable[[], Hint]]:
    """Hints whose picks are equal on all ranks once everything has arrived."""
    return st.one_of(makers(PURE), st.just(Downstream))


def any_makers() -> st.SearchStrategy[Callable[[], Hint]]:
    """Hints that depend on the order of arrivals or on chance included."""
    return st.one_of(settled_makers(), st.sampled_from([FirstCome, lambda: AnyReady(7)]))


@st.composite
def limits_of(draw: st.DrawFn, costs: CostTable) -> list[Limit]:
    """One limit for all stages, or one for each."""
    spec = draw(st.sampled_from(["1f1b", "2n", None, 1, 2]))
    return [Limit.resolve(spec, stage, costs.stages) for stage in range(costs.stages)]


@st.composite
def latencies_of(draw: st.DrawFn, costs: CostTable, *, least: int = 1, most: int = 4) -> RankLatencies:
    """Latencies of their own for each rank, full of ties or arbitrary."""
    ranks = draw(st.integers(least, most))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (*costs.latency_forward.shape, ranks)
    if draw(st.booleans()):
        return RankLatencies(random.choice([0.0, 1.0, 3.0], shape), random.choice([0.0, 1.0, 3.0], shape))
    return RankLatencies(random.exponential(2e-2, shape), random.exponential(2e-2, shape))


def latencies(
    forward: Sequence[Sequence[Sequence[float]]], backward: Sequence[Sequence[Sequence[float]]]
) -> RankLatencies:
    """Written out: edges, microbatches, ranks."""
    return RankLatencies(np.array(forward, dtype=float), np.array(backward, dtype=float))
