"""Readiness: which tasks of one stage have all their inputs.

Only counts are kept. For each task, inputs still missing; for each input, which local tasks wait for it. Beside the
inputs of the dependency graph there are two further kinds, treated the same way:

- *forced order*: the same kind of the microbatch before on the same virtual stage (backwards in microbatch order);
- *reports*: on a tensor-parallel leader, one from each follower for a task that needs something from another stage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from rrfp.core.graph import Graph
from rrfp.core.tasks import Kind, Mode, Task

#: A kind on a virtual stage whose tasks must be enqueued in microbatch order.
ForcedOrder = tuple[Kind, int]


class Readiness:
    """Counts missing inputs for the tasks of one stage in one step.

    Args:
        graph: the dependency graph.
        stage: this stage.
        microbatches: M.
        mode: training or forward only.
        in_order: (kind, virtual stage) pairs that must be enqueued in microbatch order.
        followers: reports awaited for every task with an input from another stage.
    """

    def __init__(
        self,
        graph: Graph,
        stage: int,
        microbatches: int,
        mode: Mode,
        *,
        in_order: Collection[ForcedOrder] = (),
        followers: int = 0,
    ) -> None:
        self._graph = graph
        self._stage = stage
        self._microbatches = microbatches
        self._mode = mode
        self._in_order = frozenset(in_order)
        self._followers = followers
        #: Inputs at hand: outputs that arrived, or local tasks that were enqueued.
        self.present: set[Task] = set()
        self._remote_inputs: dict[tuple[Kind, int], int] = {}
        self._missing: dict[tuple[Kind, int], list[int]] = {}
        self._missing_remote: dict[tuple[Kind, int], list[int]] = {}
        #: Producer (kind, virtual stage) -> local tasks (kind, virtual stage) that read its output.
        self._readers: dict[tuple[Kind, int], tuple[tuple[Kind, int], ...]] = {}
        for virtual_stage in graph.placement.virtual_stages(stage):
            for kind in graph.kinds(virtual_stage, mode):
                self._prepare(kind, virtual_stage)

    def _prepare(self, kind: Kind, virtual_stage: int) -> None:
        key = (kind, virtual_stage)
        place = self._graph.placement
        inputs = self._graph.inputs(Task(kind, 0, virtual_stage))
        remote = sum(place.stage_of(task.virtual_stage) != self._stage for task in inputs)
        self._remote_inputs[key] = remote
        count = len(inputs) + (self._followers if remote else 0)
        self._missing[key] = [count] * self._microbatches
        self._missing_remote[key] = [remote] * self._microbatches
        if key in self._in_order:
            self._missing[key][1:] = [count + 1] * (self._microbatches - 1)
        for producer in inputs:
            source = (producer.kind, producer.virtual_stage)
            self._readers[source] = (*self._readers.get(source, ()), key)

    def at_start(self) -> Iterator[Task]:
        """Tasks that need nothing."""
        for (kind, virtual_stage), counts in self._missing.items():
            for microbatch, count in enumerate(counts):
                if count == 0:
                    yield Task(kind, microbatch, virtual_stage)

    def reads(self, producer: Task) -> bool:
        """Whether any task of this stage reads the output of ``producer``."""
        is_read = (producer.kind, producer.virtual_stage) in self._readers
        return is_read and 0 <= producer.microbatch < self._microbatches

    def arrive(self, producer: Task) -> tuple[list[Task], list[Task]]:
        """The output of a task of another stage is here.

        Returns:
            The tasks that became ready, and those that now have everything they need from other stages.
        """
        self.present.add(producer)
        m = producer.microbatch
        ready, supplied = [], []
        for key in self._readers[producer.kind, producer.virtual_stage]:
            self._missing_remote[key][m] -= 1
            if self._missing_remote[key][m] == 0:
                supplied.append(Task(key[0], m, key[1]))
            if self._decrement(key, m):
                ready.append(Task(key[0], m, key[1]))
        return ready, supplied

    def enqueue(self, task: Task) -> list[Task]:
        """A local task was enqueued (or, on a follower, ordered); returns the tasks that became ready."""
        self.present.add(task)
        kind, m, virtual_stage = task
        ready = [
            Task(key[0], m, key[1]) for key in self._readers.get((kind, virtual_stage), ()) if self._decrement(key, m)
        ]
        if (
            (kind, virtual_stage) in self._in_order
            and m + 1 < self._microbatches
            and self._decrement((kind, virtual_stage), m + 1)
        ):
            ready.append(Task(kind, m + 1, virtual_stage))
        return ready

    def report(self, task: Task) -> bool:
        """A follower has everything that ``task`` needs from other stages; returns whether the task became ready."""
        return self._decrement((task.kind, task.virtual_stage), task.microbatch)

    def expects_reports(self, task: Task) -> bool:
        """Whether followers report on ``task``."""
        return self.knows(task) and self._remote_inputs[task.kind, task.virtual_stage] > 0

    def knows(self, task: Task) -> bool:
        """Whether ``task`` runs on this stage in this step."""
        return (task.kind, task.virtual_stage) in self._missing and 0 <= task.microbatch < self._microbatches

    def has_all(self, task: Task) -> bool:
        """Whether nothing is missing for ``task``."""
        return self._missing[task.kind, task.virtual_stage][task.microbatch] == 0

    def absent_inputs(self, task: Task) -> tuple[Task, ...]:
        """The inputs of ``task`` that are not here."""
        needed = self._graph.inputs(task)
        if (task.kind, task.virtual_stage) in self._in_order and task.microbatch:
            needed = (*needed, task._replace(microbatch=task.microbatch - 1))
        return tuple(producer for producer in needed if producer not in self.present)

    def _decrement(self, key: tuple[Kind, int], microbatch: int) -> bool:
        counts = self._missing[key]
        counts[microbatch] -= 1
        return counts[microbatch] == 0
