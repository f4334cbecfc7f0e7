"""The order in which a logged step ran, as a schedule: a replay is that schedule, run strictly."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rrfp.errors import ConfigError
from rrfp.model.graph import TaskGraph
from rrfp.model.schedule import Schedule
from rrfp.model.tasks import Kind, Mode, Task
from rrfp.model.visits import Visits


@dataclass(frozen=True, slots=True, eq=False)
class ExecutedSchedule:
    """A training step that ran: a schedule for the same graph, microbatches and visits, and for no other."""

    #: Of the logs and the step, for reports.
    name: str
    graph: TaskGraph
    visits: Visits
    #: For each stage, the tasks in the order in which its lane took them.
    orders: tuple[tuple[Task, ...], ...]

    def __post_init__(self) -> None:
        Schedule(self.name, self.orders).validate(self.graph, self.visits.microbatches, visits=self.visits)

    def __str__(self) -> str:
        return self.name

    def for_step(
        self, graph: TaskGraph, microbatches: int, visits: Visits | None = None, mode: Mode = Mode.TRAIN
    ) -> Schedule:
        """The orders, for a step like the logged one; a ConfigError names the first task that differs, and how.

        An evaluation, which is another step, runs its forwards microbatch by microbatch.
        """
        visits = Visits(microbatches) if visits is None else visits
        if mode is not Mode.TRAIN:
            return _in_microbatch_order(self.name, graph, visits)
        self._check_same(graph, visits)
        return Schedule(self.name, self.orders)

    def check_order(self, in_order: Collection[tuple[Kind, int]]) -> None:
        """Refuse forced orders that the step did not keep; a ConfigError names the first task that breaks one."""
        for stage, order in enumerate(self.orders):
            last: dict[tuple[Kind, int], Task] = {}
            for task in order:
                row = (task.kind, task.virtual_stage)
                before = last.get(row, task)
                if row in in_order and before.microbatch > task.microbatch:
                    raise self._refusal(
                        stage, before, f"it ran before {task}, and this pipeline runs them in microbatch order"
                    )
                last[row] = task

    def _check_same(self, graph: TaskGraph, visits: Visits) -> None:
        now, then = _tasks(graph, visits), _tasks(self.graph, self.visits)
        for stage, order in enumerate(self.orders):
            for task in order:
                if now.get(task) != then[task]:
                    raise self._refusal(stage, task, self._difference(graph, visits))
        added = min((task for task in now if task not in then), key=lambda task: task.microbatch, default=None)
        if added is not None:
            raise self._refusal(graph.stage_of[added.virtual_stage], added, self._difference(graph, visits))

    def _refusal(self, stage: int, task: Task, difference: str) -> ConfigError:
        return ConfigError(f"replay {self.name} cannot go on with {task} on stage {stage}: {difference}")

    def _difference(self, graph: TaskGraph, visits: Visits) -> str:
        """The first difference between the step and the logged one, where some task differs."""
        properties = (
            ("microbatches", visits.microbatches, self.visits.microbatches),
            ("the stage of each virtual stage", graph.stage_of, self.graph.stage_of),
            ("split, by virtual stage,", graph.split, self.graph.split),
            ("the list of edges", graph.edges, self.graph.edges),
            ("skipped, by microbatch,", _skipped(visits), _skipped(self.visits)),
        )
        return next(f"{name} is {now}, was {then} in the log" for name, now, then in properties if now != then)


def _tasks(graph: TaskGraph, visits: Visits) -> dict[Task, tuple[int, frozenset[Task]]]:
    """Each task of a step, with its stage and its inputs."""
    return {
        task: (stage, frozenset(filter(visits.exists, graph.inputs(task))))
        for stage in range(graph.placement.stages)
        for task in graph.tasks(stage, visits.microbatches)
        if visits.exists(task)
    }


def _skipped(visits: Visits) -> list[list[int]]:
    return [sorted(skipped) for skipped in visits.skipped]


def _in_microbatch_order(name: str, graph: TaskGraph, visits: Visits) -> Schedule:
    by_stage = (
        filter(visits.exists, graph.tasks(stage, visits.microbatches, Mode.FORWARD))
        for stage in range(graph.placement.stages)
    )
    orders = (sorted(tasks, key=lambda task: (task.microbatch, task.virtual_stage)) for tasks in by_stage)
    return Schedule(name, tuple(map(tuple, orders)))
