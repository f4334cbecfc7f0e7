"""Bounded idling of one stage in one step: the one wait that a stage may choose before a backward.

A backward that is begun moments before a forward comes keeps that forward waiting for the whole backward, and the
stages behind run dry. So a hint may prefer to wait (`rrfp.core.hint.Hint.awaits`), within these bounds:

- only for a forward that another stage has announced when it began it, so that it is known to be on its way;
- half of the mean duration of that backward at most, and not at all if the forward is expected later;
- once before each backward: when the wait is over, however it ended, the backward runs next or a forward does.

No clock is needed: durations come in events, and the shell times the wait. Announcements are advice. One that is lost,
late or repeated changes when tasks run, never whether they do, since a wait ends by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from rrfp.core import events as ev
from rrfp.core.durations import MeanDurations
from rrfp.core.task_state import TaskState, TaskStates
from rrfp.core.tasks import B, F, Task
from rrfp.errors import ProtocolError

#: The longest wait, as a part of the mean duration of the backward that waits.
LONGEST = 0.5


class Pauses:
    """See the module's docstring. Written by the step, from its events."""

    __slots__ = ("_announced", "_durations", "_is_spent", "_stage", "_states", "announces", "is_on", "is_wanted")

    def __init__(self, stage: int, states: TaskStates, durations: MeanDurations) -> None:
        self._stage = stage
        self._states = states
        self._durations = durations
        #: Whether the hint may prefer to wait; whether other stages hear of the forwards that begin here.
        self.is_wanted = self.announces = False
        #: The forward of another stage that is running there, with its expected seconds from start to arrival.
        self._announced: tuple[Task, float] | None = None
        #: Whether the one wait before the next backward was begun, or declined.
        self._is_spent = False
        #: Whether the stage waits now.
        self.is_on = False

    def announce(self, event: ev.Announced) -> tuple[()]:
        """A stage runs one task at a time, so forwards announced before have ended.

        Raises:
            ProtocolError: if no forward of this stage reads the announced one.
        """
        kind, m, virtual_stage = task = event.task
        source = self._states.read[kind].get(virtual_stage)
        if kind is not F or source is None or not 0 <= m < len(source.is_available):
            raise ProtocolError(f"{task} was announced on stage {self._stage}, where no forward reads it")
        if not source.is_available[m]:  # else its output was faster
            self._announced = task, event.seconds
        return ()

    def arrive(self, task: Task) -> None:
        """The output of ``task`` is here."""
        if self._announced is not None and self._announced[0] == task:
            self._announced = None

    def begin(self) -> tuple[()]:
        """The stage waits from now on."""
        self._is_spent = self.is_on = True
        return ()

    def end(self) -> tuple[()]:
        """The wait is over, or was declined."""
        self._is_spent, self.is_on = True, False
        return ()

    def enqueue(self, task: Task) -> None:
        """``task`` runs: another backward may be waited before once one has run."""
        self.is_on = False
        if task.kind is B:
            self._is_spent = False

    def before(self, task: Task) -> ev.Pause | None:
        """The wait that is possible before the backward ``task``."""
        if self._announced is None or (self._is_spent and not self.is_on):
            return None
        mean = self._durations.mean(B, self._states.of(task).chunk)
        return None if mean is None else ev.Pause(task, *self._announced, LONGEST * mean)

    def announcements(self, task: Task, state: TaskState) -> Iterator[ev.Announce]:
        """Of the forward ``task`` of this stage, which begins."""
        seconds = self._durations.mean(F, state.chunk)
        if seconds is not None:
            yield from (ev.Announce(task, peer, seconds) for peer in state.wiring(task.microbatch).peers)
