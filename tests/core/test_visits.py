"""Microbatches that skip virtual stages: what does not exist is neither run nor sent nor awaited."""

from __future__ import annotations

import pytest
from core_script import Script, T

from rrfp import Topology
from rrfp.core.events import (
    Arrived,
    ChunkReduced,
    Credit,
    FinishStep,
    Ordered,
    Previewed,
    ReadyReported,
    ReduceChunk,
    Send,
    StepOpened,
)
from rrfp.core.group_step import GroupMembership
from rrfp.core.ready_set import DrainOrder
from rrfp.core.waiting import describe
from rrfp.errors import ConfigError, ProtocolError
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Placement, TablePlacement
from rrfp.model.tasks import Kind, Mode, StepId
from rrfp.model.visits import Visits

#: Two sources and a sink, each on a stage of its own; all on one; and a chain with an edge round its middle.
APART = TaskGraph(Placement(3), ((0, 2), (1, 2)))
TOGETHER = TaskGraph(TablePlacement((0, 0, 0)), ((0, 2), (1, 2)))
AROUND = TaskGraph(Placement(3), ((0, 1), (0, 2), (1, 2)))


def test_a_task_waits_for_what_its_microbatch_visits() -> None:
    script = Script(APART, 2, skipped=[{0}, {1}])
    script.arrived("F0@1")
    assert script.ready == "F0@2"
    script.arrived("F1@0")
    assert script.ready == "F0@2 F1@2"


def test_a_task_without_any_input_left_is_ready_at_once() -> None:
    assert Script(APART, 2, skipped=[(), {0, 1}]).ready == "F1@2"


def test_outputs_go_to_those_who_visit() -> None:
    script = Script(AROUND, 0, 3, skipped=[(), {1}, {2}])
    sent = [i for i in script.ran("F0@0", "F1@0", "F2@0") if isinstance(i, Send)]
    assert sent == [Send(T("F0@0"), 1), Send(T("F0@0"), 2), Send(T("F1@0"), 2), Send(T("F2@0"), 1)]
    script.arrived("B1@2", "B2@1")
    assert script.ready == "B1@0 B2@0"


def test_a_backward_whose_readers_are_all_skipped_needs_its_forward_alone() -> None:
    script = Script(AROUND, 0, skipped=[{1, 2}, ()])
    script.ran("F0@0")
    assert script.ready == "F1@0 B0@0"


def test_a_step_ends_without_the_tasks_that_do_not_exist() -> None:
    script = Script(TOGETHER, skipped=[{0}, {1}])
    ended = script.ran(*["F0@1", "F1@0", "F0@2", "F1@2", "B0@2", "B1@2", "B0@1", "B1@0"])
    assert [i for i in ended if isinstance(i, ReduceChunk)] == [ReduceChunk(2), ReduceChunk(1), ReduceChunk(0)]
    assert script.core.step is not None
    assert script.core.step.num_tasks == 8


def test_what_nobody_visits_is_reduced_when_the_step_opens() -> None:
    script = Script(TOGETHER, skipped=[{0}, {0}])
    assert script.begun == [ReduceChunk(0)]


@pytest.mark.parametrize("mode", Mode)
def test_a_stage_that_nobody_visits_is_done_at_once(mode: Mode) -> None:
    script = Script(APART, 0, mode=mode, skipped=[{0}, {0}])
    if mode is Mode.FORWARD:
        assert script.begun == [FinishStep(script.step)]
    else:
        assert script.begun == [ReduceChunk(0)]


def test_a_forced_order_passes_over_what_is_skipped() -> None:
    script = Script(TaskGraph.chain(1, chunks=2), microbatches=4, in_order=((Kind.F, 1),), skipped=[{1}, (), {1}, ()])
    script.ran("F3@0", "F1@0")
    assert script.ready == "F1@1 F0@0 F2@0"
    script.ran("F1@1")
    assert script.ready == "F3@1 F0@0 F2@0 B1@1"


def test_forward_only_a_slot_is_free_at_once_where_no_reader_visits() -> None:
    script = Script(AROUND, 0, 3, Mode.FORWARD, limit=1, skipped=[{1, 2}, (), ()])
    script.ran("F0@0", "F1@0")
    script.consumed(2, "F1@0")
    assert script.ready == ""
    script.consumed(1, "F1@0")
    assert script.ready == "F2@0"


