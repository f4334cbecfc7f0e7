"""A step that ran, as a schedule: only for a step like it, and what differs is named with its task."""

from __future__ import annotations

from typing import Any

import pytest
from core_script import T

from rrfp.errors import ConfigError
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import TablePlacement
from rrfp.model.tasks import Kind, Mode
from rrfp.model.visits import Visits
from rrfp.schedules.executed import ExecutedSchedule
from rrfp.schedules.registry import make_schedule

CHAIN = TaskGraph.chain(2)
TEXTS = "F1@0 F0@0 B0@0 B1@0", "F1@1 F0@1 B0@1 B1@1"
BRANCH = TaskGraph(TablePlacement((0, 1, 1)), ((0, 2), (1, 2)))
#: Microbatch 0 skips virtual stage 1.
PARTIAL = Visits(2, (frozenset({1}), frozenset()))
PARTIAL_TEXTS = "F0@0 F1@0 B0@0 B1@0", "F1@1 F0@2 B0@2 F1@2 B1@2 B1@1"


ALL = Visits(2)


def executed(*texts: str, graph: TaskGraph = CHAIN, visits: Visits = ALL) -> ExecutedSchedule:
    return ExecutedSchedule("logs, step 3", graph, visits, tuple(tuple(map(T, text.split())) for text in texts))


def test_a_step_like_it_gets_its_order() -> None:
    schedule = executed(*TEXTS)
    assert schedule.for_step(CHAIN, 2).orders == schedule.orders == make_schedule(schedule, CHAIN, 2).orders


def test_microbatches_that_skip_run_no_task_there() -> None:
    schedule = executed(*PARTIAL_TEXTS, graph=BRANCH, visits=PARTIAL)
    assert schedule.for_step(BRANCH, 2, PARTIAL).orders == schedule.orders
    with pytest.raises(ConfigError, match="F0@1 is of a microbatch that skips this virtual stage"):
        executed("F0@0 F1@0 B0@0 B1@0", f"F0@1 {PARTIAL_TEXTS[1]}", graph=BRANCH, visits=PARTIAL)
    with pytest.raises(ConfigError, match="stage 1 misses 1 task"):
        executed("F0@0 F1@0 B0@0 B1@0", PARTIAL_TEXTS[1].replace(" B1@1", ""), graph=BRANCH, visits=PARTIAL)


def test_an_evaluation_runs_microbatch_by_microbatch() -> None:
    schedule = executed(*PARTIAL_TEXTS, graph=BRANCH, visits=PARTIAL)
    visits = Visits(3, (frozenset(), frozenset({1}), frozenset()))
    assert [*map(str, schedule.for_step(BRANCH, 3, visits, Mode.FORWARD).orders[1])] == [
        *("F0@1", "F0@2", "F1@2", "F2@1", "F2@2")
    ]


@pytest.mark.parametrize(
    ("graph", "microbatches", "visits", "reason"),
    [
        (CHAIN, 1, None, "F1@0 on stage 0: microbatches is 1, was 2 in the log"),
        (CHAIN, 3, None, "F2@0 on stage 0: microbatches is 3, was 2 in the log"),
        (TaskGraph.chain(2, split=True), 2, None, r"W0@0 on stage 0: split, by virtual stage, is \(True, True\), was"),
        (
            TaskGraph(TablePlacement((0, 0))),
            2,
            None,
            r"F1@1 on stage 1: the stage of each virtual stage is \(0, 0\), was",
        ),
        (
            CHAIN,
            2,
            Visits(2, (frozenset({1}), frozenset())),
            r"B0@0 on stage 0: skipped, .* is \[\[1\], \[\]\], was \[\]",
        ),
    ],
)
def test_another_step_is_refused_with_the_first_task_that_differs(
    graph: TaskGraph, microbatches: int, visits: Any, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"replay logs, step 3 cannot go on with {reason}"):
        executed(*TEXTS).for_step(graph, microbatches, visits)


def test_another_edge_is_a_difference() -> None:
    straight = TaskGraph(TablePlacement((0, 1, 1)), ((0, 1), (1, 2)))
    schedule = executed("F0@0 B0@0", "F0@1 F0@2 B0@2 B0@1", graph=BRANCH, visits=Visits(1))
    with pytest.raises(
        ConfigError, match=r"cannot go on with B0@0 on stage 0: the list of edges is .* was .* in the log"
    ):
        schedule.for_step(straight, 1)


def test_a_forced_order_that_it_did_not_keep_is_named() -> None:
    schedule = executed(*TEXTS)
    schedule.check_order([(Kind.B, 0), (Kind.B, 1)])
    with pytest.raises(ConfigError, match="cannot go on with F1@1 on stage 1: it ran before F0@1, and this pipeline"):
        schedule.check_order([(Kind.F, 1)])


def test_orders_that_cannot_have_run_are_refused() -> None:
    with pytest.raises(ConfigError, match="deadlocks: stage 0, entry 1: B1@0 waits for B1@1"):
        executed("F1@0 B1@0 F0@0 B0@0", "F0@1 F1@1 B0@1 B1@1")
