"""The pauses of a stage on a clock: which begin, and which end one."""

from __future__ import annotations

from core_script import Script, T

from rrfp import View
from rrfp.arbiter.arbiter import Arbiter, PauseTimer
from rrfp.core import events as ev
from rrfp.core.usage import WaitCause
from rrfp.hints.priorities import BackwardForward
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Task


class Patient(BackwardForward):
    """Prefers any wait."""

    def awaits(self, task: Task, view: View) -> bool:
        return True


class Stage:
    """Stage 1 of two with two gradients at hand, its clock, and what its arbiter did."""

    def __init__(self) -> None:
        self.script = script = Script(TaskGraph.chain(3), 1, 5, hint=Patient())
        script.arrived("F0@0", "F1@0", "F2@0", "B0@2", "B1@2", "B2@2")
        script.ran("F0@1", "F1@1", "F2@1")
        script.told(ev.Enqueued(T("B0@1")), ev.Completed(T("B0@1"), seconds=8.0))
        self.now = 100.0
        self.wakes: list[tuple[float, int]] = []
        self.did: list[str] = []
        self.pauses = PauseTimer(script.core, lambda: self.now, lambda *wake: self.wakes.append(wake))
        self.arbiter = Arbiter(script.core, 1, self._dispatch, self._waiting, pauses=self.pauses)

    def _dispatch(self, task: Task) -> None:
        self.did.append(str(task))
        self.script.enqueued(str(task))

    def _waiting(self, cause: WaitCause) -> None:
        self.did.append(cause.value)

    def begun_reported(self, task: str, seconds: float) -> None:
        event = ev.BegunReported(self.script.step, T(task), seconds)
        self.pauses.begun_reported(event)
        self.script.told(event)

    def decide(self) -> list[str]:
        """What the arbiter does now."""
        self.did.clear()
        self.arbiter.kick()
        self.arbiter.decide()
        return self.did


def test_a_forward_that_is_expected_within_the_longest_wait_is_awaited_until_it_comes() -> None:
    stage = Stage()
    stage.begun_reported("F3@0", 22.0)
    stage.now += 6.0
    assert stage.decide() == ["choice"]
    assert stage.wakes == [(16.0, 1)]
    stage.now += 1.0
    assert stage.decide() == ["choice"]  # another event changes nothing
    assert stage.wakes == [(16.0, 1)]
    stage.script.arrived("F3@0")
    assert stage.decide() == ["F3@1"]
    assert not stage.pauses.is_on(1)


def test_one_that_is_expected_later_is_not() -> None:
    stage = Stage()
    stage.begun_reported("F3@0", 22.0)
    stage.now += 5.9
    assert stage.decide() == ["B1@1"]
    assert stage.wakes == []


def test_the_longest_wait_ends_it() -> None:
    stage = Stage()
    stage.begun_reported("F3@0", 1.0)
    stage.now += 50.0  # overdue: it may come at any moment
    assert stage.decide() == ["choice"]
    assert stage.pauses.is_on(1)
    stage.pauses.end()
    assert stage.decide() == ["B1@1"]
    assert not stage.pauses.is_on(1)


def test_the_end_of_an_earlier_wait_does_not_end_a_later_one() -> None:
    stage = Stage()
    stage.begun_reported("F3@0", 1.0)
    stage.decide()
    stage.script.arrived("F3@0")
    stage.decide()
    stage.script.completed("F3@1")
    stage.script.told(ev.Enqueued(T("B1@1")), ev.Completed(T("B1@1"), seconds=8.0))
    stage.begun_reported("F4@0", 1.0)
    assert stage.decide() == ["choice"]
    assert not stage.pauses.is_on(1)
    assert stage.pauses.is_on(2)


def test_no_wait_begins_while_the_lane_is_busy() -> None:
    stage = Stage()
    stage.arbiter = Arbiter(stage.script.core, 2, stage._dispatch, stage._waiting, pauses=stage.pauses)
    stage.script.arrived("F3@0")
    stage.script.enqueued("F3@1")
    stage.begun_reported("F4@0", 1.0)
    assert stage.decide() == []
    stage.script.completed("F3@1")
    assert stage.decide() == ["choice"]


def test_an_arbiter_without_a_clock_never_waits() -> None:
    stage = Stage()
    stage.arbiter = Arbiter(stage.script.core, 1, stage._dispatch, stage._waiting)
    stage.begun_reported("F3@0", 1.0)
    assert stage.decide() == ["B1@1"]
