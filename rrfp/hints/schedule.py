"""A schedule as a hint, and run strictly: the fixed-order baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rrfp.core.hint import Hint, View
from rrfp.core.ready_set import ReadySet
from rrfp.errors import ConfigError
from rrfp.model.schedule import Schedule
from rrfp.model.tasks import Kind, Mode, Task
from rrfp.model.visits import Visits

#: Returns the schedule for the step of a view, with every task of that step, weight tasks included.
ScheduleSource = Callable[[View], Schedule]


class ScheduleHint(Hint):
    """Orders ready tasks by their position in a schedule, and never waits for a task that is not ready."""

    def __init__(self, source: ScheduleSource) -> None:
        self._source = source
        self._order: tuple[Task, ...] = ()
        self._position: dict[Task, int] = {}
        self._is_monotone = True

    def open_step(self, view: View) -> None:
        """Look up the order of the step; a ConfigError if the schedule lacks a task of this stage.

        Tasks of virtual stages that a microbatch skips drop out: the others keep their order, which still ends.
        """
        schedule = self._source(view)
        order, visits = schedule.orders[view.stage], Visits(view.microbatches, view.skipped)
        if view.mode is not Mode.TRAIN:
            order = tuple(task for task in order if task.kind is Kind.F)
        self._order = tuple(filter(visits.exists, order)) if visits.are_partial else order
        self._position = {task: position for position, task in enumerate(self._order)}
        for task in view.graph.tasks(view.stage, view.microbatches, view.mode):
            if task not in self._position and visits.exists(task):
                raise ConfigError(f"schedule {schedule.name} misses {task} on stage {view.stage}")
        self._is_monotone = _is_monotone(self._order)

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        """See `rrfp.core.hint.Hint.choose`."""
        # Why only the heads? Looking at a thousand ready tasks takes half a millisecond, and in a schedule that keeps
        # microbatch order no other task can come first.
        candidates = ready.heads() if self._is_monotone else iter(ready)
        return min(candidates, key=self._position.__getitem__)


class Strict(ScheduleHint):
    """Runs a schedule to the letter: waits for its next task, whichever others are ready."""

    may_wait = True

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        """See `rrfp.core.hint.Hint.choose`."""
        due = self._order[view.num_enqueued_total]
        return due if due in ready else None


def _is_monotone(order: Sequence[Task]) -> bool:
    """Whether the tasks of each kind and virtual stage are in microbatch order."""
    last: dict[tuple[Kind, int], int] = {}
    for kind, microbatch, virtual_stage in order:
        if last.get((kind, virtual_stage), -1) > microbatch:
            return False
        last[kind, virtual_stage] = microbatch
    return True
