"""What every simulated run has to satisfy, over random tables; and the answer that `rrfp simulate` prints."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from batches import examples
from hypothesis import given
from hypothesis import strategies as st
from sim.tables import table, tables

from rrfp import Hint, View
from rrfp.core.ready_set import ReadySet
from rrfp.costs import CostTable, from_json, make_costs, to_json
from rrfp.engine.bound import lower_bound
from rrfp.engine.engine import graph_of
from rrfp.engine.engine import run as run_engine
from rrfp.errors import ConfigError
from rrfp.hints.registry import create_hint
from rrfp.lab.cluster.coordination import Leader
from rrfp.lab.cluster.simulation import simulate_tensor_parallel
from rrfp.lab.simulation import Simulation, planned_sizes, shown_correlation, simulate
from rrfp.memory.admission import Limit
from rrfp.model.tasks import Kind, Mode, Task
from rrfp.trace.breakdown import breakdown
from rrfp.trace.spans import TaskSpan

HINTS = ("bf", "fb", "b-priority", "f-priority", "bfw")
SCHEDULES = ("gpipe", "1f1b")
LIMITS = ("1f1b", "2n", 1, 2, 3)


def check(simulation: Simulation) -> None:
    """The rules of a step, found anew from what ran when: no core is asked."""
    costs, spans = simulation.costs, simulation.result.spans
    graph = graph_of(costs)
    ran = {span.task: span for stage in spans for span in stage}
    for stage, run in enumerate(spans):
        assert Counter(span.task for span in run) == Counter(graph.tasks(stage, costs.microbatches, Mode.TRAIN))
        for before, after in itertools.pairwise(run):
            assert before.end <= after.start, "one task at a time"
        for span in run:
            assert span.end == span.start + costs.duration(span.task.kind, *reversed(span.task[1:]))
            assert span.start >= available(costs, ran, span.task)
    most = simulation.limits
    for stage, peak in enumerate(simulation.peaks):
        assert peak.held == largest_d(simulation, stage)
        assert most is None or peak.held <= most[stage] * costs.chunks
    assert simulation.makespan == max(span.end for span in ran.values())
    assert sum(simulation.result.busy) == pytest.approx(costs.work().sum())


def available(costs: CostTable, ran: Mapping[Task, TaskSpan], task: Task) -> float:
    """When the last input of ``task`` was on its stage."""
    graph = graph_of(costs)
    stage_of = graph.placement.stage_of
    arrivals = [0.0]
    for source in graph.inputs(task):
        end = ran[source].end
        if stage_of(source.virtual_stage) != stage_of(task.virtual_stage):
            matrix = costs.latency_forward if source.kind is Kind.F else costs.latency_backward
            end = end + float(matrix[min(source.virtual_stage, task.virtual_stage), task.microbatch])
        arrivals.append(end)
    return max(arrivals)


def largest_d(simulation: Simulation, stage: int) -> int:
    """D by the order of the stage's tasks."""
    last = Kind.W if simulation.costs.split else Kind.B
    held = peak = 0
    for span in simulation.result.spans[stage]:
        held += span.task.kind is Kind.F
        peak = max(peak, held)
        held -= span.task.kind is last
    return peak


@given(tables(), st.sampled_from(HINTS), st.sampled_from(LIMITS))
@examples(300)
def test_every_hint_keeps_the_rules_and_the_bound(costs: CostTable, hint: str, limit: int | str) -> None:
    simulation = simulate(costs, hint=hint, limit=limit)
    check(simulation)
    counts = [Limit.resolve(limit, stage, costs.stages).microbatches or 0 for stage in range(costs.stages)]
    assert simulation.makespan >= lower_bound(costs, counts) * (1 - 1e-12)
    assert simulation.ratio >= 1


@given(tables(most_chunks=1), st.sampled_from(SCHEDULES))
@examples(100)
def test_every_strict_schedule_keeps_the_rules_and_the_bound(costs: CostTable, schedule: str) -> None:
    simulation = simulate(costs, strict=schedule)
    check(simulation)
    peaks = [peak.held for peak in simulation.peaks]
    assert simulation.makespan >= lower_bound(costs, peaks) * (1 - 1e-12)


