"""The leader of a group and its followers: reports one way, the numbered log the other. No policy: that is the core's.

The leader's core decides over tasks that are ready on every rank, appends each to the log as it enqueues it, and this
broadcasts the entry; a follower's core runs exactly the log. The core raises `ProtocolError` for a message that
contradicts the log (a gap, a repetition, a report of a task that the leader does not await). With a depth of two or
more the leader decides while its lane still runs the task before, so that entries travel behind compute.
"""

from __future__ import annotations

from collections.abc import Callable

from rrfp.arbiter.group_messages import GroupMessage, GroupMessageKind, SendToMember
from rrfp.core import events as ev
from rrfp.core.group_step import GroupMembership
from rrfp.errors import ProtocolError
from rrfp.model.tasks import StepId


class LeaderProtocol:
    """One rank's part in its group, leader or follower.

    Where a limit counts bytes, ``reports_bytes`` makes followers report the bytes that their tasks hold.
    """

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
