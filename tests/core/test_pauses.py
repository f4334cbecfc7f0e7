"""The wait that a hint may prefer to a backward: when the core offers it, how long it is, and what ends it."""

from __future__ import annotations

import pytest
from core_script import Script, T

from rrfp import View
from rrfp.core import events as ev
from rrfp.core.group_step import GroupMembership
from rrfp.core.usage import WaitCause
from rrfp.errors import ProtocolError
from rrfp.hints.priorities import BackwardForward
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Mode, StepId, Task

FORWARD_S, BACKWARD_S = 3.0, 8.0


class Patient(BackwardForward):
    """Prefers any wait."""

    def reports_begun(self, view: View) -> bool:
        return True

    def awaits(self, task: Task, view: View) -> bool:
        return True


def stage(hint: BackwardForward | None = None, group: GroupMembership | None = None, mode: Mode = Mode.TRAIN) -> Script:
    """Stage 1 of three, which has run the first microbatch, and has the gradients of two more."""
    script = Script(TaskGraph.chain(3), 1, 5, mode, hint=hint or Patient(), group=group)
    if mode is Mode.TRAIN:
        script.arrived("F0@0", "F1@0", "F2@0", "B0@2", "B1@2", "B2@2")
        for task in ("F0@1", "F1@1", "F2@1"):
            script.told(ev.Enqueued(T(task)), ev.Completed(T(task), seconds=FORWARD_S))
        script.told(ev.Enqueued(T("B0@1")), ev.Completed(T("B0@1"), seconds=BACKWARD_S))
    return script


def begun_reported(script: Script, task: str, seconds: float = FORWARD_S) -> None:
    assert script.told(ev.BegunReported(script.step, T(task), seconds)) == []


IDLE = ev.Idle(T("B1@1"), T("F3@0"), FORWARD_S, 2 * BACKWARD_S)


def test_before_a_backward_the_core_offers_a_wait_for_a_forward_that_has_begun_of_two_backwards() -> None:
    script = stage()
    assert script.core.decide() == ev.Run(T("B1@1"))
    begun_reported(script, "F3@0")
    assert script.core.decide() == IDLE
    assert script.core.decide() == IDLE  # deciding changes nothing


def test_the_wait_has_a_cause_of_its_own_and_ends_with_what_it_awaits() -> None:
    script = stage()
    begun_reported(script, "F3@0")
    assert (script.core.is_pausing, script.core.wait_cause()) == (False, WaitCause.INPUT)
    script.told(ev.PauseBegun())
    assert (script.core.is_pausing, script.core.wait_cause()) == (True, WaitCause.CHOICE)
    assert script.core.decide() == IDLE
    script.arrived("F3@0")
    assert script.core.decide() == ev.Run(T("F3@1"))
    script.enqueued("F3@1")
    assert not script.core.is_pausing


def test_no_part_of_a_wait_changes_which_tasks_are_ready() -> None:
    script = stage()
    before = script.ready
    assert "B1@1" in before
    begun_reported(script, "F3@0")
    for event in (ev.PauseBegun(), ev.PauseEnded()):
        assert script.ready == before
        script.told(event)
    assert script.ready == before


def test_after_the_longest_wait_the_backward_runs_and_is_not_waited_before_again() -> None:
    script = stage()
    begun_reported(script, "F3@0")
    script.told(ev.PauseBegun(), ev.PauseEnded())
    assert script.core.decide() == ev.Run(T("B1@1"))
    begun_reported(script, "F4@0")  # a later report gives no second wait
    assert script.core.decide() == ev.Run(T("B1@1"))


def test_there_is_one_wait_before_each_backward_even_if_a_forward_runs_in_between() -> None:
    script = stage()
    begun_reported(script, "F3@0")
    script.told(ev.PauseBegun())
    script.arrived("F3@0")
    script.ran("F3@1")
    begun_reported(script, "F4@0")
    assert script.core.decide() == ev.Run(T("B1@1"))
    script.told(ev.Enqueued(T("B1@1")), ev.Completed(T("B1@1"), seconds=BACKWARD_S))
    assert script.core.decide() == ev.Idle(T("B2@1"), T("F4@0"), FORWARD_S, 2 * BACKWARD_S)


def test_a_declined_wait_counts_as_the_one() -> None:
    script = stage()
    begun_reported(script, "F3@0")
    script.told(ev.PauseEnded())
    assert script.core.decide() == ev.Run(T("B1@1"))


