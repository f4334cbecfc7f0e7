"""Tensor-parallel groups: the leader orders what is ready on every rank, followers run exactly that log."""

from __future__ import annotations

import pytest
from core_script import Script, T
from group_scripts import CHAIN, follower, leader, ordered, refusal, reported

from rrfp import Hint, View
from rrfp.core.events import (
    Order,
    Ordered,
    ReadyReported,
    ReportReady,
    Run,
    Send,
)
from rrfp.core.group_step import GroupMembership
from rrfp.core.ready_set import ReadySet
from rrfp.core.usage import WaitCause
from rrfp.core.waiting import Waiting, waiting
from rrfp.errors import ConfigError
from rrfp.model.tasks import Mode, StepId, Task


def test_the_leader_runs_what_has_arrived_everywhere() -> None:
    script = leader(size=3)
    script.arrived("F0@0", "F1@0")
    assert script.ready == ""
    assert reported(script, "F1@1", rank=1) == []
    assert script.ready == ""
    reported(script, "F1@1", rank=2)
    assert script.ready == "F1@1"


def test_a_report_may_come_before_the_leaders_own_message() -> None:
    script = leader()
    reported(script, "F0@1")
    assert script.ready == ""
    script.arrived("F0@0")
    assert script.ready == "F0@1"


def test_the_leader_broadcasts_what_it_enqueues_numbered() -> None:
    script = leader()
    script.arrived("F1@0")
    reported(script, "F1@1")
    assert script.enqueued("F1@1") == [Order(0, T("F1@1"))]
    assert script.enqueued("B1@1") == [Order(1, T("B1@1"))]  # needs nothing of other stages: no report


def test_a_follower_reports_a_task_once_all_its_messages_are_here() -> None:
    script = follower()
    assert script.arrived("F1@0") == [ReportReady(T("F1@1"))]
    assert script.ready == "F1@1"
    assert script.core.decide() is None


def test_a_follower_reports_a_backward_although_its_forward_has_not_run() -> None:
    script = follower(stage=0)
    assert script.arrived("B0@1") == [ReportReady(T("B0@0"))]


def test_a_follower_runs_the_log_in_its_order_and_broadcasts_nothing() -> None:
    script = follower()
    script.arrived("F0@0", "F1@0")
    assert ordered(script, (0, "F1@1"), (1, "B1@1")) == []
    assert script.core.decide() == Run(T("F1@1"))
    assert script.enqueued("F1@1") == []
    assert script.core.decide() == Run(T("B1@1"))
    assert script.completed("F1@1")[1:] == []
    assert script.enqueued("B1@1") == []
    assert script.core.decide() is None


def test_a_follower_sends_its_own_shard() -> None:
    script = follower(stage=0)
    ordered(script, (0, "F1@0"))
    assert script.ran("F1@0") == [Send(T("F1@0"), peer=1)]


def test_a_local_producer_in_the_log_counts_as_run_on_a_follower() -> None:
    """Two ahead: B is ordered right behind its F, before the follower has run either."""
    script = follower()
    script.arrived("F0@0")
    ordered(script, (0, "F0@1"))
    assert script.ready == "F0@1 B0@1"


def test_an_entry_waits_for_the_followers_own_message() -> None:
    script = follower()
    ordered(script, (0, "F0@1"))
    assert script.core.decide() is None
    assert script.arrived("F0@0") == [ReportReady(T("F0@1"))]
    assert script.core.decide() == Run(T("F0@1"))


def test_a_follower_that_runs_something_else_is_refused() -> None:
    script = follower()
    script.arrived("F0@0", "F1@0")
    ordered(script, (0, "F1@1"))
    assert refusal(lambda: script.enqueued("F0@1")) == "F0@1 was enqueued, but the leader's log says F1@1"


def test_a_gap_in_the_log_is_refused() -> None:
    message = refusal(lambda: ordered(follower(), (1, "F0@1")))
    assert message == "order log leaves a gap: got entry 1 (F0@1), expected 0"


def test_a_repeated_entry_is_refused() -> None:
    message = refusal(lambda: ordered(follower(), (0, "F0@1"), (0, "F1@1")))
    assert message == "order log repeats an entry: got entry 0 (F1@1), expected 1"


def test_a_task_that_the_log_has_already_is_refused() -> None:
    message = refusal(lambda: ordered(follower(), (0, "F0@1"), (1, "F0@1")))
    assert message == "order log repeats a task: entry 1 is F0@1, which it has already"


@pytest.mark.parametrize("task", ["F0@0", "F2@1", "W0@1"])
def test_an_ordered_task_that_does_not_run_here_is_refused(task: str) -> None:
    message = refusal(lambda: ordered(follower(), (0, task)))
    assert message == f"{task} was ordered, which does not run on stage 1 in step 0 (train, 2 microbatches)"


def test_a_leader_takes_no_orders() -> None:
    message = refusal(lambda: ordered(leader(), (0, "F0@1")))
    assert message == "F0@1 was ordered on stage 1, whose group this rank leads"


def test_a_second_report_of_one_rank_is_refused() -> None:
    script = leader(size=3)
    reported(script, "F0@1", rank=1)
    message = refusal(lambda: reported(script, "F0@1", rank=1))
    assert message == "member 1 of the group reported F0@1 as ready twice"


