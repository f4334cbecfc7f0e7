"""What one group did in a simulated step, and why its lanes were idle meanwhile."""

from __future__ import annotations

from collections import Counter

from rrfp.core import events as ev
from rrfp.core.stage_core import StageCore
from rrfp.core.tasks import Task
from rrfp.core.usage import WaitCause
from rrfp.trace.spans import TaskSpan, WaitSpan


class GroupTimeline:
    """The spans and waits of one stage of ranks that begin and end their tasks together.

    It has one more core of the stage, which learns what is true of all ranks, without delay: what it would run is ready
    on every rank. That core never decides anything.
    """

    def __init__(self, core: StageCore, members: int) -> None:
        self.core = core
        self.spans: list[TaskSpan] = []
        #: When its lanes were idle. ORDER: a task was ready on all ranks; any other cause: none was.
        self.waits: list[WaitSpan] = []
        self._members = members
        self._num_arrived: Counter[Task] = Counter()
        self._is_running = False
        #: Why the lanes are idle, and since when; None while they are not.
        self._idle: tuple[WaitCause, float] | None = None
        #: The cause as of the last event that was applied to the core.
        self._cause: WaitCause | None = None

    def apply(self, event: ev.Event) -> None:
        """Apply ``event``, which has happened on all ranks, to the core."""
        # The core has no peers and nothing to reduce: its instructions are of no interest.
        self.core.apply(event)
        self._cause = None

    def begin(self, task: Task, start: float, end: float) -> None:
        """All ranks begin ``task``."""
        self._is_running = True
        self.spans.append(TaskSpan(self.core.stage, task, start, end))
        self.apply(ev.Enqueued(task))

    def complete(self, completed: ev.Completed) -> None:
        """All ranks end the task that they ran."""
        self._is_running = False
        self.apply(completed)

    def arrive(self, arrived: ev.Arrived) -> None:
        """One more rank has this message."""
        self._num_arrived[arrived.task] += 1
        if self._num_arrived[arrived.task] == self._members:
            self.apply(arrived)

    def decided(self, now: float, *, is_pausing: bool = False) -> None:
        """The ranks have enqueued what they may: from now on the lanes are busy, or idle for a cause."""
        cause = WaitCause.CHOICE if is_pausing else self._wait_cause()
        self._wait(None if self._is_running else cause, now)

    def end(self, now: float) -> None:
        """The step is over."""
        self._wait(None, now)

    def _wait_cause(self) -> WaitCause:
        if self._cause is None:
            is_ready = self.core.decide() is not None
            self._cause = WaitCause.ORDER if is_ready else self.core.wait_cause()
        return self._cause

    def _wait(self, cause: WaitCause | None, now: float) -> None:
        before = self._idle
        if before is not None and before[0] is cause:
            return
        if before is not None and before[1] < now:
            self.waits.append(WaitSpan(self.core.stage, before[0], before[1], now))
        self._idle = None if cause is None else (cause, now)
