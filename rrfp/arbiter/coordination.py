"""How the ranks of a group come to run the same tasks in the same order: their messages, and the two ways.

**A leader** (`LeaderProtocol`): its core decides over tasks that are ready on every rank, appends each to a numbered
log as it enqueues it, and this broadcasts the entry; a follower's core runs exactly the log. The policy is the core's,
which also raises `ProtocolError` for a message that contradicts the log (a gap, a repetition, a report of a task that
the leader does not await). With a depth of two or more the leader decides while its lane still runs the task before,
so that entries travel behind compute.

**Agreement** (`AgreementArbiter`), without a leader, as in the paper (section 4.3): the baseline that
`coordination="agreement"` selects. Before each task every rank of a group proposes what its own core would run, and all
learn all proposals. If they are equal all run the task, otherwise no rank does, and they propose again once any of them
has another proposal. With a hint that is no pure function of the ready set (measured durations, order of arrival) they
may never agree: that is detected like any other deadlock, and reported with the proposals. The all-gather goes through
member 0 of the group, which collects proposals and announces the outcome of a round. So a round ends on member 0 before
any rank can propose in the next one, and no message of a step follows its last round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from rrfp.arbiter.arbiter import Arbiter
from rrfp.core import events as ev
from rrfp.core.group_step import GroupMembership
from rrfp.core.stage_core import StageCore
from rrfp.core.usage import WaitCause
from rrfp.errors import ProtocolError
from rrfp.model.tasks import StepId, Task


class GroupMessageKind(StrEnum):
    """The meaning of a message."""

    READY = "ready"  # to the leader: all that `task` needs from other stages has arrived here
    HELD = "held"  # to the leader: bytes that `task` has left behind here; `numbers`: held, output
    ORDER = "order"  # from the leader: entry numbers[0] of the log is `task`
    PROPOSE = "propose"  # agreement, to member 0: in round numbers[0] this rank would run `task`
    OUTCOME = "outcome"  # agreement, from there: round numbers[0] chose `task`; None: the ranks did not agree
    PROMPT = "prompt"  # agreement, from there: round numbers[0] is open again, propose


@dataclass(frozen=True, slots=True)
class GroupMessage:
    """One message inside a group."""

    kind: GroupMessageKind
    step: StepId
    task: Task | None = None
    #: See `GroupMessageKind`.
    numbers: tuple[int, ...] = ()


#: Sends a message to a member of this rank's group.
SendToMember = Callable[[int, GroupMessage], None]


class LeaderProtocol:
    """One rank's part in its group, leader or follower."""

    def __init__(
        self,
        group: GroupMembership,
        send: SendToMember,
        apply: Callable[[ev.Event], None],
        *,
        reports_bytes: bool = False,
    ) -> None:
        self._group = group
        self._send = send
        self._apply = apply
        self._reports_bytes = reports_bytes

    def perform(self, instruction: ev.ReportReady | ev.Order, step: StepId) -> None:
        """Send what an instruction of the core in ``step`` asks for."""
        if isinstance(instruction, ev.ReportReady):
            self._send(0, GroupMessage(GroupMessageKind.READY, step, instruction.task))
            return
        message = GroupMessage(GroupMessageKind.ORDER, step, instruction.task, (instruction.sequence,))
        for member in range(1, self._group.size):
            self._send(member, message)

    def on_completed(self, event: ev.Completed, step: StepId) -> None:
        """A task of this rank has completed: its leader's limit has to count it."""
        if self._reports_bytes and self._group.follows:
            self._send(0, GroupMessage(GroupMessageKind.HELD, step, event.task, (event.held, event.output)))

    def on_message(self, member: int, message: GroupMessage) -> None:
        """``member`` of the group sent ``message``; one that this member cannot send is a ProtocolError."""
        match message:
            case GroupMessage(GroupMessageKind.READY, step, task) if task is not None and not self._group.follows:
                self._apply(ev.ReadyReported(step, member, task))
            case GroupMessage(GroupMessageKind.HELD, step, task, (held, output)) if (
                task is not None and not self._group.follows
            ):
                self._apply(ev.HeldReported(step, member, task, held, output))
            case GroupMessage(GroupMessageKind.ORDER, step, task, (sequence,)) if task is not None and member == 0:
                self._apply(ev.Ordered(step, sequence, task))
            case _:
                raise ProtocolError(f"member {member} of the group says {message}, which makes no sense here")


def outcome_of(proposals: Iterable[Task | None]) -> Task | None:
    """The outcome of a round: the one task that all ranks of a group propose, or None."""
    different = set(proposals)
    return different.pop() if len(different) == 1 else None


