"""Events that contradict the state are refused with both sides named, hints that break their contract too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from core_script import Script, T

from rrfp import Hint, View
from rrfp.core.events import Aborted, Arrived, ChunkReduced, Consumed, ReadyReported, StepOpened
from rrfp.core.ready_set import ReadySet
from rrfp.errors import ConfigError, HintError, Origin, ProtocolError
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Mode, StepId, Task

HERE = "step 0 (train, 2 microbatches)"
REMEDY = "; all ranks must make the same calls in order"


def middle() -> Script:
    """Stage 1 of 3, in step 0."""
    return Script(TaskGraph.chain(3), stage=1)


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(ProtocolError) as caught:
        act()
    return str(caught.value)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("F0@1", f"F0@1 arrived, which nothing on stage 1 reads in {HERE}"),  # its own
        ("F0@2", f"F0@2 arrived, which nothing on stage 1 reads in {HERE}"),
        ("B0@0", f"B0@0 arrived, which nothing on stage 1 reads in {HERE}"),
        ("F2@0", f"F2@0 arrived, which nothing on stage 1 reads in {HERE}"),  # M is 2
        ("W0@2", f"W0@2 arrived, which nothing on stage 1 reads in {HERE}"),
    ],
)
def test_an_arrival_that_nothing_here_reads_is_refused(task: str, message: str) -> None:
    assert refusal(lambda: middle().arrived(task)) == message


def test_an_arrival_from_beyond_the_pipeline_is_refused() -> None:
    message = refusal(lambda: middle().told(Arrived(StepId(0, Mode.TRAIN, 2), Task(T("F0@0").kind, 0, 99))))
    assert message == f"F0@99 arrived, which nothing on stage 1 reads in {HERE}"


def test_a_gradient_is_refused_in_a_forward_only_step() -> None:
    script = Script(TaskGraph.chain(3), stage=1, mode=Mode.FORWARD)
    expected = "B0@2 arrived, which nothing on stage 1 reads in step 0 (forward, 2 microbatches)"
    assert refusal(lambda: script.arrived("B0@2")) == expected


def test_a_second_arrival_of_one_output_is_refused() -> None:
    script = middle()
    script.arrived("F0@0")
    assert refusal(lambda: script.arrived("F0@0")) == f"F0@0 arrived twice on stage 1 in {HERE}"


def test_a_second_early_arrival_is_found_when_the_step_opens() -> None:
    script = Script(TaskGraph.chain(3), stage=1, microbatches=0)
    step = StepId(0, Mode.TRAIN, 2)
    script.arrived("F0@0", "F0@0", step=step)
    assert refusal(lambda: script.opened(step)) == f"F0@0 arrived twice on stage 1 in {HERE}"


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (
            StepId(2, Mode.TRAIN, 2),
            "F0@0 from stage 0, a message of step 2 (train, 2 microbatches), reached stage 1 in step 0",
        ),
        (
            StepId(0, Mode.TRAIN, 3),
            f"stages disagree on the step: stage 0 is in step 0 (train, 3 microbatches), stage 1 in {HERE}{REMEDY}",
        ),
        (
            StepId(0, Mode.FORWARD, 2),
            f"stages disagree on the step: stage 0 is in step 0 (forward, 2 microbatches), stage 1 in {HERE}{REMEDY}",
        ),
    ],
)
def test_a_message_of_another_step_is_refused_and_both_are_named(sent: StepId, message: str) -> None:
    assert refusal(lambda: middle().arrived("F0@0", step=sent)) == message


def test_a_disagreement_of_an_early_message_is_found_when_the_step_opens() -> None:
    script = Script(TaskGraph.chain(3), stage=1, microbatches=0)
    script.arrived("F0@0", step=StepId(0, Mode.TRAIN, 3))
    message = refusal(lambda: script.opened(StepId(0, Mode.TRAIN, 2)))
    where = f"stage 0 is in step 0 (train, 3 microbatches), stage 1 in {HERE}"
    assert message == f"stages disagree on the step: {where}{REMEDY}"


def test_a_message_of_the_second_step_before_the_first_is_refused() -> None:
    script = Script(TaskGraph.chain(3), stage=1, microbatches=0)
    message = refusal(lambda: script.arrived("F0@0", step=StepId(1, Mode.TRAIN, 2)))
    assert (
        message
        == "F0@0 from stage 0, a message of step 1 (train, 2 microbatches), reached stage 1 before its first step"
    )


def test_a_message_of_a_finished_step_is_refused() -> None:
    script = Script(TaskGraph.chain(2), stage=1, microbatches=1, mode=Mode.FORWARD)
    script.arrived("F0@0")
    script.ran("F0@1")
    message = refusal(lambda: script.arrived("F0@0"))
    assert (
        message == "F0@0 from stage 0, a message of step 0 (forward, 1 microbatches), reached stage 1 in step 0 (ended)"
    )


@pytest.mark.parametrize(
    ("opened", "message"),
    [
        (StepOpened(1, Mode.TRAIN, 2), f"step 1 was opened while {HERE} is still running"),
        (StepOpened(0, Mode.TRAIN, 2), f"step 0 was opened while {HERE} is still running"),
    ],
)
def test_steps_do_not_overlap(opened: StepOpened, message: str) -> None:
    assert refusal(lambda: middle().told(opened)) == message


def test_steps_are_numbered_without_gaps() -> None:
    script = Script(TaskGraph.chain(1), microbatches=0)
    assert refusal(lambda: script.told(StepOpened(1, Mode.TRAIN, 2))) == "step 1 was opened, expected step 0"


def test_a_step_without_microbatches_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^microbatches is 0, must be at least 1$"):
        Script(TaskGraph.chain(1), microbatches=0).told(StepOpened(0, Mode.TRAIN, 0))


def test_a_task_cannot_be_enqueued_without_its_inputs_or_twice() -> None:
    script = middle()
    message = "F0@1 was enqueued on stage 1 without its inputs, or twice"
    assert refusal(lambda: script.enqueued("F0@1")) == message
    script.arrived("F0@0")
    script.enqueued("F0@1")
    assert refusal(lambda: script.enqueued("F0@1")) == message


def test_the_lane_completes_what_it_was_given_in_order() -> None:
    script = Script(TaskGraph.chain(1))
    assert refusal(lambda: script.completed("F0@0")) == "F0@0 completed on stage 0, where the lane is at nothing"
    script.enqueued("F0@0", "F1@0")
    assert refusal(lambda: script.completed("F1@0")) == "F1@0 completed on stage 0, where the lane is at F0@0"


def test_only_a_send_on_its_way_is_released_and_only_once() -> None:
    script = Script(TaskGraph.chain(2))
    message = "the send of F0@0 to stage 1 was released, which is not on its way"
    assert refusal(lambda: script.released(1, "F0@0")) == message
    script.ran("F0@0")
    script.released(1, "F0@0")
    assert refusal(lambda: script.released(1, "F0@0")) == message


def test_a_chunk_is_reduced_after_its_tasks_and_once() -> None:
    script = Script(TaskGraph.chain(2), stage=1, microbatches=1)
    message = "virtual stage 1 was reduced on stage 1: early, or twice"
    assert refusal(lambda: script.told(ChunkReduced(1))) == message
    script.arrived("F0@0")
    script.ran("F0@1", "B0@1")
    script.told(ChunkReduced(1))
    assert refusal(lambda: script.told(ChunkReduced(1))) == message


def test_a_credit_is_taken_once_and_only_from_a_consumer() -> None:
    script = Script(TaskGraph.chain(3), mode=Mode.FORWARD)
    script.ran("F0@0")
    assert (
        refusal(lambda: script.consumed(2, "F0@0")) == "stage 2 reports F0@0 as consumed, which it was not waiting for"
    )
    script.consumed(1, "F0@0")
    assert (
        refusal(lambda: script.consumed(1, "F0@0")) == "stage 1 reports F0@0 as consumed, which it was not waiting for"
    )


def test_a_credit_cannot_run_ahead() -> None:
    script = Script(TaskGraph.chain(2), mode=Mode.FORWARD)
    message = refusal(lambda: script.told(Consumed(StepId(1, Mode.FORWARD, 2), 1, T("F0@0"))))
    assert message == "F0@0 from stage 1, a message of step 1 (forward, 2 microbatches), reached stage 0 in step 0"


def test_a_report_is_refused_where_nobody_follows() -> None:
    script = middle()
    message = refusal(lambda: script.told(ReadyReported(script.step, 1, T("F0@1"))))
    assert message == "member 1 of the group reports F0@1 as ready, which stage 1 does not await"


def test_events_outside_any_step_are_refused() -> None:
    script = Script(TaskGraph.chain(2), microbatches=0)
    assert refusal(lambda: script.enqueued("F0@0")) == "stage 0 received an event of a task outside any step"


def test_after_an_abort_the_core_is_silent() -> None:
    script, origin = middle(), Origin(stage=2, task="B0@2", cause="ValueError: no")
    script.arrived("F0@0")
    assert script.told(Aborted(origin), Aborted(Origin(0, None, "later"))) == []
    assert script.core.decide() is None
    assert script.arrived("F0@0", "F0@0", "F9@9") == []


class Says(Hint):
    """Always gives one answer."""

    def __init__(self, answer: str | None, *, may_wait: bool = False) -> None:
        self._answer = None if answer is None else T(answer)
        self.may_wait = may_wait

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        return self._answer


@pytest.mark.parametrize("answer", ["B0@0", "F2@0", "F0@1", None])
def test_an_answer_outside_the_ready_set_is_a_named_error(answer: str | None) -> None:
    script = Script(TaskGraph.chain(2), hint=Says(answer))
    with pytest.raises(HintError) as caught:
        script.core.decide()
    assert str(caught.value) == f"hint Says chose {answer} on stage 0; ready are: ReadySet(F0@0 F1@0)"


def test_an_answer_that_memory_keeps_out_is_a_named_error() -> None:
    script = Script(TaskGraph.chain(1), hint=Says("F1@0"), limit=1)
    script.ran("F0@0")
    with pytest.raises(HintError) as caught:
        script.core.decide()
    assert str(caught.value) == "hint Says chose F1@0 on stage 0; ready are: ReadySet(B0@0)"


def test_a_hint_that_may_wait_may_say_nothing_but_not_anything() -> None:
    assert Script(TaskGraph.chain(2), hint=Says(None, may_wait=True)).core.decide() is None
    with pytest.raises(HintError):
        Script(TaskGraph.chain(2), hint=Says("B0@0", may_wait=True)).core.decide()


def test_a_hint_is_not_asked_while_nothing_is_ready() -> None:
    assert Script(TaskGraph.chain(2), stage=1, hint=Says("B0@0")).core.decide() is None


def test_there_is_nothing_to_decide_before_the_first_step() -> None:
    assert Script(TaskGraph.chain(2), microbatches=0).core.decide() is None
