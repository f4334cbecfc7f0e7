"""Schedules are printable data: golden orders, what they hold, and what is wrong with a wrong one."""

from __future__ import annotations

import pytest
from core_script import T

from rrfp.errors import ConfigError
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Placement, TablePlacement
from rrfp.model.schedule import Schedule
from rrfp.model.tasks import Mode
from rrfp.schedules.registry import make_schedule, schedule_names


def schedule_of(*orders: str) -> Schedule:
    return Schedule("mine", tuple(tuple(map(T, order.split())) for order in orders))


def test_the_known_schedules() -> None:
    assert schedule_names() == ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v")


def test_gpipe_runs_all_forwards_then_all_backwards() -> None:
    assert str(make_schedule("gpipe", TaskGraph.chain(2), 3)) == (
        "stage 0: F0@0 F1@0 F2@0 B0@0 B1@0 B2@0\n"  #
        "stage 1: F0@1 F1@1 F2@1 B0@1 B1@1 B2@1"
    )


def test_1f1b_warms_up_and_then_alternates() -> None:
    assert str(make_schedule("1f1b", TaskGraph.chain(3), 4)) == (
        "stage 0: F0@0 F1@0 F2@0 B0@0 F3@0 B1@0 B2@0 B3@0\n"
        "stage 1: F0@1 F1@1 B0@1 F2@1 B1@1 F3@1 B2@1 B3@1\n"
        "stage 2: F0@2 B0@2 F1@2 B1@2 F2@2 B2@2 F3@2 B3@2"
    )


def test_1f1b_with_fewer_microbatches_than_stages() -> None:
    assert (
        str(make_schedule("1f1b", TaskGraph.chain(3), 1))
        == "stage 0: F0@0 B0@0\nstage 1: F0@1 B0@1\nstage 2: F0@2 B0@2"
    )


def test_interleaved_1f1b_with_one_chunk_is_1f1b() -> None:
    for stages, microbatches in ((1, 3), (3, 1), (3, 4), (4, 7)):
        graph = TaskGraph.chain(stages)
        expected = make_schedule("1f1b", graph, microbatches)
        assert make_schedule("interleaved-1f1b", graph, microbatches).orders == expected.orders


def test_interleaved_1f1b_takes_groups_of_n_through_the_chunks() -> None:
    """Four virtual stages, two groups of two; stage 1 warms up with (C - 1) N = 2 forwards, stage 0 with 2 more."""
    assert str(make_schedule("interleaved-1f1b", TaskGraph.chain(2, chunks=2), 4)) == (
        "stage 0: F0@0 F1@0 F0@2 F1@2 F2@0 B0@2 F3@0 B1@2 F2@2 B0@0 F3@2 B1@0 B2@2 B3@2 B2@0 B3@0\n"
        "stage 1: F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 F2@1 B0@1 F3@1 B1@1 F2@3 B2@3 F3@3 B3@3 B2@1 B3@1"
    )


def test_the_last_group_of_interleaved_1f1b_may_be_shorter() -> None:
    """As above without microbatch 3."""
    assert str(make_schedule("interleaved-1f1b", TaskGraph.chain(2, chunks=2), 3)) == (
        "stage 0: F0@0 F1@0 F0@2 F1@2 F2@0 B0@2 B1@2 F2@2 B0@0 B1@0 B2@2 B2@0\n"
        "stage 1: F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 F2@1 B0@1 B1@1 F2@3 B2@3 B2@1"
    )


def test_zb_h1_defers_the_weight_tasks_of_later_stages() -> None:
    """F and B as in 1F1B; W of m after B of m + i on stage i."""
    assert str(make_schedule("zb-h1", TaskGraph.chain(3, split=True), 4)) == (
        "stage 0: F0@0 F1@0 F2@0 B0@0 W0@0 F3@0 B1@0 W1@0 B2@0 W2@0 B3@0 W3@0\n"
        "stage 1: F0@1 F1@1 B0@1 F2@1 B1@1 W0@1 F3@1 B2@1 W1@1 B3@1 W2@1 W3@1\n"
        "stage 2: F0@2 B0@2 F1@2 B1@2 F2@2 B2@2 W0@2 F3@2 B3@2 W1@2 W2@2 W3@2"
    )