def test_only_the_newest_report_counts_and_none_whose_output_is_here() -> None:
    script = stage()
    begun_reported(script, "F3@0")
    begun_reported(script, "F4@0")
    pause = script.core.decide()
    assert isinstance(pause, ev.Idle)
    assert pause.awaited == T("F4@0")
    script.arrived("F4@0", "F3@0")
    script.ran("F3@1", "B1@1", "F4@1")
    begun_reported(script, "F4@0")  # its output was faster
    assert script.core.decide() == ev.Run(T("B2@1"))


def test_no_wait_without_a_measured_backward() -> None:
    script = Script(TaskGraph.chain(3), 1, 5, hint=Patient())
    script.arrived("F0@0", "B0@2")
    script.ran("F0@1")
    begun_reported(script, "F1@0")
    assert script.core.decide() == ev.Run(T("B0@1"))


def test_a_hint_that_never_waits_never_gets_a_pause() -> None:
    script = stage(BackwardForward())
    begun_reported(script, "F3@0")
    assert script.core.decide() == ev.Run(T("B1@1"))


def test_a_rank_of_a_group_and_a_forward_only_step_have_no_waits() -> None:
    leader = Script(TaskGraph.chain(2), 0, 2, hint=Patient(), group=GroupMembership(0, 2))
    assert leader.core.step is not None
    assert not leader.core.step.pauses.is_wanted
    assert not leader.core.step.pauses.reports_begun
    evaluation = stage(mode=Mode.FORWARD)
    assert evaluation.core.step is not None
    assert not evaluation.core.step.pauses.is_wanted
    assert not evaluation.core.step.pauses.reports_begun


def test_a_forward_is_reported_to_its_readers_once_one_of_its_kind_was_measured() -> None:
    script = Script(TaskGraph.chain(3), 0, 3, hint=Patient())
    assert script.enqueued("F0@0") == []
    script.told(ev.Completed(T("F0@0"), seconds=2.5))
    assert script.enqueued("F1@0") == [ev.ReportBegun(T("F1@0"), 1, 2.5)]
    script.completed("F1@0")
    script.arrived("B0@1")
    assert script.enqueued("B0@0") == []


def test_a_hint_with_the_old_name_of_reports_begun_works_and_is_warned_once() -> None:
    with pytest.warns(DeprecationWarning, match=r"Old\.announces is now reports_begun: rename it$"):

        class Old(Patient):
            def announces(self, view: View) -> bool:
                return not super().reports_begun(view)

    step = stage(Old()).core.step
    assert step is not None
    assert not step.pauses.reports_begun


def test_callers_of_the_old_name_of_reports_begun_are_warned() -> None:
    with pytest.warns(DeprecationWarning, match=r"^Hint\.announces is now Hint\.reports_begun$") as caught:
        answers = [hint.announces(stage().core) for hint in (Patient(), BackwardForward())]
    assert answers == [True, False]
    assert caught[0].filename == __file__


def test_a_hint_with_both_names_is_asked_by_the_new_one() -> None:
    class Both(BackwardForward):
        def reports_begun(self, view: View) -> bool:
            return True

        def announces(self, view: View) -> bool:
            raise AssertionError

    step = stage(Both()).core.step
    assert step is not None
    assert step.pauses.reports_begun


@pytest.mark.parametrize(("seconds", "is_reported"), [(0.001, True), (0.0009, False)])
def test_a_forward_that_ends_before_another_stage_hears_of_it_is_not_reported(
    seconds: float, is_reported: bool
) -> None:
    script = Script(TaskGraph.chain(2), 0, 2, hint=Patient())
    script.told(ev.Enqueued(T("F0@0")), ev.Completed(T("F0@0"), seconds=seconds))
    assert script.enqueued("F1@0") == [ev.ReportBegun(T("F1@0"), 1, seconds)] * is_reported


def test_reports_of_another_step_are_ignored_and_nonsense_is_refused() -> None:
    script = stage()
    other = ev.BegunReported(StepId(7, Mode.TRAIN, 5), T("F3@0"), 1.0)
    before = Script(TaskGraph.chain(3), 1, microbatches=0, hint=Patient())
    assert script.told(other) == before.told(other) == []
    assert script.core.decide() == ev.Run(T("B1@1"))
    for task in ("F9@0", "F3@1", "B3@2", "F3@2"):
        with pytest.raises(ProtocolError, match=rf"^{task} was reported as begun to stage 1, where no forward"):
            stage().told(ev.BegunReported(script.step, T(task), 1.0))
