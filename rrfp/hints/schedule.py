"""A schedule as a hint, and its strict consumption: the fixed-order baseline."""

from __future__ import annotations

from collections.abc import Callable

from rrfp.core.hint import Hint, View
from rrfp.core.ready_set import ReadySet
from rrfp.core.schedule import Schedule
from rrfp.core.tasks import Mode, Task
from rrfp.errors import ConfigError

#: Gives the schedule for the step that a view shows; it must hold every task of that step, weight tasks included.
ScheduleSource = Callable[[View], Schedule]


class ScheduleHint(Hint):
    """Ranks ready tasks by their place in a schedule, and never waits for one that is not ready.

    Args:
        source: the schedule of a step.
    """

    def __init__(self, source: ScheduleSource) -> None:
        self._source = source
        self._order: tuple[Task, ...] = ()
        self._place: dict[Task, int] = {}

    def open_step(self, view: View) -> None:
        """Look the step's order up.

        Raises:
            ConfigError: if the schedule misses a task of this stage.
        """
        schedule = self._source(view)
        self._order = (schedule if view.mode is Mode.TRAIN else schedule.forward_only()).orders[view.stage]
        self._place = {task: place for place, task in enumerate(self._order)}
        for task in view.graph.tasks(view.stage, view.microbatches, view.mode):
            if task not in self._place:
                raise ConfigError(f"schedule {schedule.name} misses {task} on stage {view.stage}")

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        """See `rrfp.core.hint.Hint.choose`."""
        return min(ready, key=self._place.__getitem__)


class Strict(ScheduleHint):
    """Runs a schedule to the letter: waits for its next task, whatever else is ready."""

    may_wait = True

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        """See `rrfp.core.hint.Hint.choose`."""
        due = self._order[view.num_enqueued_total]
        return due if due in ready else None
