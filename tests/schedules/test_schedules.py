"""Schedules are printable data: golden orders, what they hold, and what is wrong with a wrong one."""

from __future__ import annotations

import pytest
from core_script import T

from rrfp.core.graph import Graph
from rrfp.core.schedule import Schedule
from rrfp.core.tasks import Mode
from rrfp.core.topology import Placement
from rrfp.errors import ConfigError
from rrfp.schedules.registry import make_schedule, schedule_names


def schedule_of(*orders: str) -> Schedule:
    return Schedule("mine", tuple(tuple(map(T, order.split())) for order in orders))


def test_the_known_schedules() -> None:
    assert schedule_names() == ("gpipe", "1f1b")


def test_gpipe_runs_all_forwards_then_all_backwards() -> None:
    assert str(make_schedule("gpipe", Graph.chain(2), 3)) == (
        "stage 0: F0@0 F1@0 F2@0 B0@0 B1@0 B2@0\n"  #
        "stage 1: F0@1 F1@1 F2@1 B0@1 B1@1 B2@1"
    )


def test_1f1b_warms_up_and_then_alternates() -> None:
    assert str(make_schedule("1f1b", Graph.chain(3), 4)) == (
        "stage 0: F0@0 F1@0 F2@0 B0@0 F3@0 B1@0 B2@0 B3@0\n"
        "stage 1: F0@1 F1@1 B0@1 F2@1 B1@1 F3@1 B2@1 B3@1\n"
        "stage 2: F0@2 B0@2 F1@2 B1@2 F2@2 B2@2 F3@2 B3@2"
    )


def test_1f1b_with_fewer_microbatches_than_stages() -> None:
    assert str(make_schedule("1f1b", Graph.chain(3), 1)) == "stage 0: F0@0 B0@0\nstage 1: F0@1 B0@1\nstage 2: F0@2 B0@2"


def test_a_split_stage_runs_each_weight_task_right_after_its_backward() -> None:
    graph = Graph(Placement(2), split=(False, True))
    assert str(make_schedule("1f1b", graph, 2)) == (
        "stage 0: F0@0 F1@0 B0@0 B1@0\n"  #
        "stage 1: F0@1 B0@1 W0@1 F1@1 B1@1 W1@1"
    )


def test_a_weight_task_that_a_schedule_places_stays_where_it_is() -> None:
    placed = schedule_of("F0@0 F1@0 B0@0 B1@0 W0@0 W1@0")
    assert placed.with_weights(Graph.chain(1, split=True)) == placed


@pytest.mark.parametrize(("name", "peaks"), [("gpipe", [6, 6, 6, 6]), ("1f1b", [4, 3, 2, 1])])
@pytest.mark.parametrize("split", [False, True])
def test_what_a_schedule_holds(name: str, peaks: list[int], split: bool) -> None:
    graph = Graph.chain(4, split=split)
    assert [make_schedule(name, graph, 6).peak_held(stage, graph) for stage in range(4)] == peaks


def test_a_late_weight_task_holds_its_microbatch() -> None:
    order = schedule_of("F0@0 B0@0 F1@0 B1@0 W0@0 W1@0")
    assert order.peak_held(0, Graph.chain(1, split=True)) == 2
    assert schedule_of("F0@0 B0@0 F1@0 B1@0").peak_held(0, Graph.chain(1)) == 1


def test_forward_only_keeps_the_order_of_forwards() -> None:
    assert schedule_of("F1@0 B1@0 F0@0 B0@0").forward_only() == schedule_of("F1@0 F0@0")


def test_a_forward_only_schedule_validates_in_that_mode() -> None:
    orders = schedule_of("F1@0 F0@0", "F0@1 F1@1")
    assert orders.validate(Graph.chain(2), 2, Mode.FORWARD) is orders


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
        schedule_of(*orders).validate(Graph.chain(2), 1)
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
        schedule_of(*orders).validate(Graph.chain(2), microbatches)
    assert str(caught.value) == f"schedule mine deadlocks: {message}"


def test_an_unknown_schedule_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError) as caught:
        make_schedule("dualpipe", Graph.chain(2), 2)
    assert str(caught.value) == "schedule is 'dualpipe', must be one of: gpipe, 1f1b"


def test_a_schedule_for_one_chunk_refuses_more() -> None:
    with pytest.raises(ConfigError) as caught:
        make_schedule("1f1b", Graph.chain(2, chunks=2), 2)
    assert str(caught.value) == "schedule 1f1b takes 1 chunk a stage, the placement has 2"
