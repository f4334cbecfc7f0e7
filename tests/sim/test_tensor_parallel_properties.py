"""Tensor-parallel groups on random pipelines: when they are one rank, and what holds whatever arrives when."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from batches import examples, long
from hypothesis import given
from hypothesis import strategies as st
from sim.tables import tables
from sim.tp_cases import PURE, any_makers, latencies_of, limits_of, makers, settled_makers

from rrfp import Hint
from rrfp.core.ready_set import ForcedOrder
from rrfp.costs import CostTable, make_costs
from rrfp.engine.engine import graph_of, run
from rrfp.engine.record import EngineResult
from rrfp.hints.registry import create_hint, create_strict
from rrfp.lab.cluster.coordination import Agreement, Coordination, Independent, Leader
from rrfp.lab.cluster.simulation import TensorParallelResult, run_tensor_parallel
from rrfp.lab.generators.latency import RankLatencies, rank_latencies
from rrfp.memory.admission import Limit
from rrfp.model.tasks import Kind

FREE: tuple[Coordination, ...] = (Leader(control_seconds=0), Agreement(gather_seconds=0))


def alone(
    costs: CostTable, make: Callable[[], Hint], limits: list[Limit], in_order: tuple[ForcedOrder, ...] = ()
) -> EngineResult:
    return run(costs, [make() for _ in limits], limits, in_order=in_order)


def same(groups: TensorParallelResult, single: EngineResult) -> None:
    """Every order and start, every wait with its cause, every message: to the last bit."""
    assert groups.spans == single.spans
    assert groups.makespan == single.makespan
    assert groups.waits == single.waits
    assert groups.messages == single.messages


@st.composite
def forced(draw: st.DrawFn, costs: CostTable) -> tuple[ForcedOrder, ...]:
    if not draw(st.booleans()):
        return ()
    kind = draw(st.sampled_from([Kind.F, Kind.B, Kind.W] if costs.split else [Kind.F, Kind.B]))
    return tuple((kind, v) for v in range(costs.num_virtual_stages))


@examples(100)
@given(data=st.data(), costs=tables(), make=any_makers(), coordination=st.sampled_from([*FREE, Agreement()]))
def test_a_group_of_one_is_the_plain_engine(
    data: st.DataObject, costs: CostTable, make: Callable[[], Hint], coordination: Coordination
) -> None:
    limits, in_order = data.draw(limits_of(costs)), data.draw(forced(costs))
    ranks = RankLatencies.same_on_all(costs, 1)
    groups = run_tensor_parallel(costs, ranks, make, limits, coordination, in_order=in_order)
    single = alone(costs, make, limits, in_order)
    same(groups, single)
    assert [peaks for (peaks,) in groups.rank_peaks] == list(single.peaks)
    assert (groups.rounds_per_task, groups.messages_per_task) == (0, 0)


@examples(100)
@given(data=st.data(), costs=tables(), make=any_makers(), ranks=st.integers(2, 4), coordination=st.sampled_from(FREE))
def test_ranks_with_equal_latencies_are_the_plain_engine(
    data: st.DataObject, costs: CostTable, make: Callable[[], Hint], ranks: int, coordination: Coordination
) -> None:
    limits = data.draw(limits_of(costs))
    equal = RankLatencies.same_on_all(costs, ranks)
    groups = run_tensor_parallel(costs, equal, make, limits, coordination)
    single = alone(costs, make, limits)
    same(groups, single)
    assert [set(of_stage) for of_stage in groups.rank_peaks] == [{peaks} for peaks in single.peaks]
    assert groups.failed_rounds_per_task == 0


@examples(100)
@given(data=st.data(), costs=tables(), make=makers(PURE))
def test_a_leader_without_delay_is_one_rank_with_the_slowest_messages(
    data: st.DataObject, costs: CostTable, make: Callable[[], Hint]
) -> None:
    limits, ranks = data.draw(limits_of(costs)), data.draw(latencies_of(costs))
    groups = run_tensor_parallel(costs, ranks, make, limits, Leader(control_seconds=0))
    same(groups, alone(ranks.slowest(costs), make, limits))
    assert sum(groups.coordination) == 0


@examples(100)
@given(data=st.data(), costs=tables(most_chunks=1), schedule=st.sampled_from(["1f1b", "gpipe"]))
def test_a_strict_schedule_is_one_rank_with_the_slowest_messages(
    data: st.DataObject, costs: CostTable, schedule: str
) -> None:
    limits, ranks = [Limit()] * costs.stages, data.draw(latencies_of(costs))
    groups = run_tensor_parallel(costs, ranks, lambda: create_strict(schedule), limits, Independent())
    same(groups, alone(ranks.slowest(costs), lambda: create_strict(schedule), limits))


def check(result: TensorParallelResult, costs: CostTable, ranks: RankLatencies, limits: list[Limit]) -> None:
    """Every rank ran everything once, in its group's one order, within the limit and after its inputs."""
    graph = graph_of(costs)
    ends = {span.task: span.end for spans in result.spans for span in spans}
    slowest = ranks.slowest(costs)
    for stage, spans in enumerate(result.spans):
        order = tuple(span.task for span in spans)
        assert set(result.orders[stage]) == {order}
        assert sorted(order) == sorted(graph.tasks(stage, costs.microbatches))
        most = limits[stage].microbatches
        for peaks in result.rank_peaks[stage]:
            assert most is None or peaks.held <= most * costs.chunks
        for before, after in pairwise(spans):
            assert after.start >= before.end
        for span in spans:
            for source in graph.inputs(span.task):
                row, m = min(source.virtual_stage, span.task.virtual_stage), source.microbatch
                travel = 0.0
                if graph.placement.stage_of(source.virtual_stage) != stage:
                    rows = slowest.latency_forward if source.kind is Kind.F else slowest.latency_backward
                    travel = float(rows[row, m])
                assert span.start >= ends[source] + travel
    idle = result.makespan * costs.stages - sum(span.end - span.start for spans in result.spans for span in spans)
    assert sum(result.coordination) + sum(result.blocked) == pytest.approx(idle)


