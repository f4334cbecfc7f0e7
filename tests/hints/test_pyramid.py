"""Pyramids: the order itself, and that it is all that the wrapper changes."""

from __future__ import annotations

import numpy as np
import pytest
from core_script import Script
from hypothesis import given
from hypothesis import strategies as st

from rrfp import Hint, View
from rrfp.core import events as ev
from rrfp.core.ready_set import ReadySet
from rrfp.costs import CostTable, make_costs
from rrfp.engine.engine import run
from rrfp.hints.priorities import BackwardForward
from rrfp.hints.pyramid import LENGTH_PER_STAGE, Pyramids, bfw_pyramid, pyramids, slot_aware_pyramid, step_time
from rrfp.hints.registry import create_hint, create_strict
from rrfp.hints.slot_aware import SlotAware
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import TablePlacement
from rrfp.model.tasks import Kind, Mode, StepId, Task

SIZES = st.lists(st.floats(0, 1e9), min_size=1, max_size=100)


def test_one_pyramid_rises_to_the_largest_and_falls_again() -> None:
    sizes = [5.0, 1.0, 3.0, 6.0, 2.0, 4.0]
    assert [sizes[m] for m in pyramids(sizes, 6)] == [1, 3, 5, 6, 4, 2]


def test_a_longer_step_is_cut_into_runs_in_its_own_order() -> None:
    sizes = [4.0, 3.0, 2.0, 1.0, 40.0, 30.0, 20.0, 10.0]
    assert [sizes[m] for m in pyramids(sizes, 4)] == [1, 3, 4, 2, 10, 30, 40, 20]


