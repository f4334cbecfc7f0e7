"""Why a stage waits, and what for."""

from __future__ import annotations

from core_script import Script, T

from rrfp import Topology
from rrfp.core.events import ChunkReduced, Completed, Ordered, ReadyReported
from rrfp.core.group_step import GroupMembership
from rrfp.core.usage import WaitCause
from rrfp.core.waiting import Waiting, describe, unconsumed, waiting
from rrfp.model.graph import TaskGraph
from rrfp.model.mesh import Mesh
from rrfp.model.placement import TablePlacement
from rrfp.model.tasks import Kind, Mode, StepId

CHAIN = TaskGraph.chain(3)
LEADER, FOLLOWER = GroupMembership(0, 2), GroupMembership(1, 2)


def lines(script: Script, rank: int = 0, stages: int = 3, tp: int = 1) -> list[str]:
    """What a report says of the script's core, as ``rank`` of a job of ``stages`` by ``tp`` ranks."""
    return describe(script.core, Topology.at(rank, Mesh((("pp", stages), ("tp", tp)))))


def test_a_stage_without_inputs_waits_for_input() -> None:
    assert Script(CHAIN, stage=1).core.wait_cause() is WaitCause.INPUT


def test_a_forward_that_the_limit_keeps_out_waits_for_memory() -> None:
    script = Script(CHAIN, stage=0, limit=1)
    script.ran("F0@0")
    assert script.core.wait_cause() is WaitCause.MEMORY


def test_a_stage_whose_tasks_were_all_enqueued_is_drained() -> None:
    script = Script(TaskGraph.chain(1), microbatches=1)
    script.enqueued("F0@0", "B0@0")
    assert script.core.wait_cause() is WaitCause.DRAINED


def test_a_stage_outside_any_step_is_drained() -> None:
    assert Script(CHAIN, microbatches=0).core.wait_cause() is WaitCause.DRAINED


def test_a_forced_order_is_an_input_like_any_other() -> None:
    script = Script(TaskGraph.chain(2), stage=1, microbatches=2, in_order=((Kind.B, 1),))
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


def test_what_was_not_enqueued_waits_for_its_absent_inputs_lowest_microbatch_first() -> None:
    script = Script(CHAIN, stage=1)
    script.arrived("F1@0")
    assert waiting(script.core) == [
        Waiting(T("F0@1"), (T("F0@0"),), cause=WaitCause.INPUT),
        Waiting(T("B0@1"), (T("F0@1"), T("B0@2")), cause=WaitCause.INPUT),
        Waiting(T("F1@1")),
        Waiting(T("B1@1"), (T("F1@1"), T("B1@2")), cause=WaitCause.INPUT),
    ]
    assert lines(script, stages=3) == [
        "F0@1 (F0@0 owed by stage 0)",
        "B0@1 (F0@1 owed by stage 1, B0@2 owed by stage 2)",
        "F1@1 (ready, but hint BackwardForward does not choose it)",
        "B1@1 (F1@1 owed by stage 1, B1@2 owed by stage 2)",
    ]


def test_virtual_stages_that_have_names_are_named() -> None:
    graph = TaskGraph(TablePlacement((0, 1, 2)), ((0, 2), (1, 2)), names=("vision", "audio", "lm"))
    script = Script(graph, stage=2, skipped=[[], [0]])
    script.arrived("F0@0")
    assert lines(script) == [
        "F0@2 (lm) (F0@1 (audio) owed by stage 1)",
        "B0@2 (lm) (F0@2 (lm) owed by stage 2)",
        "F1@2 (lm) (F1@1 (audio) owed by stage 1)",
        "B1@2 (lm) (F1@2 (lm) owed by stage 2)",
    ]


def test_a_credit_is_of_a_named_virtual_stage() -> None:
    graph = TaskGraph(TablePlacement((0, 1)), ((0, 1),), names=("vision", "lm"))
    script = Script(graph, mode=Mode.FORWARD, microbatches=1)
    script.ran("F0@0")
    assert lines(script, stages=2) == ["the credit for F0@0 (vision) (owed by stage 1)"]


def test_a_forced_order_waits_for_the_microbatch_before() -> None:
    script = Script(TaskGraph.chain(1), in_order=((Kind.B, 0),))
    script.enqueued("F0@0", "F1@0")
    assert waiting(script.core) == [Waiting(T("B0@0")), Waiting(T("B1@0"), (T("B0@0"),), cause=WaitCause.INPUT)]
    assert lines(script)[1] == "B1@0 (B0@0 comes first: forced order)"


