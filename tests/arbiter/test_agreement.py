"""Agreement over cores joined by queues: rounds, retries, and messages that make no sense."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest

from rrfp import Hint, View
from rrfp.arbiter.coordination import AgreementArbiter, GroupMessage, GroupMessageKind, LeaderProtocol
from rrfp.core import events as ev
from rrfp.core.group_step import GroupMembership
from rrfp.core.ready_set import ReadySet
from rrfp.core.stage_core import StageCore
from rrfp.core.usage import WaitCause
from rrfp.errors import ProtocolError
from rrfp.hints.registry import create_hint
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Mode, StepId, Task

STEP = StepId(0, Mode.TRAIN, 3)


def T(text: str) -> Task:
    return Task.parse(text)


class Members:
    """The ranks of stage 1 of 2. ``messages`` are under way, by sender and receiver, and stay in order.

    Args:
        hint: of each.
        size: how many they are.
        open_at_once: whether all have opened the step.
    """

    def __init__(
        self, hint: Callable[[], Hint] = lambda: create_hint("bf"), size: int = 2, *, open_at_once: bool = True
    ) -> None:
        self.messages: dict[tuple[int, int], deque[GroupMessage]] = {}
        self.orders: list[list[Task]] = [[] for _ in range(size)]
        self.causes: list[WaitCause | None] = [None] * size
        self.cores = [StageCore(TaskGraph.chain(2), 1, hint()) for _ in range(size)]
        self.arbiters = [self._arbiter(member, size) for member in range(size)]
        for member in range(size if open_at_once else 0):
            self.open(member)

    def open(self, member: int) -> None:
        self.arbiters[member].open_step(STEP)
        self._apply(member, ev.StepOpened(*STEP))

    def _apply(self, member: int, event: ev.Event) -> None:
        self.cores[member].apply(event)
        self.arbiters[member].kick()

    def _arbiter(self, member: int, size: int) -> AgreementArbiter:
        def dispatch(task: Task) -> None:
            self.orders[member].append(task)
            self.cores[member].apply(ev.Enqueued(task))

        def send(other: int, message: GroupMessage) -> None:
            self.messages.setdefault((member, other), deque()).append(message)

        def waiting(cause: WaitCause) -> None:
            self.causes[member] = cause

        return AgreementArbiter(
            self.cores[member], 1, dispatch, waiting, group=GroupMembership(member, size), send=send
        )

    def arrived(self, member: int, *tasks: str) -> None:
        for task in tasks:
            self._apply(member, ev.Arrived(STEP, T(task)))
        self.decide(member)

    def completed(self) -> None:
        """The task that all run ends."""
        for member, core in enumerate(self.cores):
            self._apply(member, ev.Completed(core.in_flight[0]))

    def decide(self, member: int) -> None:
        """Let a member decide if that is due, as the event loop does."""
        self.arbiters[member].decide()

    def hear(self) -> None:
        """Deliver all messages, and let everybody decide, until nothing is said any more."""
        while pairs := [pair for pair, messages in self.messages.items() if messages]:
            for sender, receiver in pairs:
                self.arbiters[receiver].on_message(sender, self.messages[sender, receiver].popleft())
                self.decide(receiver)
            self.decide(0)


def test_a_task_runs_once_all_propose_it() -> None:
    members = Members(size=3)
    for member in range(2):
        members.arrived(member, "F0@0")
    members.hear()
    assert members.orders == [[], [], []]
    assert members.causes[:2] == [WaitCause.ORDER, WaitCause.ORDER]
    assert members.arbiters[0].dispute == (T("F0@1"), "proposed to its group, where some rank has nothing to propose")
    members.arrived(2, "F0@0")
    members.hear()
    assert members.orders == [[T("F0@1")]] * 3
    assert [arbiter.dispute for arbiter in members.arbiters] == [None] * 3
    assert [(arbiter.rounds, arbiter.failed) for arbiter in members.arbiters] == [(1, 0)] * 3


@pytest.mark.parametrize("late", [0, 1])
def test_after_a_disagreement_the_next_arrival_calls_a_round_for_all(late: int) -> None:
    """One rank has F0 and F1 and proposes F0, the other only F1: it changes its mind when F0 comes."""
    members = Members()
    members.arrived(1 - late, "F1@0", "F0@0")
    members.arrived(late, "F1@0")
    members.hear()
    assert members.orders == [[], []]
    assert [arbiter.failed for arbiter in members.arbiters] == [1, 1]
    assert members.arbiters[late].dispute == (T("F1@1"), "proposed to its group, which does not agree")
    members.arrived(late, "F2@0")  # changes nothing: nobody proposes again
    assert not any(members.messages.values())
    members.arrived(late, "F0@0")
    members.hear()
    assert members.orders == [[T("F0@1")]] * 2


def test_any_delays_end_in_one_order() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        members = Members(size=rng.choice([2, 3, 4]))
        size = len(members.cores)
        arrivals = [(member, f"F{m}@0") for member in range(size) for m in range(3)]
        while len(members.orders[0]) < 6 or members.cores[0].in_flight:
            said = [pair for pair, messages in members.messages.items() if messages]
            if arrivals and rng.random() < 0.3:
                members.arrived(*arrivals.pop(rng.randrange(len(arrivals))))
            elif said:
                sender, receiver = rng.choice(said)
                members.arbiters[receiver].on_message(sender, members.messages[sender, receiver].popleft())
                members.decide(receiver)
            elif len({len(order) for order in members.orders}) == 1 and members.cores[0].in_flight:
                members.completed()
            for member in range(size):
                if rng.random() < 0.5:
                    members.decide(member)
        assert all(order == members.orders[0] for order in members.orders), seed
        assert sorted(members.orders[0]) == sorted(members.cores[0].graph.tasks(1, 3))


class Stubborn(Hint):
    """Wants the microbatch that it was made for."""

    made = 0

    def __init__(self) -> None:
        self._wanted = Stubborn.made % 2
        Stubborn.made += 1

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        return min(ready, key=lambda task: task.microbatch != self._wanted)


def test_ranks_that_never_agree_fall_silent() -> None:
    members = Members(Stubborn)
    for member in range(2):
        members.arrived(member, "F0@0", "F1@0", "F2@0")
    members.hear()
    assert members.orders == [[], []]
    assert not any(members.messages.values())
    assert {arbiter.dispute for arbiter in members.arbiters} == {
        (T(task), "proposed to its group, which does not agree") for task in ("F0@1", "F1@1")
    }


def test_messages_of_a_step_that_this_rank_has_not_opened_wait_for_it() -> None:
    members = Members(open_at_once=False)
    members.open(1)
    members.arrived(1, "F0@0")
    members.hear()
    assert members.orders == [[], []]
    members.open(0)
    members.arrived(0, "F0@0")
    members.hear()
    assert members.orders == [[T("F0@1")]] * 2


@pytest.mark.parametrize(
    ("member", "sender", "message", "text"),
    [
        (
            0,
            1,
            GroupMessage(GroupMessageKind.PROPOSE, STEP, T("F0@1"), (1,)),
            "says propose F0@1 (1,) in round 0 of step 0",
        ),
        (0, 1, GroupMessage(GroupMessageKind.PROPOSE, STEP, None, (0,)), "says propose None (0,) in round 0"),
        (0, 1, GroupMessage(GroupMessageKind.PROPOSE, STEP, T("F0@1")), "says propose F0@1 () in round 0"),
        (0, 1, GroupMessage(GroupMessageKind.OUTCOME, STEP, T("F0@1"), (0,)), "says outcome F0@1 (0,)"),
        (0, 1, GroupMessage(GroupMessageKind.PROMPT, STEP, None, (0,)), "says prompt None (0,)"),
        (1, 0, GroupMessage(GroupMessageKind.PROPOSE, STEP, T("F0@1"), (0,)), "says propose F0@1 (0,)"),
        (1, 0, GroupMessage(GroupMessageKind.OUTCOME, STEP, T("F0@1"), (3,)), "says outcome F0@1 (3,)"),
        (
            1,
            0,
            GroupMessage(GroupMessageKind.OUTCOME, STEP, T("F0@1"), (0,)),
            "the group agrees on F0@1 in round 0; this rank proposed",
        ),
        (
            1,
            0,
            GroupMessage(GroupMessageKind.OUTCOME, STEP, None, (0,)),
            "the group agrees on None in round 0; this rank proposed None",
        ),
        (1, 0, GroupMessage(GroupMessageKind.ORDER, STEP, T("F0@1"), (0,)), "says order F0@1 (0,)"),
        (
            1,
            0,
            GroupMessage(GroupMessageKind.PROMPT, STEP._replace(number=2), None, (0,)),
            "says prompt in step 2 (train, 3 microbatch",
        ),
        (
            1,
            0,
            GroupMessage(GroupMessageKind.PROMPT, STEP._replace(microbatches=4), None, (0,)),
            "says prompt in step 0 (train, 4",
        ),
    ],
)
def test_messages_that_make_no_sense_are_refused(member: int, sender: int, message: GroupMessage, text: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        Members().arbiters[member].on_message(sender, message)
    assert text in str(caught.value)


def test_a_second_proposal_in_a_round_is_refused() -> None:
    members = Members(size=3)
    members.arbiters[0].on_message(1, GroupMessage(GroupMessageKind.PROPOSE, STEP, T("F0@1"), (0,)))
    with pytest.raises(ProtocolError, match=r"member 1 of the group proposes twice in round 0 of step 0"):
        members.arbiters[0].on_message(1, GroupMessage(GroupMessageKind.PROPOSE, STEP, T("F1@1"), (0,)))


def test_an_outcome_that_this_rank_did_not_propose_is_refused() -> None:
    members = Members()
    members.arrived(1, "F1@0")
    with pytest.raises(ProtocolError, match=r"the group agrees on F0@1 in round 0; this rank proposed F1@1"):
        members.arbiters[1].on_message(0, GroupMessage(GroupMessageKind.OUTCOME, STEP, T("F0@1"), (0,)))


# A leader's messages.


@pytest.mark.parametrize(
    ("rank", "sender", "message"),
    [
        (0, 1, GroupMessage(GroupMessageKind.ORDER, STEP, T("F0@1"), (0,))),
        (0, 1, GroupMessage(GroupMessageKind.READY, STEP, None)),
        (0, 1, GroupMessage(GroupMessageKind.HELD, STEP, T("F0@1"), (1,))),
        (0, 1, GroupMessage(GroupMessageKind.HELD, STEP, None, (1, 2))),
        (0, 1, GroupMessage(GroupMessageKind.PROPOSE, STEP, T("F0@1"), (0,))),
        (1, 0, GroupMessage(GroupMessageKind.ORDER, STEP, T("F0@1"))),
        (1, 0, GroupMessage(GroupMessageKind.ORDER, STEP, None, (0,))),
        (1, 0, GroupMessage(GroupMessageKind.READY, STEP, T("F0@1"))),
        (2, 1, GroupMessage(GroupMessageKind.ORDER, STEP, T("F0@1"), (0,))),
    ],
)
def test_messages_that_are_not_the_senders_to_say_are_refused(rank: int, sender: int, message: GroupMessage) -> None:
    told: list[ev.Event] = []
    protocol = LeaderProtocol(GroupMembership(rank, 3), lambda member, said: None, told.append)
    with pytest.raises(ProtocolError, match=rf"member {sender} of the group says .*, which makes no sense here"):
        protocol.on_message(sender, message)
    assert not told


def protocol_of(member: int, said: list[tuple[int, GroupMessage]], *, reports_bytes: bool = True) -> LeaderProtocol:
    """The part of a member of three, which adds to ``said`` what it says to whom."""
    told: list[ev.Event] = []
    return LeaderProtocol(
        GroupMembership(member, 3),
        lambda other, message: said.append((other, message)),
        told.append,
        reports_bytes=reports_bytes,
    )


@pytest.mark.parametrize("reports", [True, False])
def test_a_follower_reports_what_it_holds_only_where_bytes_are_limited(reports: bool) -> None:
    said: list[tuple[int, GroupMessage]] = []
    protocol_of(2, said, reports_bytes=reports).on_completed(ev.Completed(T("F0@1"), held=7, output=3), STEP)
    assert said == ([(0, GroupMessage(GroupMessageKind.HELD, STEP, T("F0@1"), (7, 3)))] if reports else [])


def test_a_leader_sends_every_follower_each_entry_and_no_bytes() -> None:
    said: list[tuple[int, GroupMessage]] = []
    protocol = protocol_of(0, said)
    protocol.perform(ev.Order(4, T("B1@1")), STEP)
    protocol.on_completed(ev.Completed(T("F0@1"), held=7), STEP)
    assert said == [(member, GroupMessage(GroupMessageKind.ORDER, STEP, T("B1@1"), (4,))) for member in (1, 2)]