def test_zb_v_goes_down_one_arm_and_up_the_other() -> None:
    assert str(make_schedule("zb-v", TaskGraph.chain(2, chunks=2, layout="v", split=True), 3)) == (
        "stage 0: F0@0 F1@0 F2@0 F0@3 B0@3 W0@3 F1@3 B1@3 W1@3 B0@0 W0@0 F2@3 B2@3 W2@3 B1@0 W1@0 B2@0 W2@0\n"
        "stage 1: F0@1 F0@2 F1@1 F1@2 B0@2 W0@2 F2@1 B0@1 W0@1 F2@2 B1@2 W1@2 B1@1 B2@2 B2@1 W1@1 W2@2 W2@1"
    )


@pytest.mark.parametrize(
    ("name", "graph"),
    [
        ("zb-h1", TaskGraph(Placement(2), split=(False, True))),
        ("zb-v", TaskGraph(Placement(2, 2, "v"), split=(True, False, True, False))),
    ],
)
def test_weight_tasks_are_placed_where_backward_is_split(name: str, graph: TaskGraph) -> None:
    whole = make_schedule(name, TaskGraph(graph.placement, split=(True,) * len(graph.split)), 4)
    kept = [[t for t in order if t.kind != "W" or graph.split[t.virtual_stage]] for order in whole.orders]
    assert list(map(list, make_schedule(name, graph, 4).orders)) == kept


def test_a_split_stage_runs_each_weight_task_right_after_its_backward() -> None:
    graph = TaskGraph(Placement(2), split=(False, True))
    assert str(make_schedule("1f1b", graph, 2)) == (
        "stage 0: F0@0 F1@0 B0@0 B1@0\n"  #
        "stage 1: F0@1 B0@1 W0@1 F1@1 B1@1 W1@1"
    )


def test_a_weight_task_that_a_schedule_places_stays_where_it_is() -> None:
    placed = schedule_of("F0@0 F1@0 B0@0 B1@0 W0@0 W1@0")
    assert placed.with_local_tasks(TaskGraph.chain(1, split=True)) == placed


@pytest.mark.parametrize(("name", "peaks"), [("gpipe", [6, 6, 6, 6]), ("1f1b", [4, 3, 2, 1])])
@pytest.mark.parametrize("split", [False, True])
def test_what_a_schedule_holds(name: str, peaks: list[int], split: bool) -> None:
    graph = TaskGraph.chain(4, split=split)
    assert [make_schedule(name, graph, 6).peak_held(stage, graph) for stage in range(4)] == peaks


def test_a_late_weight_task_holds_its_microbatch() -> None:
    order = schedule_of("F0@0 B0@0 F1@0 B1@0 W0@0 W1@0")
    assert order.peak_held(0, TaskGraph.chain(1, split=True)) == 2
    assert schedule_of("F0@0 B0@0 F1@0 B1@0").peak_held(0, TaskGraph.chain(1)) == 1


def test_forward_only_keeps_the_order_of_forwards() -> None:
    assert schedule_of("F1@0 B1@0 F0@0 B0@0").forward_only() == schedule_of("F1@0 F0@0")


