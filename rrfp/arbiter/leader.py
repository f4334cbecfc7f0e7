"""The leader of a group and its followers: reports one way, the numbered log the other. No policy: that is the core's.

The leader's core decides over tasks that are ready on every rank, appends each to the log as it enqueues it, and this
broadcasts the entry; a follower's core runs exactly the log. What contradicts it (a gap, a repetition, a report of a
task that nobody awaits) the core raises as `ProtocolError`. With a depth of two or more the leader decides while its
lane still runs the task before, so that entries travel behind compute.
"""

from __future__ import annotations

from collections.abc import Callable

from rrfp.arbiter.group_messages import Say, Saying, Word
from rrfp.core import events as ev
from rrfp.core.order_log import Group
from rrfp.core.tasks import StepId
from rrfp.errors import ProtocolError


class GroupTalk:
    """One rank's part in its group, leader or follower.

    Args:
        group: which.
        say: says a word to a member.
        tell: takes events to the core.
        tells_bytes: whether followers report what tasks hold; needed where a limit counts bytes.
    """

    def __init__(self, group: Group, say: Say, tell: Callable[[ev.Event], None], *, tells_bytes: bool = False) -> None:
        self._group = group
        self._say = say
        self._tell = tell
        self._tells_bytes = tells_bytes

    def perform(self, instruction: ev.ReportReady | ev.Order, step: StepId) -> None:
        """Do what the core says in ``step``."""
        if isinstance(instruction, ev.ReportReady):
            self._say(0, Word(Saying.READY, step, instruction.task))
            return
        word = Word(Saying.ORDER, step, instruction.task, (instruction.sequence,))
        for member in range(1, self._group.size):
            self._say(member, word)

    def completed(self, event: ev.Completed, step: StepId) -> None:
        """A task of this rank has completed: its leader's limit has to count it."""
        if self._tells_bytes and self._group.follows:
            self._say(0, Word(Saying.HELD, step, event.task, (event.held, event.output)))

    def take(self, member: int, word: Word) -> None:
        """``member`` of the group said ``word``.

        Raises:
            ProtocolError: if it is not what that member says, or contradicts the core's state.
        """
        match word:
            case Word(Saying.READY, step, task) if task is not None and not self._group.follows:
                self._tell(ev.ReadyReported(step, member, task))
            case Word(Saying.HELD, step, task, (held, output)) if task is not None and not self._group.follows:
                self._tell(ev.HeldReported(step, member, task, held, output))
            case Word(Saying.ORDER, step, task, (sequence,)) if task is not None and member == 0:
                self._tell(ev.Ordered(step, sequence, task))
            case _:
                raise ProtocolError(f"member {member} of the group says {word}, which makes no sense here")
