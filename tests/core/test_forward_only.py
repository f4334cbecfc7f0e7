"""Forward-only steps: slots are held until the successor's credit, local readers free them at completion."""

from __future__ import annotations

from core_script import Script, T

from rrfp.core.events import Credit, FinishStep, Release, Send
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Placement
from rrfp.model.tasks import Mode

CHAIN = TaskGraph.chain(3)


def script_of(graph: TaskGraph, stage: int, *, microbatches: int = 2, limit: int | None = None) -> Script:
    return Script(graph, stage, microbatches, Mode.FORWARD, limit=limit)


def test_a_slot_is_held_until_the_successor_is_done_with_the_output() -> None:
    script = script_of(CHAIN, 0, limit=1)
    script.ran("F0@0")
    script.released(1, "F0@0")
    assert (script.ready, script.core.view.held) == ("", 1)
    assert script.consumed(1, "F0@0") == []
    assert (script.ready, script.core.view.held) == ("F1@0", 0)


def test_a_middle_stage_gives_a_credit_when_its_forward_completes() -> None:
    script = script_of(CHAIN, 1)
    script.arrived("F0@0")
    assert script.enqueued("F0@1") == []
    sent = Send(T("F0@1"), peer=2, consumed=0)
    assert script.completed("F0@1") == [sent, Release(T("F0@0")), Credit(peer=0, task=T("F0@0"))]


def test_the_last_stage_frees_its_slot_at_completion() -> None:
    script = script_of(CHAIN, 2, limit=1)
    script.arrived("F0@1", "F1@1")
    script.enqueued("F0@2")
    assert script.ready == ""
    script.completed("F0@2")
    assert (script.ready, script.core.view.held) == ("F1@2", 0)


def test_there_are_no_backwards_and_no_reduction() -> None:
    script = script_of(CHAIN, 2, microbatches=1)
    script.arrived("F0@1")
    finish = FinishStep(script.step)
    assert script.ran("F0@2") == [Release(T("F0@1")), Credit(peer=1, task=T("F0@1")), finish]


def test_the_step_waits_for_every_credit_and_every_send() -> None:
    script = script_of(CHAIN, 0, microbatches=1)
    script.ran("F0@0")
    assert script.consumed(1, "F0@0") == []
    assert script.released(1, "F0@0") == [Release(T("F0@0")), FinishStep(script.step)]


def test_a_credit_may_come_after_the_release_and_ends_the_step() -> None:
    script = script_of(CHAIN, 0, microbatches=1)
    script.ran("F0@0")
    assert script.released(1, "F0@0") == [Release(T("F0@0"))]
    assert script.consumed(1, "F0@0") == [FinishStep(script.step)]


def test_two_successors_both_have_to_be_done() -> None:
    script = script_of(TaskGraph(Placement(3), edges=((0, 1), (1, 2), (0, 2))), 0, limit=1)
    script.ran("F0@0")
    script.consumed(2, "F0@0")
    assert script.ready == ""
    script.consumed(1, "F0@0")
    assert script.ready == "F1@0"


def test_one_credit_answers_one_message_however_many_read_it() -> None:
    graph = TaskGraph(Placement(2, 2), edges=((0, 1), (1, 2), (2, 3), (0, 3)))
    script = script_of(graph, 1, microbatches=1)
    script.arrived("F0@0", "F0@2")
    assert script.ran("F0@1") == [Send(T("F0@1"), peer=0, consumed=0)]
    assert script.ran("F0@3") == [
        Release(T("F0@2")),
        Credit(peer=0, task=T("F0@2")),
        Release(T("F0@0")),
        Credit(peer=0, task=T("F0@0")),
    ]


def test_a_reader_on_the_same_stage_frees_the_slot_when_it_completes() -> None:
    """V placement: virtual stage 2 follows 1 on stage 1."""
    script = script_of(TaskGraph.chain(2, chunks=2, layout="v"), 1, microbatches=1)
    script.arrived("F0@0")
    script.ran("F0@1")
    assert script.core.view.held == 1
    script.enqueued("F0@2")
    assert script.core.view.held == 2
    assert script.completed("F0@2") == [Send(T("F0@2"), peer=0, consumed=1), Release(T("F0@1"))]
    assert script.core.view.held == 1