@pytest.mark.parametrize(("count", "runs"), [(1, 1), (5, 1), (6, 2), (9, 2), (11, 3)])
def test_the_number_of_runs_is_the_closest_to_the_length(count: int, runs: int) -> None:
    """Sizes rise over the whole step, so every run starts with the smallest of what is left."""
    order = pyramids([float(m) for m in range(count)], 4)
    lows = [m for place, m in enumerate(order) if m == min(order[place:])]
    starts = [run * count // runs for run in range(runs)]
    assert set(starts) <= set(lows)
    assert [sorted(order[a:b]) for a, b in zip(starts, [*starts[1:], count], strict=True)] == [
        list(range(a, b)) for a, b in zip(starts, [*starts[1:], count], strict=True)
    ]


@given(sizes=SIZES, length=st.integers(1, 40))
def test_every_microbatch_comes_once_and_each_run_rises_and_falls(sizes: list[float], length: int) -> None:
    order = pyramids(sizes, length)
    count, runs = len(sizes), max(1, round(len(sizes) / length))
    assert sorted(order) == list(range(count))
    for run_index in range(runs):
        here = [sizes[m] for m in order[run_index * count // runs : (run_index + 1) * count // runs]]
        if here:
            top = here.index(max(here))
            assert here[: top + 1] == sorted(here[: top + 1])
            assert here[top:] == sorted(here[top:], reverse=True)


def opened(hint: Hint, sizes: tuple[float, ...] | None) -> Script:
    """Stage 0 of 1 whose step was opened with sizes."""
    microbatches = len(sizes or (0,) * 4)
    script = Script(TaskGraph.chain(1), microbatches=0, hint=hint)
    script.step = StepId(0, Mode.TRAIN, microbatches)
    script.told(ev.StepOpened(0, Mode.TRAIN, microbatches, sizes))
    return script


def test_a_stage_takes_microbatches_in_that_order() -> None:
    assert opened(bfw_pyramid(), (3.0, 9.0, 1.0)).decisions(6) == "F2@0 B2@0 F1@0 B1@0 F0@0 B0@0"


@pytest.mark.parametrize("sizes", [None, (2.0, 2.0, 2.0, 2.0)])
def test_without_sizes_or_with_equal_ones_it_is_the_wrapped_hint(sizes: tuple[float, ...] | None) -> None:
    plain, wrapped = opened(BackwardForward(), sizes), opened(Pyramids(BackwardForward()), sizes)
    assert wrapped.decisions(8) == plain.decisions(8)


def test_a_pyramid_is_four_microbatches_a_stage_long() -> None:
    sizes = tuple(float(m) for m in range(64))
    for stages in (2, 4):
        script = Script(TaskGraph.chain(stages), microbatches=0, hint=slot_aware_pyramid())
        script.told(ev.StepOpened(0, Mode.TRAIN, 64, sizes))
        order = script.core.hint.microbatch_order(script.core.view)
        assert order == pyramids(sizes, LENGTH_PER_STAGE * stages)


@pytest.mark.parametrize(("measured", "is_one"), [(0.96, True), (1.0, True), (0.95, False), (-1.0, False)])
def test_where_sizes_were_seen_to_order_every_stage_it_is_as_long_as_the_step(measured: float, is_one: bool) -> None:
    sizes = tuple(float(m) for m in range(64))
    script = Script(TaskGraph.chain(2), microbatches=0, hint=slot_aware_pyramid())
    script.told(ev.StepOpened(0, Mode.TRAIN, 64, sizes, measured))
    order = script.core.hint.microbatch_order(script.core.view)
    assert order == pyramids(sizes, 64 if is_one else 8)


def is_ordered_within(rooms: tuple[float | None, ...] | None, sizes: tuple[float, ...]) -> bool:
    """Whether all stages of a chain take pyramids; a ragged opinion is an error."""
    found = set()
    for stage in range(2 if rooms is None else len(rooms)):
        graph = TaskGraph.chain(2 if rooms is None else len(rooms))
        script = Script(graph, stage, microbatches=0, hint=slot_aware_pyramid(), limit=Limit(bytes=100))
        script.told(ev.StepOpened(0, Mode.TRAIN, len(sizes), sizes, byte_rooms=rooms))
        found.add(script.core.hint.microbatch_order(script.core.view) is not None)
    (is_ordered,) = found
    return is_ordered


@pytest.mark.parametrize(
    ("rooms", "is_ordered"),
    [
        (None, True),
        ((4.0, 3.0, 2.0, 1.0), False),
        ((6.0, 4.5, 3.0, 1.5), False),
        ((8.0, 6.0, 4.0, 2.0), True),
        ((None, None, None, 1.0), True),
        ((None, 3.0, None, None), False),
    ],
)
def test_within_few_bytes_microbatches_keep_the_callers_order(
    rooms: tuple[float | None, ...] | None, is_ordered: bool
) -> None:
    """Large ones side by side have to fit on every stage."""
    assert is_ordered_within(rooms, (1.0, 4.0) * 8) == is_ordered


def test_what_matters_is_the_share_of_a_size_not_its_unit() -> None:
    for unit in (1e-320, 1.0, 4e307):
        assert is_ordered_within((8.0, 6.0, 4.0, 2.0), (unit, 4 * unit) * 8)
        assert not is_ordered_within((6.0, 4.5, 3.0, 1.5), (unit, 4 * unit) * 8)


def test_an_order_that_saves_little_is_taken_only_where_bytes_are_many() -> None:
    """By estimate it saves 2% in both rooms; the four largest, 1.6 of the mean each, fit together in the second."""
    assert not is_ordered_within((6.0, 3.0), (1.0, 4.0) * 8)
    assert is_ordered_within((6.4, 6.4), (1.0, 4.0) * 8)


class Filling(Hint):
    """What `step_time` simulates: forwards first while few microbatches are in flight."""

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        in_flight = view.num_enqueued(Kind.F) - view.num_enqueued(Kind.B)
        few = in_flight < view.placement.stages - view.stage
        kinds = (Kind.F, Kind.B, Kind.W) if few else (Kind.B, Kind.F, Kind.W)
        return next(task for kind in kinds if (task := ready.first(kind)) is not None)


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    rooms=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    split=st.booleans(),
)
def test_the_estimate_is_what_the_engine_says_of_stages_of_one_speed(
    sizes: list[int], rooms: list[int], split: bool
) -> None:
    rows = np.array([sizes] * len(rooms), dtype=float)
    none = np.zeros((len(rooms) - 1, len(sizes)))
    backward, weight = (rows, rows) if split else (2 * rows, None)
    costs = CostTable(len(rooms), 1, "looped", len(sizes), rows, backward, weight, none, none, held=rows)
    result = run(costs, [Filling() for _ in rooms], [Limit(bytes=room) for room in rooms])
    assert step_time(sizes, rooms, [split] * len(rooms)) == result.makespan


#: 0 and 1 lead to 2; 0 leads to 1, and 1 may be skipped; each on a stage of its own.
JOINED = TaskGraph(TablePlacement((0, 1, 2)), ((0, 2), (1, 2)))
PASSED_BY = TaskGraph(TablePlacement((0, 1, 2)), ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize(
    ("graph", "limit", "measured", "is_ordered"),
    [
        (JOINED, Limit(bytes=100), None, False),
        (JOINED, Limit(3, bytes=100), 1.0, False),
        (JOINED, Limit(3), None, True),
        (JOINED, None, None, True),
        (PASSED_BY, Limit(bytes=100), None, True),
        (TaskGraph.chain(3), Limit(bytes=100), None, True),
    ],
)
def test_above_joins_bytes_keep_the_order_of_the_caller(
    graph: TaskGraph, limit: Limit | None, measured: float | None, is_ordered: bool
) -> None:
    """All stages agree: also the last one, which no branch joins below."""
    for stage in range(3):
        script = Script(graph, stage, microbatches=0, hint=slot_aware_pyramid(), limit=limit)
        script.told(ev.StepOpened(0, Mode.TRAIN, 6, (3.0, 1.0, 4.0, 1.0, 5.0, 9.0), measured))
        assert (script.core.hint.microbatch_order(script.core.view) is not None) == is_ordered


def test_where_an_order_is_forced_microbatches_keep_their_own() -> None:
    """A pyramid would start microbatches early whose backwards then wait, slots taken, for all lower ones."""
    costs = make_costs("mllm", 4, 16, split=True, seed=1)
    forced = [(Kind.W, v) for v in range(4)]

    def order(hint: str) -> list[str]:
        hints = [create_hint(hint) for _ in range(4)]
        spans = run(costs, hints, [Limit(4)] * 4, sizes=range(16, 0, -1), in_order=forced).spans
        return [str(span.task) for span in spans[0]]

    assert order("slot-aware-pyramid") == order("slot-aware")


class Recorder(Hint):
    """Notes what it is told; orders microbatches backwards."""

    may_wait = True
    wants_split = True

    def __init__(self) -> None:
        self.told: list[str] = []

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        self.told.append("choose")
        return None

    def open_step(self, view: View) -> None:
        self.told.append("open")

    def microbatch_order(self, view: View) -> list[int]:
        return list(range(view.microbatches))[::-1]

    def observe(self, event: ev.Event) -> None:
        self.told.append(type(event).__name__)


def test_the_wrapped_hint_hears_everything_and_may_wait_if_it_might() -> None:
    within = Recorder()
    script = opened(Pyramids(within), None)
    assert script.decisions(1) == "-"
    assert within.told == ["open", "StepOpened", "choose"]


def test_the_wrapped_hints_own_order_holds_where_there_are_no_sizes() -> None:
    assert str(opened(Pyramids(Recorder()), None).core.ready.first(Task.parse("F0@0").kind)) == "F3@0"


def test_it_wants_what_the_wrapped_hint_wants() -> None:
    assert [Pyramids(hint).wants_split for hint in (BackwardForward(), SlotAware())] == [False, True]
    assert Pyramids(create_strict("1f1b")).may_wait
    assert not Pyramids(BackwardForward()).may_wait


@pytest.mark.parametrize("name", ["slot-aware-pyramid", "bfw-pyramid"])
def test_a_name_gives_a_fresh_wrapper_around_a_fresh_hint(name: str) -> None:
    first, second = create_hint(name), create_hint(name)
    assert isinstance(first, Pyramids)
    assert isinstance(second, Pyramids)
    assert first is not second
    assert first.within is not second.within
    assert isinstance(first.within, SlotAware if "slot" in name else BackwardForward)


@given(
    sizes=st.lists(st.floats(0, 10), min_size=1, max_size=12),
    stages=st.integers(1, 4),
    chunks=st.integers(1, 2),
    split=st.booleans(),
    limit=st.one_of(st.none(), st.integers(1, 6)),
    name=st.sampled_from(["slot-aware-pyramid", "bfw-pyramid"]),
    seed=st.integers(0, 1000),
)
def test_every_run_ends_within_its_limit_whatever_the_sizes(
    sizes: list[float], stages: int, chunks: int, split: bool, limit: int | None, name: str, seed: int
) -> None:
    """Sizes need not say anything about costs."""
    costs = make_costs("mllm", stages, len(sizes), chunks=chunks, split=split, seed=seed, jitter="J3", latency="spike")
    result = run(costs, [create_hint(name) for _ in range(stages)], [Limit(limit)] * stages, sizes=sizes)
    assert [len(spans) for spans in result.spans] == [len(sizes) * chunks * (3 if split else 2)] * stages
    if limit is not None:
        assert max(peak.held for peak in result.peaks) <= limit * chunks
