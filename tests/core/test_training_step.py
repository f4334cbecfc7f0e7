"""One stage through a training step: what becomes ready when, what is sent, released, reduced, finished."""

from __future__ import annotations

import pytest
from core_script import Script, T

from rrfp.core.events import Aborted, Arrived, ChunkReduced, Event, FinishStep, ReduceChunk, Release, Send
from rrfp.errors import Origin
from rrfp.hints.priorities import BackwardForward
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Placement
from rrfp.model.tasks import Kind, Mode, StepId


class Observer(BackwardForward):
    """Writes down every event that it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Event] = []

    def observe(self, event: Event) -> None:
        self.seen.append(event)


CHAIN = TaskGraph.chain(3)
SKIP = TaskGraph(Placement(3), edges=((0, 1), (1, 2), (0, 2)))


def test_the_first_stage_may_start_every_forward() -> None:
    assert Script(CHAIN, stage=0, microbatches=3).ready == "F0@0 F1@0 F2@0"


def test_other_stages_wait_for_their_input() -> None:
    script = Script(CHAIN, stage=1)
    assert script.ready == ""
    assert script.arrived("F1@0") == []
    assert script.ready == "F1@1"


def test_messages_are_filed_in_whatever_order_they_arrive() -> None:
    script = Script(CHAIN, stage=1, microbatches=3)
    script.arrived("F2@0", "F0@0", "F1@0")
    assert script.ready == "F0@1 F1@1 F2@1"


def test_a_finished_forward_leaves_as_one_message_and_lets_its_input_go() -> None:
    script = Script(CHAIN, stage=1)
    script.arrived("F0@0")
    assert script.enqueued("F0@1") == []
    assert script.completed("F0@1") == [Send(T("F0@1"), peer=2, consumed=0), Release(T("F0@0"))]


def test_a_backward_needs_its_own_forward_and_the_gradient() -> None:
    script = Script(CHAIN, stage=1)
    script.arrived("F0@0")
    script.ran("F0@1")
    assert script.ready == ""
    script.arrived("B0@2")
    assert script.ready == "B0@1"


def test_a_message_says_how_many_of_the_receivers_forwards_are_in_use() -> None:
    script = Script(CHAIN, stage=1, microbatches=3)
    script.arrived("F0@0", "F1@0", "B0@2")
    script.ran("F0@1", "F1@1")
    assert script.ran("B0@1") == [Send(T("B0@1"), peer=0, consumed=2), Release(T("B0@2"))]


def test_on_the_last_virtual_stage_backward_is_ready_when_forward_is_enqueued() -> None:
    script = Script(CHAIN, stage=2)
    script.arrived("F0@1")
    script.enqueued("F0@2")
    assert script.ready == "B0@2"
    assert script.completed("F0@2") == [Release(T("F0@1"))]


def test_the_memory_of_an_output_is_free_once_its_send_is() -> None:
    script = Script(CHAIN, stage=0)
    assert script.ran("F0@0") == [Send(T("F0@0"), peer=1)]
    assert script.released(1, "F0@0") == [Release(T("F0@0"))]


def test_split_backward_sends_the_gradient_before_the_weight_task() -> None:
    script = Script(TaskGraph.chain(2, split=True), stage=1, microbatches=1)
    script.arrived("F0@0")
    script.ran("F0@1")
    assert script.ran("B0@1") == [Send(T("B0@1"), peer=0, consumed=1)]
    assert script.ready == "W0@1"
    assert script.ran("W0@1") == [ReduceChunk(1)]


def test_the_step_finishes_once_when_tasks_sends_and_reductions_are_done() -> None:
    script = Script(CHAIN, stage=1, microbatches=1)
    script.arrived("F0@0", "B0@2")
    script.ran("F0@1")
    assert script.ran("B0@1") == [Send(T("B0@1"), peer=0, consumed=1), Release(T("B0@2")), ReduceChunk(1)]
    assert script.released(2, "F0@1") == [Release(T("F0@1"))]
    assert script.told(ChunkReduced(1)) == []
    assert script.released(0, "B0@1") == [Release(T("B0@1")), FinishStep(script.step)]


def test_the_reduction_may_be_what_the_step_waits_for() -> None:
    script = Script(TaskGraph.chain(1), microbatches=2)
    assert script.ran("F0@0", "F1@0", "B1@0", "B0@0") == [ReduceChunk(0)]
    assert script.told(ChunkReduced(0)) == [FinishStep(script.step)]


def test_a_chunk_is_reduced_while_another_still_computes() -> None:
    script = Script(TaskGraph.chain(1, chunks=2), microbatches=1)
    script.ran("F0@0", "F0@1")
    assert script.ran("B0@1") == [ReduceChunk(1)]
    assert script.told(ChunkReduced(1)) == []
    assert script.ran("B0@0") == [Release(T("B0@1")), ReduceChunk(0)]
    assert script.told(ChunkReduced(0)) == [FinishStep(script.step)]


def test_an_output_for_the_same_stage_is_not_sent() -> None:
    """V placement: virtual stages 1 and 2 meet on stage 1."""
    script = Script(TaskGraph.chain(2, chunks=2, layout="v"), stage=1, microbatches=1)
    script.arrived("F0@0")
    assert script.ran("F0@1") == [Release(T("F0@0"))]
    assert script.ready == "F0@2"
    assert script.ran("F0@2") == [Send(T("F0@2"), peer=0, consumed=1), Release(T("F0@1"))]


def test_the_last_virtual_stage_of_a_v_is_on_the_first_stage() -> None:
    script = Script(TaskGraph.chain(2, chunks=2, layout="v"), stage=0, microbatches=1)
    assert script.ran("F0@0") == [Send(T("F0@0"), peer=1)]
    script.arrived("F0@2")
    script.ran("F0@3")
    assert script.ran("B0@3") == [Send(T("B0@3"), peer=1, consumed=1), ReduceChunk(3)]


def test_looped_chunks_go_round_the_stages() -> None:
    script = Script(TaskGraph.chain(2, chunks=2), stage=1, microbatches=1)
    script.arrived("F0@0", "F0@2")
    assert script.ready == "F0@3 F0@1"
    assert script.ran("F0@1") == [Send(T("F0@1"), peer=0, consumed=1), Release(T("F0@0"))]
    assert script.ran("F0@3") == [Release(T("F0@2"))]
    assert script.ran("B0@3") == [Send(T("B0@3"), peer=0, consumed=2), ReduceChunk(3)]


def test_a_skip_edge_sends_to_both_readers_and_frees_after_both() -> None:
    script = Script(SKIP, stage=0, microbatches=1)
    assert script.ran("F0@0") == [Send(T("F0@0"), peer=1), Send(T("F0@0"), peer=2)]
    assert script.released(2, "F0@0") == []
    assert script.released(1, "F0@0") == [Release(T("F0@0"))]
    script.arrived("B0@2")
    assert script.ready == ""
    script.arrived("B0@1")
    assert script.ready == "B0@0"


def test_one_message_serves_two_readers_of_one_stage() -> None:
    """Virtual stages 1 and 3 are both on stage 1 and both read the forward of 0."""
    graph = TaskGraph(Placement(2, 2), edges=((0, 1), (1, 2), (2, 3), (0, 3)))
    script = Script(graph, stage=1, microbatches=1)
    script.arrived("F0@0")
    assert script.ran("F0@1") == [Send(T("F0@1"), peer=0, consumed=0)]
    script.arrived("F0@2")
    assert script.ran("F0@3") == [Release(T("F0@2")), Release(T("F0@0"))]
    assert script.core.peaks.received == 2
    assert script.ran("B0@3")[0] == Send(T("B0@3"), peer=0, consumed=2)


def test_with_two_tasks_in_flight_local_dependants_are_ready_at_enqueue() -> None:
    script = Script(TaskGraph.chain(1, split=True), microbatches=1)
    script.enqueued("F0@0")
    assert script.ready == "B0@0"
    script.enqueued("B0@0")
    assert script.ready == "W0@0"
    assert script.core.in_flight == (T("F0@0"), T("B0@0"))
    assert script.completed("F0@0", "B0@0") == []
    script.enqueued("W0@0")
    assert script.completed("W0@0") == [ReduceChunk(0)]


def test_a_send_waits_for_completion_not_for_enqueue() -> None:
    script = Script(CHAIN, stage=0)
    assert script.enqueued("F0@0", "F1@0") == []
    assert script.completed("F0@0") == [Send(T("F0@0"), peer=1)]


def test_a_forced_order_makes_later_microbatches_wait_for_earlier_ones() -> None:
    script = Script(TaskGraph.chain(1), microbatches=3, in_order=((Kind.B, 0),))
    script.ran("F1@0", "F2@0")
    assert script.ready == "F0@0"
    script.ran("F0@0")
    assert script.ready == "B0@0"
    script.enqueued("B0@0")
    assert script.ready == "B1@0"


def test_a_second_step_starts_afresh_with_its_own_size_and_mode() -> None:
    script = Script(TaskGraph.chain(1), microbatches=1)
    script.ran("F0@0", "B0@0")
    script.told(ChunkReduced(0))
    script.opened(StepId(1, Mode.FORWARD, 2))
    assert script.ready == "F0@0 F1@0"
    assert script.ran("F1@0", "F0@0") == [FinishStep(StepId(1, Mode.FORWARD, 2))]


def test_what_runs_one_step_ahead_is_filed_until_that_step_opens() -> None:
    script, first = Script(CHAIN, stage=2, microbatches=0), StepId(0, Mode.TRAIN, 2)
    script.arrived("F1@1", step=first)
    script.opened(first)
    assert script.ready == "F1@2"


def test_a_message_of_the_next_step_is_filed_during_this_one() -> None:
    script, following = Script(CHAIN, stage=2, microbatches=1), StepId(1, Mode.TRAIN, 2)
    script.arrived("F0@1")
    script.arrived("F1@1", step=following)
    script.ran("F0@2", "B0@2")
    script.told(ChunkReduced(2))
    script.released(1, "B0@2")
    script.opened(following)
    assert script.ready == "F1@2"


@pytest.mark.parametrize("told", [(3, 1), (1, 3)])
def test_the_view_keeps_the_newest_report_of_what_is_consumed(told: tuple[int, int]) -> None:
    """Two channels from one peer may overtake each other."""
    script = Script(TaskGraph.chain(2, chunks=2), stage=0, microbatches=4)
    assert script.core.view.consumed_downstream is None
    script.arrived("F0@1", consumed=told[0])
    script.arrived("F1@1", consumed=told[1])
    assert script.core.view.consumed_downstream == 3


def test_a_hint_observes_an_early_message_in_the_step_that_it_belongs_to() -> None:
    script, following = Script(CHAIN, stage=2, microbatches=1, hint=Observer()), StepId(1, Mode.TRAIN, 1)
    observer = script.core.hint
    assert isinstance(observer, Observer)
    script.arrived("F0@1")
    early = Arrived(following, T("F0@1"))
    script.told(early)
    script.ran("F0@2", "B0@2")
    script.told(ChunkReduced(2))
    script.released(1, "B0@2")
    assert early not in observer.seen
    script.opened(following)
    assert observer.seen[-1] == early


def test_a_hint_observes_the_abort_that_ends_everything() -> None:
    script = Script(CHAIN, stage=2, microbatches=1, hint=Observer())
    observer = script.core.hint
    assert isinstance(observer, Observer)
    script.told(Aborted(Origin(0, None, "out of memory")))
    assert observer.seen[-1] == Aborted(Origin(0, None, "out of memory"))
