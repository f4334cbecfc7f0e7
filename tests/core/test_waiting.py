"""Why a stage waits, and what for."""

from __future__ import annotations

from core_script import Script, T

from rrfp.core.events import ChunkReduced, Completed
from rrfp.core.graph import Graph
from rrfp.core.order_log import Group
from rrfp.core.tasks import Kind, Mode, StepId
from rrfp.core.usage import WaitCause

CHAIN = Graph.chain(3)
LEADER, FOLLOWER = Group(0, 2), Group(1, 2)


def test_a_stage_without_inputs_waits_for_input() -> None:
    assert Script(CHAIN, stage=1).core.wait_cause() is WaitCause.INPUT


def test_a_forward_that_the_limit_keeps_out_waits_for_memory() -> None:
    script = Script(CHAIN, stage=0, limit=1)
    script.ran("F0@0")
    assert script.core.wait_cause() is WaitCause.MEMORY


def test_a_stage_whose_tasks_were_all_enqueued_is_drained() -> None:
    script = Script(Graph.chain(1), microbatches=1)
    script.enqueued("F0@0", "B0@0")
    assert script.core.wait_cause() is WaitCause.DRAINED


def test_a_stage_outside_any_step_is_drained() -> None:
    assert Script(CHAIN, microbatches=0).core.wait_cause() is WaitCause.DRAINED


def test_a_forced_order_is_an_input_like_any_other() -> None:
    script = Script(Graph.chain(2), stage=1, microbatches=2, in_order=((Kind.B, 1),))
    script.arrived("F1@0")
    script.ran("F1@1")
    assert script.core.wait_cause() is WaitCause.INPUT


def test_a_leader_that_lacks_a_report_waits_for_the_order() -> None:
    script = Script(CHAIN, stage=1, group=LEADER)
    assert script.core.wait_cause() is WaitCause.INPUT
    script.arrived("F0@0")
    assert script.core.wait_cause() is WaitCause.ORDER


def test_a_leader_at_its_limit_waits_for_memory_and_not_for_the_order() -> None:
    script = Script(CHAIN, stage=0, limit=1, group=LEADER)
    script.ran("F0@0")
    assert script.core.wait_cause() is WaitCause.MEMORY


def test_a_follower_that_has_inputs_and_no_word_waits_for_the_order() -> None:
    script = Script(CHAIN, stage=1, group=FOLLOWER)
    assert script.core.wait_cause() is WaitCause.INPUT
    script.arrived("F0@0")
    assert script.core.wait_cause() is WaitCause.ORDER


def test_awaited_names_the_absent_inputs_lowest_microbatch_first() -> None:
    script = Script(CHAIN, stage=1)
    script.arrived("F1@0")
    assert script.core.awaited() == [
        (T("F0@1"), (T("F0@0"),)),
        (T("B0@1"), (T("F0@1"), T("B0@2"))),
        (T("F1@1"), ()),
        (T("B1@1"), (T("F1@1"), T("B1@2"))),
    ]


def test_awaited_leaves_out_what_was_enqueued_and_names_the_microbatch_before_in_a_forced_order() -> None:
    script = Script(Graph.chain(1), in_order=((Kind.B, 0),))
    script.enqueued("F0@0", "F1@0")
    assert script.core.awaited() == [(T("B0@0"), ()), (T("B1@0"), (T("B0@0"),))]


def test_awaited_gives_no_more_than_asked_for() -> None:
    script = Script(CHAIN, stage=2, microbatches=100)
    assert script.core.awaited(2) == [(T("F0@2"), (T("F0@1"),)), (T("B0@2"), (T("F0@2"),))]
    assert len(script.core.awaited()) == 8
    assert Script(CHAIN, microbatches=0).core.awaited() == []


def test_the_view_shows_progress() -> None:
    script = Script(Graph.chain(2, chunks=2), stage=1, microbatches=2, limit=3)
    script.arrived("F0@0", "F0@2")
    script.ran("F0@1", "F0@3", held=5)
    view = script.core.view
    assert (view.stage, view.microbatches, view.slots, view.held, view.held_bytes) == (1, 2, 6, 2, 10)
    assert (view.last_kind, view.num_enqueued_total) == (Kind.F, 2)
    assert [view.num_enqueued(Kind.F), view.num_enqueued(Kind.F, 1), view.num_enqueued(Kind.B)] == [2, 1, 0]
    assert (view.mean_seconds(Kind.F, 0), view.mean_seconds(Kind.B, 0)) == (0.0, None)


def test_measured_durations_are_averaged_by_kind_and_chunk_and_outlive_the_step() -> None:
    script = Script(Graph.chain(1), microbatches=1)
    for step, seconds in enumerate((1.0, 4.0)):
        if step:
            script.opened(StepId(step, Mode.TRAIN, 1))
        script.enqueued("F0@0")
        script.told(Completed(T("F0@0"), seconds=seconds))
        script.ran("B0@0")
        script.told(ChunkReduced(0))
    view = script.core.view
    assert (view.mean_seconds(Kind.F, 0), view.mean_seconds(Kind.B, 0)) == (2.5, 0.0)
