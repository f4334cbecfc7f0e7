"""Schedules: a total order of tasks for each stage, as plain printable data, and the dry run that checks one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rrfp.core.graph import Graph
from rrfp.core.tasks import Kind, Mode, Task
from rrfp.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Schedule:
    """A total order of tasks for each stage.

    Attributes:
        name: what it is called in reports.
        orders: for each stage, its tasks in the order in which they run.
    """

    name: str
    orders: tuple[tuple[Task, ...], ...]

    def __str__(self) -> str:
        return "\n".join(f"stage {i}: {' '.join(map(str, order))}" for i, order in enumerate(self.orders))

    def with_weights(self, graph: Graph) -> Schedule:
        """The same order for a graph with split virtual stages: a missing W runs right after its B."""
        return Schedule(self.name, tuple(tuple(_with_weights(order, graph)) for order in self.orders))

    def forward_only(self) -> Schedule:
        """The forwards alone, in the same order."""
        return Schedule(self.name, tuple(tuple(t for t in order if t.kind is Kind.F) for order in self.orders))

    def peak_held(self, stage: int, graph: Graph) -> int:
        """The largest D of ``stage``, in chunk tasks, when it runs exactly this order."""
        held = peak = 0
        for task in self.orders[stage]:
            held += task.kind is Kind.F
            peak = max(peak, held)
            held -= task.kind is not Kind.F and task.kind is graph.last_kind(task.virtual_stage, Mode.TRAIN)
        return peak

    def validate(self, graph: Graph, microbatches: int, mode: Mode = Mode.TRAIN) -> Schedule:
        """Check that every task of a step occurs once, where it belongs, and that the orders do not deadlock.

        Returns:
            This schedule.

        Raises:
            ConfigError: naming the stage and the entry at fault.
        """
        stages = graph.placement.stages
        if len(self.orders) != stages:
            raise ConfigError(f"schedule {self.name}: has {len(self.orders)} stages, must have {stages}")
        for stage, order in enumerate(self.orders):
            self._check_tasks(stage, order, set(graph.tasks(stage, microbatches, mode)))
        self._dry_run(graph)
        return self

    def _check_tasks(self, stage: int, order: tuple[Task, ...], expected: set[Task]) -> None:
        counts = Counter(order)
        for entry, task in enumerate(order):
            if task not in expected:
                raise ConfigError(
                    f"schedule {self.name}: stage {stage}, entry {entry}: {task} does not run on this stage"
                )
            if counts[task] > 1:
                raise ConfigError(
                    f"schedule {self.name}: stage {stage}, entry {entry}: {task} occurs {counts[task]} times"
                )
        if missing := sorted(expected - set(order), key=lambda t: (t.microbatch, t.virtual_stage, t.kind)):
            raise ConfigError(
                f"schedule {self.name}: stage {stage} misses {len(missing)} task(s), the first is {missing[0]}"
            )

    def _dry_run(self, graph: Graph) -> None:
        """Run the orders as far as they go, without time."""
        done: set[Task] = set()
        heads = [0] * len(self.orders)
        moved = True
        while moved:
            moved = False
            for stage, order in enumerate(self.orders):
                while heads[stage] < len(order) and done.issuperset(graph.inputs(order[heads[stage]])):
                    done.add(order[heads[stage]])
                    heads[stage] += 1
                    moved = True
        for stage, order in enumerate(self.orders):
            if heads[stage] < len(order):
                task = order[heads[stage]]
                missing = next(i for i in graph.inputs(task) if i not in done)
                raise ConfigError(
                    f"schedule {self.name} deadlocks: stage {stage}, entry {heads[stage]}: {task} waits for {missing}"
                )


def _with_weights(order: Iterable[Task], graph: Graph) -> Iterable[Task]:
    tasks = tuple(order)
    present = {task for task in tasks if task.kind is Kind.W}
    for task in tasks:
        yield task
        weight = task._replace(kind=Kind.W)
        if task.kind is Kind.B and graph.split[task.virtual_stage] and weight not in present:
            yield weight