@examples(200)
@given(
    data=st.data(),
    costs=tables(),
    make=any_makers(),
    depth=st.integers(1, 3),
    control=st.sampled_from([0.0, 1e-3, 0.5, 10.0]),
)
def test_a_leader_ends_with_any_hint_in_one_order(
    data: st.DataObject, costs: CostTable, make: Callable[[], Hint], depth: int, control: float
) -> None:
    limits, ranks = data.draw(limits_of(costs)), data.draw(latencies_of(costs))
    in_order = data.draw(forced(costs))
    leader = Leader(depth, control)
    result = run_tensor_parallel(costs, ranks, make, limits, leader, in_order=in_order)
    check(result, costs, ranks, limits)
    assert result.failed_rounds_per_task == 0
    if ranks.ranks > 1:
        assert result.rounds_per_task == 1
        followers = ranks.ranks - 1
        reported = len({(message.target, message.task) for message in result.messages})
        assert sum(counts.messages for counts in result.counts) == followers * (result.num_tasks + reported)


@examples(200)
@given(data=st.data(), costs=tables(), make=settled_makers(), gather=st.sampled_from([0.0, 1e-3, 0.5, 10.0]))
def test_agreement_ends_with_any_hint_that_ranks_share_in_the_end(
    data: st.DataObject, costs: CostTable, make: Callable[[], Hint], gather: float
) -> None:
    limits, ranks = data.draw(limits_of(costs)), data.draw(latencies_of(costs))
    in_order = data.draw(forced(costs))
    result = run_tensor_parallel(costs, ranks, make, limits, Agreement(gather), in_order=in_order)
    check(result, costs, ranks, limits)
    if ranks.ranks > 1:
        succeeded = sum(counts.rounds - counts.failed_rounds for counts in result.counts)
        assert succeeded == result.num_tasks
        # Proposals may travel before the last rank has its own; the outcome travels after that, while lanes are idle.
        assert sum(result.coordination) >= gather / 2 * result.num_tasks * (1 - 1e-9)


def test_a_slow_round_costs_its_time_between_any_two_tasks() -> None:
    costs = make_costs("llm", 4, 8)
    ranks = RankLatencies.same_on_all(costs, 2)
    result = run_tensor_parallel(costs, ranks, lambda: create_hint("bf"), [Limit(8)] * 4, Agreement(0.001))
    for spans in result.spans:
        gaps = [after.start - before.end for before, after in pairwise(spans)]
        assert min(gaps) >= 0.001 * (1 - 1e-9)


@pytest.mark.parametrize("seeds", [1, long(3)])
def test_the_leader_is_no_slower_than_agreement_that_fails_more_often_the_more_ranks_there_are(seeds: int) -> None:
    ratios, failed = [], []
    for tp in (2, 4, 8):
        pairs = [led_and_agreed(tp, seed) for seed in range(seeds)]
        ratios.append(np.mean([agreed.makespan / led.makespan for led, agreed in pairs]))
        failed.append(np.mean([agreed.failed_rounds_per_task for _, agreed in pairs]))
    assert min(ratios) >= 1
    assert 0.05 < failed[0] < failed[1] < failed[2]


def led_and_agreed(tp: int, seed: int) -> tuple[TensorParallelResult, TensorParallelResult]:
    """BF at limit 2N on the multimodal profile, coordination free of charge."""
    costs = make_costs("mllm", 8, 32, seed=seed, latency="spike")
    ranks = rank_latencies(costs, "spike", tp, seed=seed)
    led, agreed = (run_tensor_parallel(costs, ranks, lambda: create_hint("bf"), [Limit(16)] * 8, way) for way in FREE)
    return led, agreed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("coordination", "ranks_a_stage"),
    [(Leader(depth=2), 8), *(long(way, 64) for way in (Leader(), Leader(2), Agreement()))],
)
def test_many_ranks_a_stage_run_a_real_step(coordination: Coordination, ranks_a_stage: int) -> None:
    costs = make_costs("mllm", 8, 64, latency="spike")
    ranks, limits = rank_latencies(costs, "spike", ranks_a_stage), [Limit(16)] * 8
    result = run_tensor_parallel(costs, ranks, lambda: create_hint("bf"), limits, coordination)
    check(result, costs, ranks, limits)
