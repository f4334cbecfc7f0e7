"""``limit="auto"`` in simulation: the lemma on random chains, and every mix of old and new limits, explored."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from batches import examples
from hypothesis import given
from hypothesis import strategies as st

from rrfp.costs import CostTable
from rrfp.engine.engine import run
from rrfp.errors import ConfigError
from rrfp.hints.registry import create_hint
from rrfp.lab.explore.cases import bounds_of
from rrfp.lab.explore.search import explore
from rrfp.lab.simulation import resolve_limits, simulate
from rrfp.memory.admission import Limit
from rrfp.memory.round_trips import NEGLIGIBLE, Pace, RoundTripRule
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Placement, TablePlacement
from rrfp.model.tasks import Kind, Mode


def chain(forward: float, backward: float, there: list[int], back: list[int], microbatches: int) -> CostTable:
    """Equal stages, whole backwards, times that floats add exactly."""

    def rows(values: list[float] | list[int]) -> np.ndarray:
        return np.repeat(np.array(values, dtype=float).reshape(-1, 1), microbatches, axis=1)

    stages = len(there) + 1
    times = [forward] * stages, [backward] * stages
    return CostTable(stages, 1, "looped", microbatches, rows(times[0]), rows(times[1]), None, rows(there), rows(back))


@st.composite
def chains(draw: st.DrawFn) -> CostTable:
    forward, backward = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    period = forward + backward
    links = draw(st.integers(0, 7))
    one_way = st.just(0) | st.integers(period, 4 * period)  # less than a twentieth of a period is neglected
    there, back = (draw(st.lists(one_way, min_size=links, max_size=links)) for _ in range(2))
    return chain(forward, backward, there, back, draw(st.integers(1, 4 * (links + 1))))


@given(costs=chains(), hint=st.sampled_from(["bf", "slot-aware", "slot-aware-pyramid", "f-priority", "b-priority"]))
@examples(160)
def test_on_equal_stages_a_slow_link_costs_one_round_trip_a_step(costs: CostTable, hint: str) -> None:
    period = float(costs.forward[0, 0] + costs.backward[0, 0])
    trips = float(costs.latency_forward[:, 0].sum() + costs.latency_backward[:, 0].sum())
    least = (costs.microbatches + costs.stages - 1) * period + trips  # of any order: the last stage starts and ends so
    assert simulate(costs, hint=hint, limit="auto").makespan == least


def test_without_latency_and_spread_the_limits_are_those_of_1f1b() -> None:
    costs = chain(9, 16, [0] * 3, [0] * 3, 8)
    assert resolve_limits(costs, "auto") == resolve_limits(costs, "1f1b")


def test_the_slots_of_the_rule_are_needed() -> None:
    """One slot less on the stages before the link, and the step is longer than the lemma's."""
    costs = chain(9, 16, [0, 60, 0], [0, 60, 0], 16)
    counts = [limit.microbatches or 0 for limit in resolve_limits(costs, "auto")]
    assert counts == [9, 8, 2, 1]
    fewer = [Limit(9), Limit(7), Limit(2), Limit(1)]
    slower = run(costs, [create_hint("bf") for _ in fewer], fewer)
    assert slower.makespan > simulate(costs, hint="bf", limit="auto").makespan


def test_the_simulator_refuses_what_the_rule_does_not_know() -> None:
    graph = TaskGraph(TablePlacement((0, 1, 1)))
    ones = np.ones((3, 4))
    costs = CostTable.of_graph(
        graph, 4, forward=ones, backward=ones, latency_forward=ones[1:], latency_backward=ones[1:]
    )
    with pytest.raises(ConfigError, match="limit is 'auto' on a graph or a placement"):
        simulate(costs, hint="bf", limit="auto")


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(("split", "in_order"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("mode", Mode)
def test_ranks_that_take_a_new_limit_one_step_apart_never_deadlock(
    chunks: int, split: bool, in_order: bool, mode: Mode
) -> None:
    """Old limits on some stages, new ones on the others, in every way; of every edge that becomes slow."""
    stages, microbatches = (3, 4) if chunks == 1 else (2, 3)
    graph = TaskGraph.chain(stages, chunks=chunks, split=split)
    forced = [(Kind.B, v) for v in range(stages * chunks)] if in_order and mode is Mode.TRAIN else []
    rule = RoundTripRule(graph)
    placement = Placement(stages, chunks, "looped")
    for edge in ((stage, stage + 1) for stage in range(stages - 1)):
        slow = rule.limits(Pace(1.0, 0.0, {edge: 1 - NEGLIGIBLE}))
        for mixed in product(*({*pair} for pair in zip(rule.base, slow, strict=True))):
            found = explore(graph, microbatches, mode=mode, limits=mixed, in_order=forced)
            assert not found.deadlocks, (mixed, str(found.deadlocks[0]))
            bounds = bounds_of(placement, mixed, mode, "staircase")
            assert all(held <= most for held, most in zip(found.peak_held, bounds.held, strict=True)), mixed
