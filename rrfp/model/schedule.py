"""Schedules: a total order of tasks for each stage, as plain printable data, and the dry run that checks one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rrfp.errors import ConfigError
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import ENDING_KINDS, KINDS, LOCAL_KINDS, Kind, Mode, Side, Task
from rrfp.model.visits import Visits


@dataclass(frozen=True, slots=True)
class Schedule:
    """A total order of tasks for each stage."""

    name: str
    #: For each stage, its tasks in the order in which they run.
    orders: tuple[tuple[Task, ...], ...]

    def __str__(self) -> str:
        return "\n".join(f"stage {i}: {' '.join(map(str, order))}" for i, order in enumerate(self.orders))

    def with_local_tasks(self, graph: TaskGraph) -> Schedule:
        """The same order for a graph with split virtual stages: a missing W runs right after its B."""
        every = range(graph.placement.num_virtual_stages)
        local = [[kind for kind in graph.kinds(v, Mode.TRAIN) if kind in LOCAL_KINDS] for v in every]
        if not any(local):
            return self
        return Schedule(self.name, tuple(tuple(_with_local_tasks(order, local)) for order in self.orders))

    def forward_only(self) -> Schedule:
        """The forwards alone, in the same order."""
        return Schedule(
            self.name, tuple(tuple(t for t in order if KINDS[t.kind].in_evaluation) for order in self.orders)
        )

    def peak_held(self, stage: int, graph: TaskGraph) -> int:
        """The largest D of ``stage``, in chunk tasks, when it runs exactly this order."""
        frees = {v: graph.last_kind(v, Mode.TRAIN) for v in graph.placement.virtual_stages(stage)}
        held = peak = 0
        for kind, _, virtual_stage in self.orders[stage]:
            if KINDS[kind].takes_slot:
                held += 1
                peak = max(peak, held)
            elif kind is frees[virtual_stage]:
                held -= 1
        return peak

    def validate(
        self, graph: TaskGraph, microbatches: int, mode: Mode = Mode.TRAIN, visits: Visits | None = None
    ) -> Schedule:
        """Refuse orders that deadlock, or lack, repeat or misplace a task of a training step, with a ConfigError.

        It names the stage and the entry at fault. Takes time linear in the number of tasks. Returns this schedule.
        """
        stages = graph.placement.stages
        if len(self.orders) != stages:
            raise ConfigError(f"schedule {self.name}: has {len(self.orders)} stages, must have {stages}")
        for stage, order in enumerate(self.orders):
            own = graph.placement.virtual_stages(stage)
            self._check_tasks(stage, order, _rows(graph, own, microbatches, mode, visits))
        every = range(graph.placement.num_virtual_stages)
        self._dry_run(graph, _rows(graph, every, microbatches, mode, visits))
        return self

    def _check_tasks(self, stage: int, order: tuple[Task, ...], seen: _Rows) -> None:
        for entry, task in enumerate(order):
            kind, microbatch, virtual_stage = task
            row = seen.get((kind, virtual_stage))
            if row is None or not 0 <= microbatch < len(row):
                raise ConfigError(
                    f"schedule {self.name}: stage {stage}, entry {entry}: {task} does not run on this stage"
                )
            if row[microbatch]:
                first, times = order.index(task), order.count(task)
                if times == 1:
                    raise ConfigError(
                        f"schedule {self.name}: stage {stage}, entry {first}: {task} is of a microbatch that skips "
                        "this virtual stage"
                    )
                raise ConfigError(f"schedule {self.name}: stage {stage}, entry {first}: {task} occurs {times} times")
            row[microbatch] = True
        missing = [Task(kind, row.index(0), v) for (kind, v), row in seen.items() if 0 in row]
        if missing:
            count = sum(row.count(0) for row in seen.values())
            first_missing = min(missing, key=lambda task: (task.microbatch, task.virtual_stage, task.kind))
            raise ConfigError(
                f"schedule {self.name}: stage {stage} misses {count} task(s), the first is {first_missing}"
            )

    def _dry_run(self, graph: TaskGraph, done: _Rows) -> None:
        """Run the orders as far as they go, without time."""
        needs = {
            (kind, v): [(source.kind, source.virtual_stage) for source in graph.inputs(Task(kind, 0, v))]
            for kind, v in done
        }
        heads = [0] * len(self.orders)
        # Stages whose next task waits for the key. Each stage is looked at again only when that has run.
        waiting: dict[Task, list[int]] = {}
        runnable = list(reversed(range(len(self.orders))))
        while runnable:
            stage = runnable.pop()
            order = self.orders[stage]
            while heads[stage] < len(order):
                task = order[heads[stage]]
                kind, microbatch, virtual_stage = task
                missing = [need for need in needs[kind, virtual_stage] if not done[need][microbatch]]
                if missing:
                    first_kind, source = missing[0]
                    waiting.setdefault(Task(first_kind, microbatch, source), []).append(stage)
                    break
                done[kind, virtual_stage][microbatch] = True
                heads[stage] += 1
                runnable += waiting.pop(task, ())
        stuck = {stage: missed for missed, stages in waiting.items() for stage in stages}
        if stuck:
            stage = min(stuck)
            where = f"stage {stage}, entry {heads[stage]}: {self.orders[stage][heads[stage]]}"
            raise ConfigError(f"schedule {self.name} deadlocks: {where} waits for {stuck[stage]}")


#: For each kind of each virtual stage, a flag for each microbatch. Sets of a million tasks are several times slower.
_Rows = Mapping[tuple[Kind, int], bytearray]


def _rows(
    graph: TaskGraph, virtual_stages: Iterable[int], microbatches: int, mode: Mode, visits: Visits | None
) -> _Rows:
    """The flags, set for tasks that do not exist, since their microbatch skips the virtual stage."""
    rows = {(kind, v): bytearray(microbatches) for v in virtual_stages for kind in graph.kinds(v, mode)}
    if visits is not None and visits.are_partial:
        for (_, v), row in rows.items():
            for microbatch in visits.skippers(v):
                row[microbatch] = True
    return rows


def _with_local_tasks(order: tuple[Task, ...], local: Sequence[Sequence[Kind]]) -> Iterator[Task]:
    present = {task for task in order if task.kind in LOCAL_KINDS}
    for task in order:
        own = [task._replace(kind=kind) for kind in local[task.virtual_stage]]
        missing = [each for each in own if each not in present]
        yield from (each for each in missing if (each.kind, Side.HERE) in KINDS[task.kind].reads)
        yield task
        ending = [each for each in missing if each.kind in ENDING_KINDS]
        yield from (each for each in ending if (task.kind, Side.HERE) in KINDS[each.kind].reads)
