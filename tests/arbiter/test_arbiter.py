"""The arbiter over a real core, driven by hand: it fills the lane, and says why it is left empty."""

from __future__ import annotations

from core_script import Script, T

from rrfp.arbiter.arbiter import Arbiter
from rrfp.core.usage import WaitCause
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Task


class Lane:
    """A lane that takes tasks and completes none by itself."""

    def __init__(self, script: Script, depth: int = 1) -> None:
        self.script = script
        self.started: list[str] = []
        self.waits: list[WaitCause] = []
        self.arbiter = Arbiter(script.core, depth, self._dispatch, self.waits.append)

    def _dispatch(self, task: Task) -> None:
        self.script.enqueued(str(task))
        self.started.append(str(task))

    def arrived(self, task: str) -> None:
        self.script.arrived(task)
        self.arbiter.kick()

    def completed(self, task: str) -> None:
        self.script.completed(task)
        self.arbiter.kick()


def test_it_decides_nothing_before_something_happened() -> None:
    lane = Lane(Script(TaskGraph.chain(1)))
    lane.arbiter.decide()
    assert (lane.started, lane.waits) == ([], [])
    lane.arbiter.kick()
    lane.arbiter.decide()
    assert (lane.started, lane.waits, lane.arbiter.is_due) == (["F0@0"], [], False)


def test_it_keeps_as_many_tasks_enqueued_as_the_lane_is_deep() -> None:
    lane = Lane(Script(TaskGraph.chain(1), microbatches=3), depth=2)
    lane.arbiter.kick()
    lane.arbiter.decide()
    assert lane.started == ["F0@0", "B0@0"]
    lane.completed("F0@0")
    lane.arbiter.decide()
    assert lane.started == ["F0@0", "B0@0", "F1@0"]
    assert lane.script.core.in_flight == (T("B0@0"), T("F1@0"))


def test_it_dispatches_one_task_at_a_time_where_that_is_asked_for() -> None:
    lane = Lane(Script(TaskGraph.chain(1), microbatches=3), depth=2)
    assert [lane.arbiter.dispatch_next() for _ in range(3)] == [True, True, False]
    assert lane.started == ["F0@0", "B0@0"]


def test_it_reports_the_cause_when_the_lane_is_left_empty_and_only_then() -> None:
    lane = Lane(Script(TaskGraph.chain(2), limit=1))
    lane.arbiter.kick()
    lane.arbiter.decide()
    assert (lane.started, lane.waits) == (["F0@0"], [])
    lane.completed("F0@0")
    lane.arbiter.decide()
    assert lane.waits == [WaitCause.MEMORY]
    lane.arrived("B0@1")
    lane.arbiter.decide()
    assert (lane.started, lane.waits) == (["F0@0", "B0@0"], [WaitCause.MEMORY])


def test_a_decision_that_makes_another_one_due_is_followed_by_it() -> None:
    """`dispatch` kicks, as rank 0 of a group does whose own proposal ends a round."""
    script = Script(TaskGraph.chain(1), microbatches=2)
    started: list[str] = []

    def dispatch(task: Task) -> None:
        started.append(str(task))
        script.enqueued(str(task))
        script.completed(str(task))
        arbiter.kick()

    arbiter = Arbiter(script.core, 1, dispatch, lambda cause: None)
    arbiter.kick()
    arbiter.decide()
    assert sorted(started) == ["B0@0", "B1@0", "F0@0", "F1@0"]
    assert not arbiter.is_due