@pytest.mark.parametrize(
    ("rank", "task"),
    [
        (1, "B0@1"),  # needs nothing of another stage
        (1, "F2@1"),  # M is 2
        (1, "F0@0"),
        (0, "F0@1"),
        (2, "F0@1"),
    ],
)
def test_a_report_that_the_leader_does_not_await_is_refused(rank: int, task: str) -> None:
    message = refusal(lambda: reported(leader(), task, rank))
    assert message == f"member {rank} of the group reports {task} as ready, which stage 1 does not await"


def test_reports_and_orders_run_one_step_ahead() -> None:
    step = StepId(0, Mode.TRAIN, 2)
    first, second = (Script(CHAIN, 1, microbatches=0, group=GroupMembership(rank, 2)) for rank in (0, 1))
    first.told(ReadyReported(step, 1, T("F0@1")))
    first.opened(step)
    first.arrived("F0@0")
    assert first.ready == "F0@1"
    second.told(Ordered(step, 0, T("F0@1")))
    second.arrived("F0@0", step=step)
    assert second.opened(step) == [ReportReady(T("F0@1"))]
    assert second.core.decide() == Run(T("F0@1"))


# What is waited for.


def test_a_leader_waits_for_the_order_while_a_report_is_all_that_a_task_lacks() -> None:
    script = leader()
    assert script.core.wait_cause() is WaitCause.INPUT
    script.arrived("F0@0", "F1@0")
    assert script.core.wait_cause() is WaitCause.ORDER
    assert waiting(script.core, 1) == [Waiting(T("F0@1"), unreported=(1,), cause=WaitCause.ORDER)]
    reported(script, "F0@1")
    assert waiting(script.core, 1) == [Waiting(T("F0@1"))]
    script.ran("F0@1", "B0@1")
    assert script.core.wait_cause() is WaitCause.ORDER  # F1 still
    reported(script, "F1@1")
    script.ran("F1@1", "B1@1")
    assert script.core.wait_cause() is WaitCause.DRAINED


def test_a_report_without_the_leaders_own_message_is_no_wait_for_the_order() -> None:
    script = leader()
    reported(script, "F0@1")
    assert script.core.wait_cause() is WaitCause.INPUT
    assert waiting(script.core, 1) == [Waiting(T("F0@1"), absent=(T("F0@0"),), cause=WaitCause.INPUT)]


def test_a_follower_waits_for_the_order_of_what_it_has_and_for_inputs_of_what_is_ordered() -> None:
    script = follower()
    assert script.core.wait_cause() is WaitCause.INPUT
    script.arrived("F1@0")
    assert script.core.wait_cause() is WaitCause.ORDER
    ordered(script, (0, "F0@1"))
    assert script.core.wait_cause() is WaitCause.INPUT
    # What is ordered comes first; B0 is not ordered, and its forward counts as run.
    assert waiting(script.core, 2) == [
        Waiting(T("F0@1"), absent=(T("F0@0"),), cause=WaitCause.INPUT),
        Waiting(T("B0@1"), cause=WaitCause.ORDER),
    ]
    script.arrived("F0@0")
    assert script.core.decide() == Run(T("F0@1"))


def test_a_followers_hint_is_neither_asked_nor_told_anything() -> None:
    class Untold(Hint):
        def choose(self, ready: ReadySet, view: View) -> Task | None:
            raise AssertionError

        def open_step(self, view: View) -> None:
            raise AssertionError

        def microbatch_order(self, view: View) -> None:
            raise AssertionError

        def observe(self, event: object) -> None:
            raise AssertionError

    script = Script(CHAIN, 1, hint=Untold(), group=GroupMembership(1, 2))
    script.arrived("F0@0")
    ordered(script, (0, "F0@1"))
    script.ran("F0@1")
    assert script.core.decide() is None


@pytest.mark.parametrize("step", [StepId(2, Mode.TRAIN, 2), StepId(0, Mode.FORWARD, 2), StepId(0, Mode.TRAIN, 3)])
def test_reports_and_orders_of_another_step_are_refused(step: StepId) -> None:
    for script, event, who in (
        (leader(), ReadyReported(step, 1, T("F0@1")), "member 1 of the group"),
        (follower(), Ordered(step, 0, T("F0@1")), "the group's leader"),
    ):
        message = refusal(lambda script=script, event=event: script.told(event))  # type: ignore[misc]
        assert who in message
        assert str(step) in message


def test_a_group_of_one_agrees_with_nobody() -> None:
    script = Script(CHAIN, 0, group=GroupMembership(0, 1))
    assert script.enqueued("F0@0") == []


@pytest.mark.parametrize(("member", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_member_outside_its_group_is_refused(member: int, size: int) -> None:
    with pytest.raises(ConfigError) as caught:
        GroupMembership(member, size)
    assert str(caught.value) == f"group: member is {member}, must be 0..{size - 1}"


def test_a_leader_waits_for_reports_only_once_it_has_the_inputs_itself() -> None:
    script = leader()
    assert script.core.wait_cause() is WaitCause.INPUT
    script.arrived("F0@0")
    assert script.core.wait_cause() is WaitCause.ORDER
    reported(script, "F0@1")
    script.enqueued("F0@1")
    assert script.core.wait_cause() is WaitCause.INPUT
