"""Records one rank's spans while a step runs."""

from __future__ import annotations

from rrfp.core.step_state import WaitCause
from rrfp.core.tasks import Task
from rrfp.trace.spans import DEFAULT_CAPACITY, MessageSpan, SpanRing, StepTrace, TaskSpan, WaitSpan


class Recorder:
    """Turns what the shell sees into spans. All times are seconds of the lane's clock.

    A wait begins where the last task ended, because the lane has been idle since then, and ends where the next one
    starts; when the cause changes on the way it is cut in two.

    Args:
        stage: this rank's stage.
        capacity: spans kept; older ones are dropped and counted.
    """

    def __init__(self, stage: int, capacity: int = DEFAULT_CAPACITY) -> None:
        self._stage = stage
        self._ring = SpanRing(capacity)
        self._opened = 0.0
        self._idle_since = 0.0
        self._cause: WaitCause | None = None
        self._cause_since = 0.0

    def open(self, now: float) -> None:
        """A step begins."""
        self._opened = self._idle_since = now
        self._cause = None

    def waiting(self, cause: WaitCause, now: float) -> None:
        """The lane has nothing to run, because of ``cause``."""
        if self._cause is cause:
            return
        if self._cause is None:
            self._cause_since = self._idle_since
        else:
            self._end_wait(now)
            self._cause_since = now
        self._cause = cause

    def ran(self, task: Task, start: float, end: float) -> None:
        """``task`` has completed."""
        if self._cause is not None:
            self._end_wait(start)
            self._cause = None
        self._ring.record(TaskSpan(self._stage, task, start, end))
        self._idle_since = end

    def message(self, span: MessageSpan) -> None:
        """One end of a message."""
        self._ring.record(span)

    def close(self, step: int, now: float) -> StepTrace:
        """The step has ended."""
        if self._cause is not None:
            self._end_wait(now)
            self._cause = None
        return self._ring.cut(step, self._opened, now)

    def _end_wait(self, end: float) -> None:
        if self._cause is not None and end > self._cause_since:
            self._ring.record(WaitSpan(self._stage, self._cause, self._cause_since, end))
