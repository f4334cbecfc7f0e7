"""Offers over a real core, driven by hand: revised at each event, committed only once the lane has begun the task."""

from __future__ import annotations

import pytest
from core_script import Script, T

from rrfp import Hint, View
from rrfp.arbiter.arbiter import Arbiter
from rrfp.arbiter.offers import Offers, may_offer
from rrfp.core.group_step import GroupMembership
from rrfp.core.ready_set import ReadySet
from rrfp.core.stage_core import StageCore
from rrfp.hints.registry import create_hint
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Task


class Lane:
    """A lane that takes offers: it runs a task at a time, and its loop hears of everything when the test says so.

    Attributes:
        log: what the core heard and what the lane was offered, in order.
        offered: the task in the slot.
    """

    def __init__(self, script: Script) -> None:
        self.log: list[str] = []
        self.offered: Task | None = None
        self._script = script
        self.arbiter = Arbiter(
            script.core, 1, self._enqueued, lambda cause: None, Offers(script.core, self, self._enqueued)
        )

    def offer(self, task: Task) -> None:
        assert self.offered is None, "two tasks are offered"
        self.offered = task
        self.log.append(f"offer {task}")

    def withdraw(self) -> bool:
        if self.offered is not None:
            self.log.append(f"withdraw {self.offered}")
        was_there, self.offered = self.offered is not None, None
        return was_there

    def begins_offered(self) -> None:
        """The running call has returned, and the lane has begun the offered task."""
        assert self.offered is not None
        self.offered = None

    def decides(self) -> None:
        self.arbiter.kick()
        self.arbiter.decide()

    def arrives(self, producer: str) -> None:
        self._script.arrived(producer)
        self.decides()

    def completes(self, task: str) -> None:
        """The loop hears that ``task`` has ended."""
        self.arbiter.before_completion()
        self._script.completed(task)
        self.log.append(f"completed {task}")
        self.decides()

    def _enqueued(self, task: Task) -> None:
        self._script.enqueued(str(task))
        self.log.append(f"enqueued {task}")


@pytest.fixture
def lane() -> Lane:
    """The last of two stages, which has run nothing; F0 and F1 have arrived there, and F0 is running."""
    lane = Lane(Script(TaskGraph.chain(2), stage=1, microbatches=3, hint=create_hint("b-priority")))
    lane.arrives("F0@0")
    lane.arrives("F1@0")
    assert lane.log == ["enqueued F0@1", "offer B0@1"]
    lane.log.clear()
    return lane


def test_what_the_lane_has_begun_is_enqueued_before_the_task_before_it_completes(lane: Lane) -> None:
    lane.begins_offered()
    lane.completes("F0@1")
    assert lane.log == ["enqueued B0@1", "completed F0@1", "offer F1@1"]


def test_an_offer_that_the_lane_did_not_take_is_withdrawn_and_decided_anew(lane: Lane) -> None:
    lane.completes("F0@1")
    assert lane.log == ["withdraw B0@1", "completed F0@1", "enqueued B0@1", "offer F1@1"]


def test_an_offer_stands_while_the_decision_is_the_same(lane: Lane) -> None:
    lane.arrives("F2@0")
    assert lane.log == []
    assert lane.offered == T("B0@1")


def test_an_event_that_changes_the_decision_changes_the_offer() -> None:
    lane = Lane(Script(TaskGraph.chain(2), microbatches=2, hint=create_hint("b-priority"), limit=2))
    lane.decides()
    lane.completes("F0@0")
    assert lane.log == ["enqueued F0@0", "offer F1@0", "withdraw F1@0", "completed F0@0", "enqueued F1@0"]
    lane.log.clear()
    lane.arrives("B0@1")
    assert lane.log == ["offer B0@0"]


def test_a_task_begun_meanwhile_is_enqueued_before_another_one_is_offered() -> None:
    lane = Lane(Script(TaskGraph.chain(2), microbatches=3, hint=create_hint("b-priority")))
    lane.decides()
    lane.completes("F0@0")
    assert lane.log[-2:] == ["enqueued F1@0", "offer F2@0"]
    lane.log.clear()
    lane.begins_offered()
    lane.arrives("B0@1")  # the core would run B0@0 next, and the lane runs F2@0
    assert lane.log == ["enqueued F2@0"]
    lane.completes("F1@0")
    assert lane.log == ["enqueued F2@0", "completed F1@0", "offer B0@0"]


def test_nothing_is_offered_where_nothing_is_ready() -> None:
    lane = Lane(Script(TaskGraph.chain(2), microbatches=1))
    lane.decides()
    assert lane.log == ["enqueued F0@0"]
    lane.completes("F0@0")
    assert lane.log == ["enqueued F0@0", "completed F0@0"]


def test_an_offer_goes_when_the_hint_would_rather_wait() -> None:
    class Moody(Hint):
        may_wait = True
        waits = False

        def choose(self, ready: ReadySet, view: View) -> Task | None:
            return None if self.waits else next(iter(ready))

    hint = Moody()
    lane = Lane(Script(TaskGraph.chain(1), microbatches=2, hint=hint))
    lane.decides()
    hint.waits = True
    lane.decides()
    assert lane.log == ["enqueued F0@0", "offer F1@0", "withdraw F1@0"]
    assert lane.offered is None


@pytest.mark.parametrize(
    ("core", "depth", "may"),
    [
        (StageCore(TaskGraph.chain(1), 0, create_hint("bf")), 1, True),
        (StageCore(TaskGraph.chain(1), 0, create_hint("bf"), Limit(2)), 1, True),
        (StageCore(TaskGraph.chain(1), 0, create_hint("bf")), 2, False),
        (StageCore(TaskGraph.chain(1), 0, create_hint("bf"), Limit(bytes=1)), 1, False),
        (StageCore(TaskGraph.chain(1), 0, create_hint("bf"), group=GroupMembership(0, 2)), 1, False),
    ],
)
def test_nothing_is_offered_behind_enqueued_tasks_under_a_byte_limit_or_in_a_group(
    core: StageCore, depth: int, may: bool
) -> None:
    assert may_offer(core, depth) is may
