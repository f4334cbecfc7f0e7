"""Every schedule, run in the engine: strictly and as a hint, on any costs; what it holds and how long it takes."""

from __future__ import annotations

import numpy as np
import pytest
from batches import examples
from hypothesis import given
from hypothesis import strategies as st

from rrfp.costs import CostTable
from rrfp.engine.engine import graph_of, run
from rrfp.engine.record import EngineResult
from rrfp.errors import ConfigError
from rrfp.hints.registry import create_hint, create_strict
from rrfp.lab.simulation import simulate
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Layout
from rrfp.model.schedule import Schedule
from rrfp.model.tasks import Kind, Mode, Task
from rrfp.schedules.registry import make_schedule, schedule_names

#: Names with the pipelines they are made for: chunks, layout, split; None: draw any.
MADE_FOR: dict[str, tuple[int | None, Layout, bool | None]] = {
    "gpipe": (1, "looped", None),
    "1f1b": (1, "looped", None),
    "interleaved-1f1b": (None, "looped", None),
    "zb-h1": (1, "looped", True),
    "zb-v": (2, "v", True),
}


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, CostTable]:
    """A schedule and a table for it: N 1..6, C 1..3, M 1..12, jitter and latency that reorder arrivals at will."""
    name = draw(st.sampled_from(sorted(MADE_FOR)))
    chunks, layout, split = MADE_FOR[name]
    stages, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    chunks = draw(st.integers(1, 3)) if chunks is None else chunks
    split = draw(st.booleans()) if split is None else split
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([0.0, 1.0, 30.0]))
    rows = stages * chunks

    def matrix(count: int) -> np.ndarray:
        return 1.0 + spread * random.exponential(1.0, (count, microbatches))

    weight = matrix(rows) if split else None
    there, back = matrix(rows - 1) - 1, matrix(rows - 1) - 1
    return name, CostTable(stages, chunks, layout, microbatches, matrix(rows), matrix(rows), weight, there, back)


def equal_stages(
    name: str, stages: int, microbatches: int, times: tuple[float, ...], *, chunks: int = 1, layout: Layout = "looped"
) -> float:
    """The makespan of ``name``, strict, on equal chunk tasks without latency; times are F, B and, when split, W."""
    count = stages * chunks
    forward, backward, *weight = (np.full((count, microbatches), time) for time in times)
    none = np.zeros((count - 1, microbatches))
    split = weight[0] if weight else None
    return strict(CostTable(stages, chunks, layout, microbatches, forward, backward, split, none, none), name).makespan


def strict(costs: CostTable, name: str) -> EngineResult:
    return run(costs, [create_strict(name) for _ in range(costs.stages)], [Limit()] * costs.stages)


def test_every_schedule_is_tried_here() -> None:
    assert set(MADE_FOR) == set(schedule_names())


@given(cases())
@examples(250)
def test_strict_runs_the_schedule_to_the_letter_and_holds_what_it_says(case: tuple[str, CostTable]) -> None:
    name, costs = case
    graph = graph_of(costs)
    schedule = make_schedule(name, graph, costs.microbatches)
    result = strict(costs, name)
    assert [tuple(span.task for span in spans) for spans in result.spans] == list(schedule.orders)
    assert [peaks.held for peaks in result.peaks] == [schedule.peak_held(i, graph) for i in range(costs.stages)]


@given(cases(), st.sampled_from([1, 2, "1f1b", "2n", None]), st.sampled_from(["staircase", "paper"]))
@examples(250)
def test_as_a_hint_it_finishes_within_any_limit(
    case: tuple[str, CostTable], limit: int | str | None, rule: str
) -> None:
    name, costs = case
    counts = [Limit.resolve(limit, stage, costs.stages).microbatches for stage in range(costs.stages)]
    limits = [Limit(count, rule=rule) for count in counts]
    result = run(costs, [create_hint(name) for _ in counts], limits)
    assert [len(spans) for spans in result.spans] == [
        len(list(graph_of(costs).tasks(stage, costs.microbatches))) for stage in range(costs.stages)
    ]
    over = costs.chunks if rule == "paper" and costs.chunks > 1 else 0
    for count, peaks in zip(counts, result.peaks, strict=True):
        assert count is None or peaks.held <= count * costs.chunks + over


