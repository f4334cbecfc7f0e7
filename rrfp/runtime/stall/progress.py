"""What a rank knows about its own progress, as far as a poll asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rrfp.core.stage_core import StageCore
from rrfp.core.tasks import StepId, Task
from rrfp.core.topology import Topology
from rrfp.core.waiting import describe
from rrfp.runtime.stall.status import RankStatus


class Progress:
    """Counts what happens on one rank.

    Args:
        core: the rank's.
        place: where the rank is.
        now: the clock, in seconds.
    """

    def __init__(self, core: StageCore, place: Topology, now: Callable[[], float]) -> None:
        #: The step that this rank is in, None between steps.
        self.step: StepId | None = None
        self.steps_ended = 0
        #: Whether this rank is gathering something from all ranks between two steps, and how often it has.
        self.is_gathering = False
        self.gatherings_ended = 0
        #: Messages of a step, tensors and credits, since the start.
        self.sent = 0
        self.received = 0
        self._completed = 0
        #: A task that is ready and does not start, and why: its group disagrees. None where nothing of the kind is so.
        self.dispute: Callable[[], tuple[Task, str] | None] = lambda: None
        #: What the rank waits for beside inputs of tasks and credits.
        self.also_awaits: Callable[[], Iterable[str]] = tuple
        self._core = core
        self._place = place
        self._now = now
        self._chores: list[str] = []
        self._running_since = self._active_at = 0.0

    def open(self, step: StepId) -> None:
        """The rank's caller began ``step``."""
        self.step = step
        self.touch()

    def end(self) -> None:
        """The step has ended."""
        self.step = None
        self.steps_ended += 1

    def touch(self) -> None:
        """Something happened."""
        self._active_at = self._now()

    def enqueued(self) -> None:
        """A task was enqueued."""
        if len(self._core.in_flight) == 1:
            self._running_since = self._now()

    def completed(self) -> None:
        """A task has completed."""
        self._completed += 1
        self._running_since = self._now()

    @contextmanager
    def chore(self, name: str) -> Iterator[None]:
        """The lane does something that is no task."""
        self._chores.append(name)
        self._running_since = self._now()
        try:
            yield
        finally:
            self._chores.remove(name)
            self.touch()

    def idle_seconds(self) -> float:
        """For how long nothing has happened while all ranks are waited for; 0 otherwise, and while the lane is busy."""
        if (self.step is None and not self.is_gathering) or self.running():
            return 0.0
        return self._now() - self._active_at

    def running(self) -> str | None:
        """The task, or other work, that the lane is busy with, as people call it."""
        return self._chores[0] if not self._core.in_flight and self._chores else _text(self.running_task())

    def running_task(self) -> Task | None:
        """The task that the lane is busy with."""
        return self._core.in_flight[0] if self._core.in_flight else None

    def running_seconds(self) -> float:
        """For how long it has been busy with that; 0 where it is idle."""
        return 0.0 if self.running() is None else self._now() - self._running_since

    def status(self) -> RankStatus:
        """How this rank is doing, for a poll."""
        running = self.running()
        return RankStatus(
            stage=self._core.stage,
            step=None if self.step is None else self.step.number,
            steps_ended=self.steps_ended,
            running=running,
            running_s=self.running_seconds(),
            can_run=not running and self.step is not None and self._can_run(),
            completed=self._completed,
            sent=self.sent,
            received=self.received,
            awaits=() if self.step is None else tuple(self._awaits()),
            gathering=self.is_gathering,
            gatherings_ended=self.gatherings_ended,
            name=self._place.name,
        )

    def _can_run(self) -> bool:
        return self.dispute() is None and self._core.decide() is not None

    def _awaits(self) -> list[str]:
        return [*describe(self._core, self._place, dispute=self.dispute()), *self.also_awaits()]


def _text(task: Task | None) -> str | None:
    return None if task is None else str(task)