def test_a_forward_only_schedule_validates_in_that_mode() -> None:
    orders = schedule_of("F1@0 F0@0", "F0@1 F1@1")
    assert orders.validate(TaskGraph.chain(2), 2, Mode.FORWARD) is orders


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        (("F0@0 B0@0",), "has 1 stages, must have 2"),
        (("F0@0 B0@0", "F0@1 B0@1 B0@0"), "stage 1, entry 2: B0@0 does not run on this stage"),
        (("F0@0 B0@0", "F1@1 B0@1"), "stage 1, entry 0: F1@1 does not run on this stage"),
        (("F0@0 B0@0 W0@0", "F0@1 B0@1"), "stage 0, entry 2: W0@0 does not run on this stage"),
        (("F0@0 F0@0 B0@0", "F0@1 B0@1"), "stage 0, entry 0: F0@0 occurs 2 times"),
        (("F0@0 B0@0", "F0@1"), "stage 1 misses 1 task(s), the first is B0@1"),
        (("", ""), "stage 0 misses 2 task(s), the first is B0@0"),
    ],
)
def test_a_wrong_schedule_is_refused_with_stage_and_entry(orders: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        schedule_of(*orders).validate(TaskGraph.chain(2), 1)
    assert str(caught.value) == f"schedule mine: {message}"


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        (("B0@0 F0@0", "F0@1 B0@1"), "stage 0, entry 0: B0@0 waits for F0@0"),
        (("F0@0 B0@0 F1@0 B1@0", "F0@1 F1@1 B0@1 B1@1"), "stage 0, entry 1: B0@0 waits for B0@1"),
    ],
)
def test_a_schedule_that_deadlocks_is_refused_with_stage_and_entry(orders: tuple[str, ...], message: str) -> None:
    microbatches = sum(entry.startswith("F") for entry in orders[0].split())
    with pytest.raises(ConfigError) as caught:
        schedule_of(*orders).validate(TaskGraph.chain(2), microbatches)
    assert str(caught.value) == f"schedule mine deadlocks: {message}"


def test_an_unknown_schedule_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError) as caught:
        make_schedule("dualpipe", TaskGraph.chain(2), 2)
    choices = "gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-v"
    assert str(caught.value) == f"schedule is 'dualpipe', must be one of: {choices}"


@pytest.mark.parametrize(
    ("name", "graph", "message"),
    [
        ("gpipe", TaskGraph.chain(2, chunks=3), "gpipe takes 1 chunk a stage; the graph has 3 chunks a stage"),
        ("1f1b", TaskGraph.chain(2, chunks=2), "1f1b takes 1 chunk a stage; the graph has 2 chunks a stage"),
        (
            "interleaved-1f1b",
            TaskGraph.chain(2, chunks=2, layout="v"),
            "interleaved-1f1b takes looped placement; the graph has v placement",
        ),
        (
            "zb-h1",
            TaskGraph.chain(2),
            "zb-h1 takes 1 chunk a stage, split backward; the graph has unsplit backward (split=True splits it)",
        ),
        (
            "zb-h1",
            TaskGraph.chain(2, chunks=2, split=True),
            "zb-h1 takes 1 chunk a stage, split backward; the graph has 2 chunks a stage",
        ),
        (
            "zb-v",
            TaskGraph.chain(2, chunks=2),
            "zb-v takes 2 chunks a stage, v placement, split backward; the graph has looped placement, "
            "unsplit backward (split=True splits it)",
        ),
        (
            "zb-v",
            TaskGraph.chain(2, split=True),
            "zb-v takes 2 chunks a stage, v placement, split backward; the graph has 1 chunk a stage",
        ),
        (
            "1f1b",
            TaskGraph(TablePlacement((0, 1, 2)), ((0, 2), (1, 2))),
            "1f1b takes a chain with equally many chunks on each stage; the graph has branches: choose another hint, "
            "or a schedule file made for it",
        ),
        (
            "interleaved-1f1b",
            TaskGraph(TablePlacement((0, 1, 0))),
            "interleaved-1f1b takes a chain with equally many chunks on each stage; the graph has stages of 1 to 2 "
            "chunks: choose another hint, or a schedule file made for it",
        ),
    ],
)
def test_a_graph_that_a_schedule_is_not_made_for_is_refused(name: str, graph: TaskGraph, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_schedule(name, graph, 2)
    assert str(caught.value) == f"schedule {message}"


def test_with_one_chunk_every_placement_is_looped() -> None:
    flat, folded = TaskGraph.chain(3), TaskGraph.chain(3, layout="v")
    assert make_schedule("interleaved-1f1b", folded, 4) == make_schedule("interleaved-1f1b", flat, 4)
