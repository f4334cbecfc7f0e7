"""The lower bound: never above the best of all schedules, and tight where it can be."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from batches import examples, long
from hypothesis import given
from hypothesis import strategies as st
from sim.optimum import Pipeline
from sim.tables import table

from rrfp.costs import CostTable, make_costs
from rrfp.engine.bound import _one_machine, _Tasks, lower_bound
from rrfp.errors import ConfigError
from rrfp.model.placement import Layout


def assert_valid(costs: CostTable, limits: Sequence[int] | None) -> None:
    optimum = Pipeline(costs, limits).optimum()
    assert lower_bound(costs, limits) <= optimum * (1 + 1e-12)


@st.composite
def tiny_costs(draw: st.DrawFn, shapes: Sequence[tuple[int, int, int]], split: bool) -> CostTable:
    stages, chunks, microbatches = draw(st.sampled_from(shapes))
    count = stages * chunks

    def rows(number: int) -> np.ndarray:
        row = st.lists(st.integers(0, 4), min_size=microbatches, max_size=microbatches)
        cells = draw(st.lists(row, min_size=number, max_size=number))
        return np.array(cells, dtype=float).reshape(number, microbatches)

    placement: Layout = draw(st.sampled_from(["looped", "v"]))
    weight = rows(count) if split else None
    forward, backward, there, back = rows(count), rows(count), rows(count - 1), rows(count - 1)
    return CostTable(stages, chunks, placement, microbatches, forward, backward, weight, there, back)


def draw_limits(data: st.DataObject, costs: CostTable) -> list[int] | None:
    limit = st.integers(1, costs.microbatches)
    return data.draw(st.none() | st.lists(limit, min_size=costs.stages, max_size=costs.stages))


SMALL = [(1, 1, 3), (2, 1, 2), (2, 1, 3), (3, 1, 2)]
CHUNKED = [(1, 2, 2), (2, 2, 1), (2, 2, 2), (1, 3, 2)]


@examples(300)
@given(st.data())
def test_never_above_the_optimum(data: st.DataObject) -> None:
    costs = data.draw(tiny_costs(SMALL, split=False))
    assert_valid(costs, draw_limits(data, costs))


@examples(60)
@given(st.data())
def test_never_above_the_optimum_of_three_stages_and_microbatches(data: st.DataObject) -> None:
    costs = data.draw(tiny_costs([(3, 1, 3)], split=False))
    assert_valid(costs, draw_limits(data, costs))


@examples(200)
@given(st.data())
def test_never_above_the_optimum_when_split(data: st.DataObject) -> None:
    costs = data.draw(tiny_costs([(1, 1, 3), (2, 1, 2), (3, 1, 2)], split=True))
    assert_valid(costs, draw_limits(data, costs))


@examples(200)
@given(st.data())
def test_never_above_the_optimum_with_chunks(data: st.DataObject) -> None:
    costs = data.draw(tiny_costs(CHUNKED, split=False))
    assert_valid(costs, draw_limits(data, costs))


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("placement", ["looped", "v"])
@pytest.mark.parametrize("split", [False, True])
def test_never_above_a_random_run(chunks: int, placement: Layout, split: bool) -> None:
    choose = random.Random(chunks)
    for seed in range(6):
        costs = make_costs(
            "mllm", 3, 5, chunks=chunks, placement=placement, split=split, seed=seed, jitter="J2", latency="spike"
        )
        for limits in (None, [3, 2, 1], [1, 2, 3], [2, 2, 2]):
            if chunks == 2 and limits is not None:
                limits = [2 * limit for limit in limits]  # roomy enough that random runs rarely jam
            bound = lower_bound(costs, limits)
            for _ in range(5):
                assert bound <= Pipeline(costs, limits).some_makespan(choose) * (1 + 1e-12)


@examples(200)
@given(st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=12))
def test_jackson_equals_the_best_subset(jobs: list[tuple[int, int, int]]) -> None:
    """Head + work + tail of a set, maximised over the sets {r >= a, q >= b}: among these is always a largest one."""
    r, p, q = np.array(jobs, dtype=float).T
    tasks = _Tasks(p.reshape(1, -1), r.reshape(1, -1), q.reshape(1, -1))
    sets = [(r >= a) & (q >= b) for a in r for b in q]
    best = max(r[chosen].min() + p[chosen].sum() + q[chosen].min() for chosen in sets if chosen.any())
    assert _one_machine([tasks]) == best


# Cases worked out by hand, where the bound is the optimum.


def test_one_microbatch_takes_its_longest_path() -> None:
    costs = table([[1], [2], [4]], [[8], [16], [32]], latency=0.5)
    assert lower_bound(costs, None) == 1 + 2 + 4 + 8 + 16 + 32 + 4 * 0.5
    split = table([[1], [1]], [[1], [1]], [[1], [10]])
    assert lower_bound(split, [1, 1]) == 1 + 1 + 1 + 10  # the last W outlasts B and W before it


def test_one_stage_takes_its_work() -> None:
    costs = table([[1, 2, 3]], [[4, 5, 6]], [[7, 8, 9]])
    assert lower_bound(costs, None) == lower_bound(costs, [1]) == 45


def test_uniform_pipeline_is_work_of_the_last_stage_between_its_head_and_tail() -> None:
    """1F1B reaches (M + N - 1)(f + b) with K = N - i; the memory of its own does not change the bound."""
    costs = table([[1.0] * 8] * 4, [[2.0] * 8] * 4)
    assert lower_bound(costs, None) == lower_bound(costs, [4, 3, 2, 1]) == (8 + 3) * 3


def test_one_microbatch_at_a_time_is_the_sum_of_their_paths() -> None:
    costs = table([[1, 2, 3], [1, 1, 1]], [[2, 2, 2], [1, 5, 1]], latency=0.25)
    paths = [1 + 1 + 1 + 2, 2 + 1 + 5 + 2, 3 + 1 + 1 + 2]
    assert lower_bound(costs, [1, 3]) == sum(paths) + 3 * 0.5


@pytest.mark.parametrize("weight", [None, [[0.0] * 3] * 3])
def test_memory_of_an_inner_stage_adds_what_lies_before_and_after(weight: list[list[float]] | None) -> None:
    """When split, the time left is counted from the end of B: W of no work ends the slot, but not the step."""
    costs = table([[1] * 3, [1] * 3, [10] * 3], [[10] * 3, [1] * 3, [1] * 3], weight)
    assert lower_bound(costs, [3, 1, 1]) == 1 + 3 * (1 + 10 + 1 + 1) + 10
    if weight is None:
        assert Pipeline(costs, [3, 1, 1]).optimum() == 50


def test_tails_include_the_longest_w_still_to_come() -> None:
    costs = table([[1, 1], [10, 10]], [[1, 1], [10, 10]], [[10, 10], [0, 0]])
    assert lower_bound(costs, None) == 1 + 4 * 10 + 1 + 10
    assert Pipeline(costs, None).optimum() == 52


def test_a_pending_w_keeps_its_slot() -> None:
    costs = table([[1, 1]], [[1, 1]], [[5, 5]])
    assert lower_bound(costs, [1]) == 14
    two = table([[1, 1], [1, 1]], [[1, 1], [1, 1]], [[5, 5], [0, 0]])
    assert lower_bound(two, [1, 2]) == 2 * (1 + 1 + 1 + 1 + 5)


@pytest.mark.parametrize("forward", [0.0, 1.0])
def test_slots_are_filled_or_emptied_one_after_another(forward: float) -> None:
    """Two slots: the second is idle for the first F, or mirrored, one is idle for the last B. 0-9-18 and 1-10-18."""
    rows, nothing = np.full((2, 4), forward), np.full((2, 4), 1 - forward)
    rows[1] = nothing[1] = 0
    there, back = np.full((1, 4), 4.0), np.array([[4.0, 4.0, 4.0, 3.0]])
    costs = CostTable(2, 1, "looped", 4, rows, nothing, None, there, back)
    assert lower_bound(costs, [2, 4]) == 18
    assert Pipeline(costs, [2, 4]).optimum() == 18


def test_chunks_share_slots_and_same_stage_handover_is_free() -> None:
    rows = [[1.0]] * 4
    assert lower_bound(table(rows, rows, chunks=2, latency=1.0), None) == 8 + 6
    assert lower_bound(table(rows, rows, chunks=2, placement="v", latency=1.0), None) == 8 + 4
    alone = table([[1, 1], [1, 1]], [[1, 1], [1, 1]], chunks=2, latency=9.0)
    assert lower_bound(alone, [1]) == 8


def test_limits_only_ever_raise_the_bound() -> None:
    costs = make_costs("mllm", 8, 32, split=True, jitter="J2", latency="wire")
    bounds = [lower_bound(costs, None), *(lower_bound(costs, [k] * 8) for k in (32, 16, 8, 4, 2, 1))]
    assert bounds == sorted(bounds)
    assert bounds[0] == bounds[1] < bounds[-1]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ([1], "limits has 1 entries, must have 2 (one a stage)"),
        ([1, 0], "limits[1] is 0, must be a whole number >= 1"),
        ([1.5, 1], "limits[0] is 1.5, must be a whole number >= 1"),
    ],
)
def test_bad_limits(limits: list[int], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        lower_bound(make_costs("llm", 2, 2), limits)
    assert str(caught.value) == message


@pytest.mark.parametrize(("stages", "microbatches"), [(512, 128), long(1024, 256)])
def test_large_pipelines_are_quick(stages: int, microbatches: int) -> None:
    """Without the vectorised paths the larger one would take minutes, not about a second."""
    costs = make_costs("mllm", stages, microbatches, split=True, jitter="J3", latency="spike")
    assert lower_bound(costs, [2 * stages] * stages) < lower_bound(costs, [stages // 16] * stages)
