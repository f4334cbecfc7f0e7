"""Lanes of a group in virtual time: a task begins when all ranks are at it, as collectives inside tasks make it.

Each rank has a `TimerLane` of its own, and reaches a task when its lane gets to it. From the moment at which the last
rank does, the task takes what it takes on the slowest, and it ends on all of them at that one instant. Ranks that come
together for different tasks would exchange nonsense, or hang: that is refused. It knows no core, and no coordination.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from rrfp.errors import ProtocolError
from rrfp.lab.emulated import Durations, EmulatedStage
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Task
from rrfp.testing.clock import TimerLane


@dataclass(slots=True)
class _Meeting:
    """The ranks of a group at one place of their order: who came first, for what, and what is done in the end."""

    first: int
    task: Task
    seconds: float = 0.0
    completions: list[Callable[[], None]] = field(default_factory=list)


class Meetings:
    """Where the ranks of one group meet.

    Args:
        members: ranks of the group.
    """

    def __init__(self, members: int) -> None:
        self.members = members
        self._open: dict[int, _Meeting] = {}

    def reach(self, number: int, member: int, task: Task, seconds: float) -> _Meeting:
        """``member`` begins its part of its task ``number``, which takes so long.

        Raises:
            ProtocolError: if another member is there for another task: their collectives would not match.
        """
        meeting = self._open.setdefault(number, _Meeting(member, task))
        if meeting.task != task:
            raise ProtocolError(
                f"collective mismatch: member {member} of the group runs {task} as number {number}, "
                f"where member {meeting.first} runs {meeting.task}"
            )
        meeting.seconds = max(meeting.seconds, seconds)
        return meeting

    def end(self, number: int, complete: Callable[[], None], now: Callable[[], float]) -> None:
        """A member has come to task ``number``: complete it on all, in time, once the last one has."""
        meeting = self._open[number]
        meeting.completions.append(complete)
        if len(meeting.completions) == self.members:
            del self._open[number]
            loop, ended = asyncio.get_running_loop(), now() + meeting.seconds
            for each in meeting.completions:
                loop.call_at(ended, each)


class GroupLane(TimerLane):
    """The lane of one rank. See the module's docstring.

    Args:
        meetings: those of the group.
        member: which rank of it this is.
    """

    def __init__(self, meetings: Meetings, member: int) -> None:
        super().__init__()
        self._meetings = meetings
        self._member = member
        self._num_met = 0
        self._meets = False

    def meet(self, task: Task, seconds: float) -> None:
        """The call that is being made is this rank's part of ``task``, and takes so long. Errors as in `Meetings`."""
        self._meetings.reach(self._num_met, self._member, task, seconds)
        self._meets = True

    def _end_at(self, ended: float, complete: Callable[[], None]) -> None:
        if not self._meets:
            super()._end_at(ended, complete)
            return
        self._meets = False
        self._num_met += 1
        self._meetings.end(self._num_met - 1, complete, self.now)


class MeetingStage(EmulatedStage):
    """An emulated stage whose tasks meet those of the other ranks of its group.

    Args:
        graph: who feeds whom.
        durations: how long this rank's part of each task takes.
        lane: where they meet.
    """

    def __init__(self, graph: TaskGraph, durations: Durations, lane: GroupLane) -> None:
        super().__init__(graph, durations)
        self._meet = lane.meet

    def _run(self, task: Task) -> None:
        self._meet(task, self.durations(task))
