"""The engine and the lower bound on graphs, against small cases by hand and longest paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from batches import examples
from hypothesis import given
from hypothesis import strategies as st
from sim.tables import graph_table, graph_tables

from rrfp.costs import CostTable
from rrfp.engine.bound import lower_bound
from rrfp.engine.engine import run
from rrfp.engine.record import EngineResult
from rrfp.errors import ConfigError
from rrfp.hints.registry import create_hint
from rrfp.lab.blocking import run_blocking
from rrfp.lab.cluster.simulation import simulate_tensor_parallel
from rrfp.lab.generators.multimodal import multimodal_costs
from rrfp.lab.simulation import simulate
from rrfp.memory.admission import Limit
from rrfp.model.tasks import Kind, Task

#: 0 feeds 1 and 2, which feed 3.
DIAMOND = [(0, 1), (0, 2), (1, 3), (2, 3)]


def bf(costs: CostTable, limits: Sequence[Limit] | None = None) -> EngineResult:
    hints = [create_hint("bf") for _ in range(costs.stages)]
    return run(costs, hints, limits or [Limit()] * costs.stages)


def starts(result: EngineResult) -> list[str]:
    return [" ".join(f"{span.task}:{span.start:g}" for span in stage) for stage in result.spans]


def test_the_join_of_a_diamond_waits_for_its_later_branch() -> None:
    costs = graph_table(range(4), DIAMOND, [[1], [2], [5], [1]], [[1], [1], [3], [2]], latency=1)
    result = bf(costs)
    # F0 1, way 1; F1 2-4, F2 2-7; F3 from 8; B3 9-11; B1 12-13, B2 12-15; B0 from 16.
    assert starts(result) == ["F0@0:0 B0@0:16", "F0@1:2 B0@1:12", "F0@2:2 B0@2:12", "F0@3:8 B0@3:9"]
    assert result.makespan == 17
    assert lower_bound(costs, None) == 17


def test_an_edge_takes_its_own_latency_in_both_directions() -> None:
    costs = graph_table(range(4), DIAMOND, [[1]] * 4, [[1]] * 4, latency=[[1], [2], [3], [10]])
    result = bf(costs)
    sent = {(message.task, message.target): message.arrived for message in result.messages}
    assert sent[Task(Kind.F, 0, 0), 1] == 2
    assert sent[Task(Kind.F, 0, 0), 2] == 3
    assert sent[Task(Kind.F, 0, 2), 3] == 14
    assert sent[Task(Kind.B, 0, 3), 1] == 16 + 3
    assert sent[Task(Kind.B, 0, 3), 2] == 16 + 10
    assert result.makespan == lower_bound(costs, None) == 1 + 2 + 1 + 10 + 2 + 10 + 1 + 2 + 1


def test_chunks_of_one_stage_take_turns_and_need_no_message() -> None:
    # Vision and audio on stage 0, the language model on stage 1 and then on stage 0.
    costs = graph_table([0, 0, 1, 0], [(0, 2), (1, 2), (2, 3)], [[2], [3], [4], [1]], [[1], [1], [1], [1]], latency=1)
    result = bf(costs)
    spans = {str(span.task): span for stage in result.spans for span in stage}
    assert spans["F0@2"].start == 6, "both encoders run on one lane, 5 s, and the output travels 1 s"
    assert spans["F0@3"].start == 6 + 4 + 1
    assert spans["B0@3"].start == 12
    assert {(message.source, message.target) for message in result.messages} == {(0, 1), (1, 0)}
    assert result.makespan == 12 + 1 + 1 + 1 + 1 + 2


def test_a_skipped_virtual_stage_runs_nothing_sends_nothing_and_is_not_waited_for() -> None:
    visiting = graph_table([0, 1], [(0, 1)], [[5, 5], [1, 1]], [[5, 5], [1, 1]], latency=1)
    skipping = graph_table([0, 1], [(0, 1)], [[5, 5], [1, 1]], [[5, 5], [1, 1]], latency=1, skipped=[set(), {0}])
    assert starts(bf(visiting))[1] == "F0@1:6 B0@1:7 F1@1:11 B1@1:12"
    result = bf(skipping)
    assert starts(result) == ["F0@0:0 B0@0:9", "F1@1:0 B1@1:1 F0@1:6 B0@1:7"]
    assert {message.task.microbatch for message in result.messages} == {0}
    assert lower_bound(skipping, None) == result.makespan == 14
    assert lower_bound(visiting, None) > 14


def test_a_stage_that_every_microbatch_skips_does_nothing() -> None:
    costs = graph_table([0, 1], [(0, 1)], [[5], [1]], [[5], [1]], skipped=[{0}])
    result = bf(costs, [Limit(1)] * 2)
    assert starts(result) == ["", "F0@1:0 B0@1:1"]
    assert lower_bound(costs, [1, 1]) == 2
    assert simulate(costs, hint="bf", limit=1).ratio == 1


def longest_path(costs: CostTable, microbatch: int) -> float:
    """By recursion over the tasks of one microbatch, as the graph defines them."""
    graph, edges = costs.to_graph(), costs.edges()
    there, back = costs.acting_latencies()

    def end(task: Task) -> float:
        duration = costs.duration(task.kind.value, task.virtual_stage, microbatch)
        begins = [0.0]
        for source in graph.inputs(task):
            u, v = source.virtual_stage, task.virtual_stage
            if u in skipped:
                continue
            way = 0.0
            if u != v:
                way = (there[edges.index((u, v))] if u < v else back[edges.index((v, u))])[microbatch]
            begins.append(end(source) + way)
        return max(begins) + duration

    skipped = costs.skipped[microbatch] if costs.skipped else frozenset()
    kinds = (Kind.F, Kind.B, Kind.W) if costs.split else (Kind.F, Kind.B)
    visited = [v for v in range(costs.num_virtual_stages) if v not in skipped]
    return max(end(Task(kind, microbatch, v)) for kind in kinds for v in visited)


@examples(100)
@given(graph_tables())
def test_the_bound_is_no_less_than_any_longest_path_and_no_more_than_any_run(costs: CostTable) -> None:
    bound = lower_bound(costs, None)
    paths = [longest_path(costs, m) for m in range(costs.microbatches)]
    assert bound >= max(paths) * (1 - 1e-12)
    assert bound <= bf(costs).makespan * (1 + 1e-12)


def test_a_microbatch_holds_a_slot_from_its_own_forward_on_not_from_that_of_another_branch() -> None:
    # 0, which takes 10, and 1 lead to 2. On stage 1 both microbatches may use one slot in turn: from F@1 on, F@2,
    # B@2 and B@1 are 4 s. That F@2 waits for F@0 is no reason to start F@1 early.
    costs = graph_table([0, 1, 2], [(0, 2), (1, 2)], [[10, 10], [1, 1], [1, 1]], [[1, 1], [1, 1], [1, 1]])
    makespan = bf(costs, [Limit(2), Limit(1), Limit(2)]).makespan
    assert lower_bound(costs, [2, 1, 2]) == lower_bound(costs, None) == makespan


@examples(100)
@given(graph_tables(), st.integers(1, 3), st.sampled_from(["bf", "fb", "b-priority"]))
def test_the_bound_holds_within_limits_and_peaks_stay_within_them(costs: CostTable, most: int, hint: str) -> None:
    one = simulate(costs, hint=hint, limit=most)
    assert one.lower_bound <= one.makespan * (1 + 1e-12)
    assert all(peaks.held <= most * costs.chunks_of(stage) for stage, peaks in enumerate(one.peaks))
    tasks = sorted(span.task for stage in one.result.spans for span in stage)
    assert len(tasks) == len({*tasks}) == costs.num_tasks


@examples(40)
@given(graph_tables(), st.integers(1, 6))
def test_a_limit_on_bytes_holds_on_graphs(costs: CostTable, most: int) -> None:
    alike = replace(costs, held=np.ones_like(costs.forward))
    one = simulate(alike, hint="bf", limit=f"{most}B")
    for stage, peaks in enumerate(one.peaks):
        # In this first step nothing is expected of a chunk that has not run yet; so a microbatch that comes before a
        # lower one leaves no room for it, and the lowest one is always admitted.
        ran = [span.task.microbatch for span in one.result.spans[stage] if span.task.kind is Kind.F]
        assert costs.chunks_of(stage) > 1 or ran != sorted(ran) or peaks.num_bytes <= most
    assert one.limits_in_bytes == (most,) * costs.stages


@examples(40)
@given(graph_tables(has_skips=False))
def test_one_microbatch_alone_takes_its_longest_path_where_every_virtual_stage_has_a_stage(costs: CostTable) -> None:
    count = costs.num_virtual_stages
    rows = {"forward": costs.forward[:, :1], "backward": costs.backward[:, :1]}
    latency = [[1.0]] * len(costs.edges())
    alone = graph_table(
        range(count), costs.edges(), rows["forward"].tolist(), rows["backward"].tolist(), latency=latency
    )
    assert bf(alone).makespan == pytest.approx(longest_path(alone, 0), rel=1e-12)


def test_orders_of_chains_are_refused_on_graphs() -> None:
    branch = multimodal_costs("branch", 4, 4, skip=False)
    with pytest.raises(ConfigError, match=r"^strict is '1f1b', must be a schedule file on a graph"):
        simulate(branch, strict="1f1b")
    with pytest.raises(ConfigError, match=r"^strict needs microbatches that visit every virtual stage"):
        simulate(multimodal_costs("branch", 4, 4), strict="1f1b")
    with pytest.raises(ConfigError, match=r"^the costs are of a graph, must be of a chain with blocking sends"):
        run_blocking(branch)
    with pytest.raises(ConfigError, match=r"^tp: groups of ranks are simulated on chains only"):
        simulate_tensor_parallel(branch, 2, hint="bf")


def test_the_same_bytes_as_under_a_count_are_a_limit_of_each_stage() -> None:
    costs = multimodal_costs("colocated", 2, 6, seed=1)
    counted, in_bytes = (simulate(costs, hint="bf", limit=limit) for limit in (2, "bytes:2"))
    assert in_bytes.limits_in_bytes == tuple(peaks.num_bytes for peaks in counted.peaks)