def test_a_forward_that_the_limit_blocks_says_so() -> None:
    script = Script(CHAIN, stage=0, limit=1)
    script.ran("F0@0")
    assert waiting(script.core)[1] == Waiting(T("F1@0"), cause=WaitCause.MEMORY)
    assert lines(script, stages=3)[1] == "F1@0 (blocked by the memory limit)"


def test_a_leader_names_the_members_whose_report_is_missing() -> None:
    script = Script(CHAIN, stage=1, group=GroupMembership(0, 3))
    script.arrived("F0@0")
    script.told(ReadyReported(script.step, 1, T("F0@1")))
    assert waiting(script.core, 1) == [Waiting(T("F0@1"), unreported=(2,), cause=WaitCause.ORDER)]
    assert lines(script, rank=3, tp=3)[0] == "F0@1 (not reported by stage 1, tp 2 (rank 5))"


def test_a_follower_waits_for_its_leader_and_for_what_was_ordered_before() -> None:
    script = Script(CHAIN, stage=1, group=FOLLOWER)
    script.arrived("F0@0", "F1@0")
    leads = "stage 1, tp 0 (rank 2), which leads the group"
    assert lines(script, rank=3, tp=2)[0] == f"F0@1 (not ordered by {leads})"
    script.told(Ordered(script.step, 0, T("F1@1")), Ordered(script.step, 1, T("F0@1")))
    texts = lines(script, rank=3, tp=2)
    assert texts[:2] == ["F1@1 (ordered, after others)", "F0@1 (ordered, after others)"]


def test_credits_are_waited_for_too_and_a_dispute_comes_first() -> None:
    script = Script(CHAIN, stage=0, microbatches=3, mode=Mode.FORWARD, limit=1)
    script.ran("F0@0")
    assert lines(script, stages=3) == [
        "F1@0 (blocked by the memory limit)",
        "F2@0 (blocked by the memory limit)",
        "the credit for F0@0 (owed by stage 1)",
    ]
    disputed = describe(script.core, Topology(0, 3), 1, (T("F1@0"), "nobody agrees"))
    assert disputed == ["F1@0 (nobody agrees)", "the credit for F0@0 (owed by stage 1)"]


def test_no_more_is_named_than_asked_for() -> None:
    script = Script(CHAIN, stage=2, microbatches=100)
    assert [entry.task for entry in waiting(script.core, 2)] == [T("F0@2"), T("B0@2")]
    assert (len(waiting(script.core)), len(waiting(script.core, None))) == (8, 200)
    assert waiting(Script(CHAIN, microbatches=0).core) == []
    script = Script(CHAIN, stage=0, microbatches=100, mode=Mode.FORWARD)
    script.ran(*(f"F{m}@0" for m in range(100)))
    assert (len(unconsumed(script.core)), len(unconsumed(script.core, None))) == (8, 100)


def test_the_view_shows_progress() -> None:
    script = Script(TaskGraph.chain(2, chunks=2), stage=1, microbatches=2, limit=3)
    script.arrived("F0@0", "F0@2")
    script.ran("F0@1", "F0@3", held=5)
    view = script.core.view
    assert (view.stage, view.microbatches, view.slots, view.held, view.held_bytes) == (1, 2, 6, 2, 10)
    assert (view.last_kind, view.num_enqueued_total) == (Kind.F, 2)
    assert [view.num_enqueued(Kind.F), view.num_enqueued(Kind.F, 1), view.num_enqueued(Kind.B)] == [2, 1, 0]
    assert (view.mean_seconds(Kind.F, 0), view.mean_seconds(Kind.B, 0)) == (0.0, None)


def test_measured_durations_are_averaged_by_kind_and_chunk_and_outlive_the_step() -> None:
    script = Script(TaskGraph.chain(1), microbatches=1)
    for step, seconds in enumerate((1.0, 4.0)):
        if step:
            script.opened(StepId(step, Mode.TRAIN, 1))
        script.enqueued("F0@0")
        script.told(Completed(T("F0@0"), seconds=seconds))
        script.ran("B0@0")
        script.told(ChunkReduced(0))
    view = script.core.view
    assert (view.mean_seconds(Kind.F, 0), view.mean_seconds(Kind.B, 0)) == (2.5, 0.0)
