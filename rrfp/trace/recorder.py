"""Records one rank's spans while a step runs."""

from __future__ import annotations

from collections.abc import Callable

from rrfp.core.tasks import Task
from rrfp.core.usage import Peaks, WaitCause
from rrfp.trace.spans import DEFAULT_CAPACITY, MessageSpan, SpanRing, StagePeaks, StepTrace, TaskSpan, WaitSpan


class Recorder:
    """Records the spans of one stage.

    A wait begins at the end of the last task, because the lane has been idle since, and ends at the start of the next;
    a change of the cause cuts it in two.

    Args:
        stage: this rank's stage.
        now: the lane's clock, in seconds.
        capacity: spans kept; older ones are dropped and counted.
    """

    def __init__(self, stage: int, now: Callable[[], float], capacity: int = DEFAULT_CAPACITY) -> None:
        self._stage = stage
        self._now = now
        self._ring = SpanRing(capacity)
        self._opened = 0.0
        self._idle_since = 0.0
        self._cause: WaitCause | None = None
        self._cause_since = 0.0

    def open(self) -> None:
        """A step begins."""
        self._opened = self._idle_since = self._now()
        self._cause = None

    def waiting(self, cause: WaitCause) -> None:
        """The lane has nothing to run, because of ``cause``."""
        if self._cause is cause:
            return
        now = self._now()
        if self._cause is None:
            self._cause_since = self._idle_since
        else:
            self._end_wait(now)
            self._cause_since = now
        self._cause = cause

    @property
    def wait(self) -> tuple[WaitCause, float] | None:
        """The cause and the beginning of the wait since the last task; None where there is none."""
        return None if self._cause is None else (self._cause, self._cause_since)

    def ran(self, task: Task, start: float, end: float, launched: float | None = None) -> None:
        """``task`` has completed. ``launched``: see `TaskSpan`."""
        if self._cause is not None:
            self._end_wait(start)
            self._cause = None
        self._ring.record(TaskSpan(self._stage, task, start, end, launched))
        self._idle_since = end

    def sent(self, peer: int, task: Task, num_bytes: int) -> None:
        """The output of ``task`` was sent to stage ``peer``."""
        self._ring.record(MessageSpan(self._stage, peer, task, self._now(), None, num_bytes))

    def arrived(self, peer: int, task: Task, num_bytes: int) -> None:
        """The output of ``task`` arrived from stage ``peer``."""
        self._ring.record(MessageSpan(peer, self._stage, task, None, self._now(), num_bytes))

    def close(self, step: int, peaks: Peaks | None = None) -> StepTrace:
        """The step has ended. ``peaks`` are the stage's in that step, where known."""
        now = self._now()
        if self._cause is not None:
            self._end_wait(now)
            self._cause = None
        return self._ring.cut(step, self._opened, now, () if peaks is None else (StagePeaks(self._stage, peaks),))

    def _end_wait(self, end: float) -> None:
        if self._cause is not None and end > self._cause_since:
            self._ring.record(WaitSpan(self._stage, self._cause, self._cause_since, end))