class AgreementArbiter(Arbiter):
    """Dispatches the tasks of one rank when its group agrees on them; see `Arbiter`."""

    def __init__(
        self,
        core: StageCore,
        depth: int,
        dispatch: Callable[[Task], None],
        waiting: Callable[[WaitCause], None],
        *,
        group: GroupMembership,
        send: SendToMember,
    ) -> None:
        super().__init__(core, depth, dispatch, waiting)
        self.rounds = self.failed = 0
        self._group = group
        self._send = send
        self._step: StepId | None = None
        self._round = 0
        self._proposed: Task | None = None
        #: What this rank proposed when the last round failed: proposing it again alone would change nothing.
        self._refused: Task | None = None
        self._prompted = False
        #: Member 0: the proposals of this round, by member.
        self._proposals: dict[int, Task] = {}
        #: Messages of the next step, which this rank has not opened yet, by sender.
        self._early: list[tuple[int, GroupMessage]] = []

    @property
    def dispute(self) -> tuple[Task, str] | None:
        """What this rank proposes and cannot run, and why, for a report; None where it proposes nothing."""
        if self._proposed is not None:
            return self._proposed, "proposed to its group, where some rank has nothing to propose"
        return None if self._refused is None else (self._refused, "proposed to its group, which does not agree")

    def open_step(self, step: StepId) -> None:
        """The core has opened ``step``. Early messages that do not fit it are a ProtocolError."""
        self._step, self._round = step, 0
        self._proposed = self._refused = None
        self._prompted = False
        self._proposals.clear()
        early, self._early = self._early, []
        for member, message in early:
            try:
                self.on_message(member, message)
            except ProtocolError as error:
                error.sender = ("member", member)
                raise

    def on_message(self, member: int, message: GroupMessage) -> None:
        """``member`` of the group sent ``message``; a ProtocolError if that is impossible in this step and round."""
        step = self._step
        if message.step.number == (0 if step is None else step.number + 1):
            self._early.append((member, message))
            return
        if message.step != step:
            here = "before its first step" if step is None else f"in {step}"
            error = ProtocolError(
                f"member {member} of the group says {message.kind} in {message.step}, this rank is {here}"
            )
            error.is_of_callers = True
            raise error
        match message:
            case GroupMessage(GroupMessageKind.PROPOSE, _, Task() as task, (number,)) if (
                self._group.member == 0 and number == self._round
            ):
                self._collect(member, task)
            case GroupMessage(GroupMessageKind.OUTCOME, _, task, (number,)) if (
                self._is_heard_from(member) and number == self._round
            ):
                self._conclude(task)
            case GroupMessage(GroupMessageKind.PROMPT, _, None, (number,)) if (
                self._is_heard_from(member) and number == self._round
            ):
                self._prompted = self._proposed is None
                self.kick()
            case _:
                raise ProtocolError(
                    f"member {member} of the group says {message.kind} {message.task} {message.numbers} in round "
                    f"{self._round} of {step}, which makes no sense here"
                )

    def _is_heard_from(self, member: int) -> bool:
        """Whether ``member`` announces rounds and this rank receives its announcements."""
        return member == 0 < self._group.member

    def _next(self) -> None:
        """Propose a task; what the group agrees on is dispatched as soon as that is known."""
        if self._proposed is None and self._step is not None:
            decision = self._core.decide()
            if decision is not None and (decision.task != self._refused or self._prompted):
                self._propose(self._step, decision.task)

    def _wait_cause(self) -> WaitCause:
        return WaitCause.ORDER if self._proposed or self._refused else self._core.wait_cause()

    def _propose(self, step: StepId, task: Task) -> None:
        self._proposed, self._prompted = task, False
        if self._group.member == 0:
            self._collect(0, task)
        else:
            self._send(0, GroupMessage(GroupMessageKind.PROPOSE, step, task, (self._round,)))

    def _collect(self, member: int, task: Task) -> None:
        """Member 0: one more proposal; the first of a round that follows a failed one asks for all others."""
        if member in self._proposals:
            raise ProtocolError(f"member {member} of the group proposes twice in round {self._round} of {self._step}")
        if not self._proposals and self._refused is not None:
            self._announce(GroupMessageKind.PROMPT, None)
            self._prompted = self._proposed is None
            self.kick()
        self._proposals[member] = task
        if len(self._proposals) == self._group.size:
            agreed = outcome_of(self._proposals.values())
            self._proposals.clear()
            self._announce(GroupMessageKind.OUTCOME, agreed)
            self._conclude(agreed)

    def _announce(self, kind: GroupMessageKind, task: Task | None) -> None:
        assert self._step is not None
        for member in range(1, self._group.size):
            self._send(member, GroupMessage(kind, self._step, task, (self._round,)))

    def _conclude(self, task: Task | None) -> None:
        """The round has ended, with a task to run or without. It must be the one that this rank proposed."""
        if self._proposed is None or task not in (None, self._proposed):
            raise ProtocolError(
                f"the group agrees on {task} in round {self._round}; this rank proposed {self._proposed}"
            )
        self.rounds += 1
        proposed, self._proposed = self._proposed, None
        self._round += 1
        if task is None:
            self.failed += 1
            self._refused = proposed
        else:
            self._refused = None
            self._dispatch(task)
        self.kick()