@given(cases())
@examples(100)
def test_simulate_takes_every_schedule_and_stays_above_the_lower_bound(case: tuple[str, CostTable]) -> None:
    name, costs = case
    assert simulate(costs, strict=name).ratio >= 1


@given(cases())
@examples(100)
def test_its_forwards_alone_are_a_schedule_for_a_forward_only_step(case: tuple[str, CostTable]) -> None:
    name, costs = case
    forwards = make_schedule(name, graph_of(costs), costs.microbatches).forward_only()
    assert forwards.validate(graph_of(costs), costs.microbatches, Mode.FORWARD) is forwards


@given(cases(), st.integers(1, 12))
@examples(100)
def test_a_schedule_without_its_last_microbatches_is_valid(case: tuple[str, CostTable], fewer: int) -> None:
    """On this rests what schedules do with numbers of microbatches that their papers leave out."""
    name, costs = case
    graph, kept = graph_of(costs), min(fewer, costs.microbatches)
    whole = make_schedule(name, graph, costs.microbatches)
    Schedule(name, tuple(tuple(t for t in o if t.microbatch < kept) for o in whole.orders)).validate(graph, kept)


@pytest.mark.parametrize("stages", range(1, 7))
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_textbook_time_of_one_chunk(name: str, stages: int) -> None:
    for microbatches in range(1, 13):
        for forward, backward in ((1, 1), (1, 2), (5, 2)):
            expected = (microbatches + stages - 1) * (forward + backward)
            assert equal_stages(name, stages, microbatches, (forward, backward)) == expected


@pytest.mark.parametrize("stages", range(1, 7))
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_interleaving_divides_the_bubble_by_the_chunks(stages: int, chunks: int) -> None:
    """(N - 1) (F + B) / C, F and B of a stage, so (N - 1) (F + B) in times of a chunk."""
    for microbatches in range(stages, 13, stages):
        for forward, backward in ((1, 1), (1, 2), (5, 2)):
            both = forward + backward
            makespan = equal_stages("interleaved-1f1b", stages, microbatches, (forward, backward), chunks=chunks)
            assert makespan == microbatches * chunks * both + (stages - 1) * both


@pytest.mark.parametrize("stages", range(1, 7))
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_a_shorter_last_group_takes_no_longer_than_a_full_one(stages: int, chunks: int) -> None:
    for microbatches in range(1, 13):
        full = -(-microbatches // stages) * stages
        times = [equal_stages("interleaved-1f1b", stages, m, (1, 2), chunks=chunks) for m in (microbatches, full)]
        assert times[0] <= times[1]


@pytest.mark.parametrize("stages", range(1, 7))
def test_the_bubble_of_zb_h1(stages: int) -> None:
    """The paper's (N - 1) (F + B - W) while W is no longer than F and B; in general the largest of F, B, F + B - W."""
    for microbatches in range(stages, 13):
        for forward, backward, weight in ((1, 1, 1), (2, 2, 1), (3, 2, 2), (1, 3, 1), (1, 1, 4), (1, 9, 4)):
            work = microbatches * (forward + backward + weight)
            bubble = (stages - 1) * max(forward, backward, forward + backward - weight)
            assert equal_stages("zb-h1", stages, microbatches, (forward, backward, weight)) == work + bubble


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8, 16])
def test_zb_v_loses_nothing_once_every_stage_has_started(stages: int) -> None:
    """6 M of work, and N - 1 until the last stage has its first input, from 2 N - 1 microbatches on."""
    for microbatches in (2 * stages - 1, 2 * stages, 3 * stages + 1):
        makespan = equal_stages("zb-v", stages, microbatches, (1, 1, 1), chunks=2, layout="v")
        assert makespan == 6 * microbatches + stages - 1