@given(tables(most_chunks=1), st.sampled_from((*HINTS, *SCHEDULES)), st.sampled_from(LIMITS))
@examples(200)
def test_no_stage_is_idle_while_a_task_could_run(costs: CostTable, hint: str, limit: int | str) -> None:
    """Before each start the stage was busy, or nothing else had its inputs, or only Fs had and memory was full."""
    simulation = simulate(costs, hint=hint, limit=limit)
    assert simulation.limits is not None
    ran = {span.task: span for stage in simulation.result.spans for span in stage}
    last = Kind.W if costs.split else Kind.B
    for stage, run in enumerate(simulation.result.spans):
        held, free_from = 0, 0.0
        for index, span in enumerate(run):
            if span.start > free_from:
                candidates = [later.task for later in run[index:] if later.task.kind is not Kind.F]
                if held < simulation.limits[stage]:
                    candidates = [later.task for later in run[index:]]
                assert all(available(costs, ran, task) >= span.start for task in candidates)
            held += (span.task.kind is Kind.F) - (span.task.kind is last)
            free_from = span.end


@given(tables(), st.sampled_from(HINTS), st.sampled_from(LIMITS))
@examples(50)
def test_waits_and_tasks_fill_the_step(costs: CostTable, hint: str, limit: int | str) -> None:
    trace = simulate(costs, hint=hint, limit=limit).result.trace()
    for part in (breakdown(trace, stage) for stage in range(costs.stages)):
        assert part.compute + part.blocking == pytest.approx(trace.end)
        assert part.other == pytest.approx(0, abs=1e-9)


@given(tables(), st.sampled_from(HINTS))
@examples(30)
def test_same_costs_same_bytes(costs: CostTable, hint: str) -> None:
    again = from_json(to_json(costs))
    one, other = simulate(costs, hint=hint).to_json(), simulate(again, hint=hint).to_json()
    assert json.dumps(one) == json.dumps(other)


@given(tables().map(CostTable.to_unsplit))
@examples(30)
def test_bfw_on_unsplit_costs_is_bf(costs: CostTable) -> None:
    assert simulate(costs, hint="bfw").to_json() == simulate(costs, hint="bf").to_json()


def test_answer_in_full() -> None:
    # Stage 0: F0 0-1, F1 1-2; stage 1: F0 1-2, B0 2-4, F1 4-5, B1 5-7; stage 0: B0 4-6, B1 7-9.
    # Bound: stage 1 is reached at 1, works for 6, and B must still run on stage 0: 1 + 6 + 2 = 9.
    assert simulate(table([[1, 1], [1, 1]], [[2, 2], [2, 2]]), hint="bf").to_json() == {
        "makespan": 9.0,
        "lower_bound": 9.0,
        "ratio": 1.0,
        "busy": [6.0, 6.0],
        "peak": [2, 1],
        "received_peak": [1, 1],
        "limit": [4, 4],
        "order": [["F0@0", "F1@0", "B0@0", "B1@0"], ["F0@1", "B0@1", "F1@1", "B1@1"]],
        "start": [[0.0, 1.0, 4.0, 7.0], [1.0, 2.0, 4.0, 5.0]],
    }


def test_default_limit_is_2n() -> None:
    costs = make_costs("mllm", 3, 12, jitter="J3", latency="spike")
    assert simulate(costs, hint="f-priority").to_json() == simulate(costs, hint="f-priority", limit="2n").to_json()
    assert simulate(costs, hint="bf", limit="1f1b").limits == (3, 2, 1)
    assert simulate(costs, hint="bf", limit="4").limits == (4, 4, 4)


def test_strict_has_no_limit_and_the_bound_of_its_own_peak() -> None:
    # Peaks of 1F1B: 2 and 1. One microbatch at a time on stage 1 takes 10 each: its residency is F + B there, and the
    # head and tail of stage 0 come once: 1 + 3 x 10 + 1 = 32; F and B of stage 0 hide behind it.
    costs = table([[1] * 3, [5] * 3], [[1] * 3, [5] * 3])
    simulation = simulate(costs, strict="1f1b")
    assert (simulation.limits, simulation.to_json()["limit"]) == (None, None)
    assert (simulation.lower_bound, simulation.makespan) == (lower_bound(costs, [2, 1]), 32)


