"""Readiness: which tasks of one stage have all their inputs.

Only counts are kept. For each task, inputs still missing; for each input, which local tasks wait for it. Beside the
inputs of the dependency graph there are two further kinds, treated the same way:

- *forced order*: the same kind of the microbatch before on the same virtual stage (backwards in microbatch order);
- *reports*: on the leader of a group, one from each follower for a task that needs something from another stage. They
  are counted apart, so that a task which lacks nothing else can be told from one that lacks inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rrfp.core.graph import Graph
from rrfp.core.ready_set import ReadySet
from rrfp.core.task_state import Row, Rows, counters
from rrfp.core.tasks import Kind, Task

#: A kind on a virtual stage whose tasks must be enqueued in microbatch order.
ForcedOrder = tuple[Kind, int]


class Readiness:
    """Counts missing inputs for the tasks of one stage in one step, and hands tasks that lack none to the ready set.

    Args:
        graph: the dependency graph.
        rows: the rows of this stage, just made.
        ready: where tasks go that have all their inputs.
        microbatches: M.
        in_order: (kind, virtual stage) pairs that must be enqueued in microbatch order.
        followers: reports awaited for every task with an input from another stage.
    """

    def __init__(
        self,
        graph: Graph,
        rows: Rows,
        ready: ReadySet,
        microbatches: int,
        *,
        in_order: Collection[ForcedOrder] = (),
        followers: int = 0,
    ) -> None:
        self._graph = graph
        self._rows = rows
        self._ready = ready
        #: Tasks that lack nothing but reports.
        self.num_unreported = 0
        for row in rows:
            row.is_ordered = (row.kind, row.virtual_stage) in in_order
            inputs = len(graph.inputs(row.task(0)))
            most = inputs + row.is_ordered
            row.missing = counters(microbatches, most, most=most)
            row.missing[0] = inputs
            row.missing_remote = counters(microbatches, row.num_remote, most=row.num_remote)
            if followers and row.num_remote:
                row.unreported = counters(microbatches, followers, most=followers)
            for microbatch, count in enumerate(row.missing):
                if count == 0:
                    ready.add(row, microbatch)

    def arrive(self, source: Row, microbatch: int) -> None:
        """An output of another stage is here, for the first time."""
        source.is_present[microbatch] = True
        self._supply(source.readers, microbatch)

    def supplied_by(self, source: Row, microbatch: int) -> list[Task]:
        """Follower, once after each `arrive`: the tasks that now have everything they need from other stages."""
        supplied = []
        for row in source.readers:
            row.missing_remote[microbatch] -= 1
            if row.missing_remote[microbatch] == 0:
                supplied.append(row.task(microbatch))
        return supplied

    def enqueue(self, row: Row, microbatch: int) -> None:
        """A local task was enqueued (or, on a follower, ordered)."""
        row.is_present[microbatch] = True
        self._supply(row.readers, microbatch)
        if row.is_ordered and microbatch + 1 < len(row.missing):
            self._supply((row,), microbatch + 1)

    def report(self, task: Task) -> None:
        """A follower has everything that ``task`` needs from other stages."""
        row, m = self._rows.own[task.kind][task.virtual_stage], task.microbatch
        row.unreported[m] -= 1
        if not row.unreported[m] and not row.missing[m]:
            self.num_unreported -= 1
            self._ready.add(row, m)

    def expects_reports(self, task: Task) -> bool:
        """Whether followers report on ``task``."""
        return self._rows.knows(task) and self._rows.own[task.kind][task.virtual_stage].num_remote > 0

    def has_inputs(self, task: Task) -> bool:
        """Whether no input of ``task`` is missing; reports may be."""
        return self._rows.own[task.kind][task.virtual_stage].missing[task.microbatch] == 0

    def is_present(self, task: Task) -> bool:
        """Whether ``task`` was enqueued here (on a follower: ordered), or its output has arrived from elsewhere."""
        kind, m, virtual_stage = task
        row = self._rows.own[kind].get(virtual_stage) or self._rows.read[kind][virtual_stage]
        return bool(row.is_present[m])

    def absent_inputs(self, task: Task) -> tuple[Task, ...]:
        """The inputs of ``task`` that are not here."""
        needed = self._graph.inputs(task)
        if self._rows.own[task.kind][task.virtual_stage].is_ordered and task.microbatch:
            needed = (*needed, task._replace(microbatch=task.microbatch - 1))
        return tuple(producer for producer in needed if not self.is_present(producer))

    def _supply(self, rows: Sequence[Row], microbatch: int) -> None:
        """One more input of ``microbatch`` is there for each row."""
        for row in rows:
            left = row.missing[microbatch] - 1
            row.missing[microbatch] = left
            if left:
                continue
            if row.unreported and row.unreported[microbatch]:
                self.num_unreported += 1
            else:
                self._ready.add(row, microbatch)