@pytest.mark.parametrize("stages", range(1, 7))
def test_what_each_schedule_holds(stages: int) -> None:
    for microbatches in range(1, 13):
        for chunks in (1, 2, 3):
            graph = TaskGraph.chain(stages, chunks=chunks)
            peaks = peaks_of("interleaved-1f1b", graph, microbatches)
            most = [2 * (stages - 1 - i) + (chunks - 1) * stages + 1 for i in range(stages)]
            if chunks == 1:
                most = [stages - i for i in range(stages)]
            assert all(peak <= cap for peak, cap in zip(peaks, most, strict=True))
            if microbatches % stages == 0:
                assert peaks == [min(cap, microbatches * chunks) for cap in most]
        h1, v = TaskGraph.chain(stages, split=True), TaskGraph.chain(stages, chunks=2, layout="v", split=True)
        assert peaks_of("zb-h1", h1, microbatches) == [min(microbatches, stages)] * stages
        assert max(peaks_of("zb-v", v, microbatches)) <= 2 * stages
        if microbatches >= 2 * stages:
            assert peaks_of("zb-v", v, microbatches) == [2 * stages] * stages


def peaks_of(name: str, graph: TaskGraph, microbatches: int) -> list[int]:
    schedule = make_schedule(name, graph, microbatches)
    return [schedule.peak_held(stage, graph) for stage in range(graph.placement.stages)]


@pytest.mark.parametrize("stages", range(1, 7))
def test_zb_h1_runs_no_further_ahead_of_its_backwards_than_1f1b(stages: int) -> None:
    schedule = make_schedule("zb-h1", TaskGraph.chain(stages, split=True), 12)
    for stage, order in enumerate(schedule.orders):
        ahead = np.cumsum([{Kind.F: 1, Kind.B: -1, Kind.W: 0}[task.kind] for task in order])
        assert max(ahead) == stages - stage


def naive_dry_run(schedule: Schedule, graph: TaskGraph) -> str | None:
    """Look at every stage again and again; None, or where the first stuck stage is."""
    heads = [0] * len(schedule.orders)
    done: set[Task] = set()
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(schedule.orders):
            if heads[stage] < len(order) and done.issuperset(graph.inputs(order[heads[stage]])):
                done.add(order[heads[stage]])
                heads[stage] += 1
                moved = True
    for stage, (head, order) in enumerate(zip(heads, schedule.orders, strict=True)):
        if head < len(order):
            missing = next(task for task in graph.inputs(order[head]) if task not in done)
            return f"schedule mixed deadlocks: stage {stage}, entry {head}: {order[head]} waits for {missing}"
    return None


@given(cases(), st.integers(0, 2**32 - 1), st.integers(0, 3))
@examples(250)
def test_validation_agrees_with_a_naive_dry_run(case: tuple[str, CostTable], seed: int, swaps: int) -> None:
    name, costs = case
    graph, random = graph_of(costs), np.random.default_rng(seed)
    orders = [list(order) for order in make_schedule(name, graph, costs.microbatches).orders]
    for _ in range(swaps):
        order = orders[random.integers(len(orders))]
        i, j = random.integers(len(order), size=2)
        order[i], order[j] = order[j], order[i]
    mixed = Schedule("mixed", tuple(map(tuple, orders)))
    expected = naive_dry_run(mixed, graph)
    if expected is None:
        mixed.validate(graph, costs.microbatches)
        return
    with pytest.raises(ConfigError) as caught:
        mixed.validate(graph, costs.microbatches)
    assert str(caught.value) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "graph"),
    [
        ("1f1b", TaskGraph.chain(1024)),
        pytest.param("interleaved-1f1b", TaskGraph.chain(1024, chunks=2), marks=pytest.mark.long),
        pytest.param("zb-v", TaskGraph.chain(1024, chunks=2, layout="v", split=True), marks=pytest.mark.long),
    ],
)
def test_a_thousand_stages_are_made_and_validated_before_the_timeout(name: str, graph: TaskGraph) -> None:
    schedule = make_schedule.__wrapped__(name, graph, 256)
    kinds = sum(len(graph.kinds(v, Mode.TRAIN)) for v in range(graph.placement.num_virtual_stages))
    assert sum(map(len, schedule.orders)) == kinds * 256