def test_bound_of_chunks_counts_microbatches() -> None:
    """With K = 1 and two chunks a stage holds two chunk tasks, that is one microbatch, not two."""
    costs = make_costs("llm", 2, 6, chunks=2)
    assert simulate(costs, hint="bf", limit=1).lower_bound == lower_bound(costs, [1, 1])


def test_the_papers_admission_rule_is_another_rule_for_two_chunks_only() -> None:
    """With K = 2 it lets a second microbatch into the first chunk at once, and then serves one at a time."""
    for chunks in (1, 2):
        costs = make_costs("mllm", 3, 8, chunks=chunks, jitter="J2")
        plain, staircase, paper = (
            simulate(costs, hint="bf", limit=2, admission=rule) for rule in (None, "staircase", "paper")
        )
        assert plain.to_json() == staircase.to_json()
        assert (paper.to_json() == plain.to_json()) == (chunks == 1)


def test_admission_replaces_the_rule_of_a_limit_and_none_leaves_it() -> None:
    costs = make_costs("mllm", 3, 8, chunks=2, jitter="J2")
    limit = Limit(2, rule="paper")
    paper = simulate(costs, hint="bf", limit=2, admission="paper").to_json()
    assert simulate(costs, hint="bf", limit=limit).to_json() == paper
    staircase = simulate(costs, hint="bf", limit=limit, admission="staircase").to_json()
    assert staircase == simulate(costs, hint="bf", limit=2).to_json() != paper


@given(tables(), st.sampled_from(HINTS), st.sampled_from(LIMITS))
@examples(100)
def test_under_the_papers_rule_no_run_is_below_its_bound(costs: CostTable, hint: str, limit: int | str) -> None:
    """D may pass K * C by C, so the bound is that of one microbatch more."""
    simulation = simulate(costs, hint=hint, limit=limit, admission="paper")
    counts = [Limit.resolve(limit, stage, costs.stages).microbatches or 0 for stage in range(costs.stages)]
    assert simulation.lower_bound <= lower_bound(costs, counts) * (1 + 1e-12)
    assert simulation.ratio >= 1
    for peak, count in zip(simulation.peaks, counts, strict=True):
        assert peak.held <= (count + (costs.chunks > 1)) * costs.chunks


@given(tables(most_chunks=1))
@examples(100)
def test_blocking_sends_keep_the_order_and_are_never_faster(costs: CostTable) -> None:
    eager, blocking = simulate(costs, strict="1f1b"), simulate(costs, strict="1f1b", sends="blocking")
    assert blocking.makespan >= eager.makespan * (1 - 1e-12)
    assert blocking.to_json()["order"] == eager.to_json()["order"]
    assert blocking.to_json()["peak"] == eager.to_json()["peak"]


@given(tables())
@examples(30)
def test_planned_sizes_add_up_to_the_work(costs: CostTable) -> None:
    sizes = planned_sizes(costs)
    assert len(sizes) == costs.microbatches
    assert sum(sizes) == pytest.approx(costs.work().sum())