def test_forward_only_the_last_reader_that_visits_gives_the_credit() -> None:
    graph = TaskGraph(TablePlacement((0, 1, 1)), ((0, 1), (0, 2)))
    script = Script(graph, 1, mode=Mode.FORWARD, skipped=[{2}, ()])
    script.arrived("F0@0", "F1@0")
    assert [i for i in script.ran("F0@1") if isinstance(i, Credit)] == [Credit(0, T("F0@0"))]
    assert [i for i in script.ran("F1@1") if isinstance(i, Credit)] == []
    assert [i for i in script.ran("F1@2") if isinstance(i, Credit)] == [Credit(0, T("F1@0"))]


def test_received_inputs_are_those_that_a_visiting_reader_has_not_used() -> None:
    graph = TaskGraph(TablePlacement((0, 1, 1)), ((0, 1), (0, 2)))
    script = Script(graph, 1, skipped=[{2}, ()])
    script.arrived("F0@0", "F1@0")
    assert script.core.holding.received == 2
    script.ran("F0@1", "F1@1")
    assert script.core.holding.received == 1


def test_what_does_not_exist_is_refused() -> None:
    script = Script(APART, 2, skipped=[{0}, {2}])
    for event, message in (
        (Arrived(script.step, T("F0@0")), "F0@0 arrived, which nothing on stage 2 reads"),
        (Arrived(script.step, T("F1@0")), "F1@0 arrived, which nothing on stage 2 reads"),
        (Previewed(T("F1@2")), "F1@2 was previewed, which is no forward of stage 2"),
    ):
        with pytest.raises(ProtocolError, match=message):
            script.told(event)
    with pytest.raises(ProtocolError, match="F1@2 was enqueued on stage 2 without its inputs, or twice"):
        script.enqueued("F1@2")


def test_a_group_reports_and_orders_what_exists() -> None:
    follower = Script(APART, 2, group=GroupMembership(1, 2), skipped=[{0}, {2}])
    assert [str(i.task) for i in follower.arrived("F0@1")] == ["F0@2"]  # type: ignore[union-attr]
    with pytest.raises(ProtocolError, match="F1@2 was ordered, which does not run on stage 2"):
        follower.told(Ordered(follower.step, 0, T("F1@2")))
    leader = Script(APART, 2, group=GroupMembership(0, 2), skipped=[{0}, {0, 1}])
    assert leader.ready == "F1@2"  # it needs nothing from elsewhere
    leader.arrived("F0@1")
    leader.told(ReadyReported(leader.step, 1, T("F0@2")))
    assert leader.ready == "F0@2 F1@2"


def test_a_stall_report_names_only_what_is_visited() -> None:
    script = Script(APART, 2, skipped=[{0}, {2}])
    assert describe(script.core, Topology(2, 3)) == ["F0@2 (F0@1 owed by stage 1)", "B0@2 (F0@2 owed by stage 2)"]


def test_the_papers_order_of_a_full_stage_passes_over_what_is_skipped() -> None:
    order = DrainOrder((0, 3), [(Kind.F, Kind.B)] * 2, Visits(3, (frozenset({0, 3}), frozenset({0}), frozenset())))
    seen = []
    while (due := order.due()) is not None:
        seen.append(str(due))
        order.note(due)
    assert seen == ["F1@3", "B1@3", "F2@0", "F2@3", "B2@3", "B2@0"]


def test_the_next_step_may_visit_other_virtual_stages() -> None:
    script = Script(TaskGraph.chain(1, chunks=2), microbatches=1, skipped=[{1}])
    script.ran("F0@0", "B0@0")
    script.told(ChunkReduced(0), ChunkReduced(1))
    script.skipped = ()
    script.opened(StepId(1, Mode.TRAIN, 1))
    script.ran("F0@0")
    assert script.ready == "F0@1"


def test_skips_of_another_number_of_microbatches_are_refused() -> None:
    script = Script(APART, microbatches=0)
    with pytest.raises(ConfigError, match="visits are of 1 microbatches, must be of 2"):
        script.told(StepOpened(0, Mode.TRAIN, 2, visits=Visits(1)))


def test_the_old_name_of_what_microbatches_visit_warns_and_says_the_same() -> None:
    view = Script(APART, 2, skipped=[{0}, {1}]).core.view
    with pytest.warns(DeprecationWarning, match="view.skipped is now view.visits.skipped"):
        assert view.skipped == (frozenset({0}), frozenset({1})) == view.visits.skipped