def test_zero_costs_have_ratio_one() -> None:
    simulation = simulate(table([[0.0]], [[0.0]]), hint="bf")
    assert (simulation.makespan, simulation.lower_bound, simulation.ratio) == (0, 0, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of hint and strict"),
        ({"hint": "bf", "strict": "1f1b"}, "exactly one of hint and strict"),
        ({"strict": "1f1b", "limit": 2}, "limit goes with a hint"),
        ({"strict": "bf"}, "strict is 'bf', must be one of: gpipe, 1f1b"),
        ({"hint": "nope"}, "hint is 'nope', must be one of: bf, fb, b-priority, f-priority, bfw"),
        ({"hint": "bf", "limit": "lots"}, "must be a number of microbatches or one of: 1f1b, n, 2n"),
        ({"hint": "bf", "limit": 0}, "must be a whole number >= 1"),
        ({"strict": "1f1b", "admission": "paper"}, "admission goes with a hint"),
        ({"hint": "bf", "admission": "none"}, "rule is 'none', must be one of: staircase, paper"),
        ({"hint": "bf", "sends": "blocking"}, "sends is 'blocking', must be eager with a hint"),
        ({"strict": "gpipe", "sends": "blocking"}, "must be eager with strict gpipe: only 1f1b has a blocking form"),
        ({"strict": "1f1b", "sends": "late"}, "sends is 'late', must be one of: eager, blocking"),
        ({"hint": "bf", "sizes": (1.0, 2.0)}, "sizes has 2 entries, must have 1, one a microbatch"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, str | int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(table([[1]], [[1]]), **arguments)  # type: ignore[arg-type]


def test_times_whose_sum_is_no_float_are_refused() -> None:
    with pytest.raises(ConfigError, match="too large"):
        simulate(table([[1e308]], [[1e308]]), hint="bf")


def test_schedules_for_one_chunk_refuse_two() -> None:
    with pytest.raises(ConfigError, match="1f1b takes 1 chunk a stage; the graph has 2 chunks"):
        simulate(make_costs("llm", 2, 4, chunks=2), strict="1f1b")


def test_hint_may_be_a_class_or_an_instance() -> None:
    class First(Hint):
        def choose(self, ready: ReadySet, view: View) -> Task | None:
            return next(iter(ready))

    costs = make_costs("mllm", 3, 5, jitter="J2")
    assert simulate(costs, hint=First).to_json() == simulate(costs, hint=First()).to_json()


def test_rounding_of_a_long_step_is_not_a_run_below_its_bound() -> None:
    """A B is 0.501 units in the last place of 2**14: behind all Fs it counts for a whole one, earlier for itself."""
    num = 2**14
    simulation = simulate(table([[1.0] * num], [[0.501 * 2.0**-38] * num]), strict="1f1b")
    assert simulation.ratio == 1
    assert lower_bound(simulation.costs, None) > simulation.makespan * (1 + 1e-12)


def test_a_limit_on_bytes_is_refused_where_the_table_has_none() -> None:
    for limit in (Limit(2, 100), "bytes:n"):
        with pytest.raises(ConfigError, match="the limit is in bytes, and the cost table has none"):
            simulate(table([[1]], [[1]]), hint="bf", limit=limit)
    assert simulate(table([[1]], [[1]]), hint="bf", limit=Limit()).limits == (1,)


def test_hints_know_how_closely_times_follow_the_sizes_as_from_a_jobs_second_step_on() -> None:
    costs = make_costs("bimodal", 2, 24, split=True)  # one size orders every stage, so one pyramid is best
    sizes, limits = planned_sizes(costs), [Limit(4), Limit(4)]

    def engine(known: float | None) -> float:
        hints = [create_hint("slot-aware-pyramid") for _ in limits]
        return run_engine(costs, hints, limits, sizes=sizes, size_correlation=known).makespan

    assert simulate(costs, hint="slot-aware-pyramid", limit=4, sizes=sizes).makespan == engine(1.0) < engine(None)
    with_own = replace(costs, sizes=tuple(sizes))
    one_rank = simulate_tensor_parallel(with_own, 1, hint="slot-aware-pyramid", limit=4, coordination=Leader(1, 0.0))
    assert one_rank.simulation.makespan == engine(1.0)
    assert shown_correlation(with_own) == pytest.approx(1.0)
    assert shown_correlation(costs) is shown_correlation(replace(costs, sizes=(1.0,) * 24)) is None


def test_the_correlation_is_the_least_of_all_stages_over_their_chunks() -> None:
    rows = [[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [1.0, 2.0, 4.0], [9.0, 6.0, 3.0]]
    none = [[0.0] * 3] * 3
    costs = CostTable(2, 2, "looped", 3, rows, rows, None, none, none, sizes=(1.0, 2.0, 3.0))  # type: ignore[arg-type]
    assert shown_correlation(costs) == pytest.approx(-1.0), "stage 1 has the virtual stages 1 and 3"
