"""Readiness: which tasks of one stage have all their inputs.

Only counts are kept. For each task, inputs still missing; for each input, which local tasks wait for it. Beside the
inputs of the dependency graph there are two further kinds, treated the same way:

- *forced order*: the same kind of the microbatch before that visits the same virtual stage (backwards in microbatch
  order);
- *reports*: on the leader of a group, one from each follower for a task that needs something from another stage. They
  are counted apart, to distinguish a task that lacks nothing else from one that lacks inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

from rrfp.core.graph import Graph
from rrfp.core.ready_set import ReadySet
from rrfp.core.task_state import TaskState, TaskStates, counters
from rrfp.core.tasks import Kind, Task
from rrfp.core.visits import Visits

#: A kind on a virtual stage whose tasks must be enqueued in microbatch order.
ForcedOrder = tuple[Kind, int]


class Readiness:
    """Counts missing inputs for the tasks of one stage in one step, and hands tasks that lack none to the ready set.

    With ``followers``, each of them reports on every task that has an input from another stage.
    """

    def __init__(
        self,
        graph: Graph,
        states: TaskStates,
        ready: ReadySet,
        visits: Visits,
        *,
        in_order: Collection[ForcedOrder],
        followers: int,
    ) -> None:
        self._graph = graph
        self._states = states
        self._ready = ready
        #: Tasks that lack nothing but reports.
        self.num_unreported = 0
        for state in states:
            state.is_ordered = (state.kind, state.virtual_stage) in in_order
            self._count(state, visits.microbatches, followers)
            if visits.are_partial:
                self._count_visits(state, followers)
            first = _next(state, -1)
            if state.is_ordered and first < visits.microbatches:
                state.missing[first] -= 1  # nothing comes before it
        if visits.are_partial:
            self._mark_unawaited(visits.microbatches)
        for state in states:
            for microbatch, count in enumerate(state.missing):
                if count == 0:
                    ready.add(state, microbatch)

    def _count(self, state: TaskState, microbatches: int, followers: int) -> None:
        """What the tasks of ``state`` are missing, all alike."""
        wiring, most = state.wiring(0), self._never(state)
        state.missing = counters(microbatches, wiring.num_inputs + state.is_ordered, most=most)
        state.missing_remote = counters(microbatches, wiring.num_remote, most=most)
        if followers and wiring.num_remote:
            state.unreported = counters(microbatches, followers, most=followers)

    def _count_visits(self, state: TaskState, followers: int) -> None:
        """What each task of ``state`` is missing, where some do not exist: they miss more than ever comes."""
        never, count = self._never(state), len(state.missing)
        wirings = [state.wiring(microbatch) for microbatch in range(count)]
        for microbatch, wiring in enumerate(wirings):
            exists = microbatch not in state.skippers
            state.missing[microbatch] = wiring.num_inputs + state.is_ordered if exists else never
            state.missing_remote[microbatch] = wiring.num_remote if exists else never
        if followers and any(wiring.num_remote for wiring in wirings):
            state.unreported = counters(count, 0, most=followers)
            for microbatch, wiring in enumerate(wirings):
                state.unreported[microbatch] = followers if wiring.num_remote else 0

    def _never(self, state: TaskState) -> int:
        """More inputs than ever come for a task of ``state``, the order's among them."""
        return len(self._graph.inputs(state.task(0))) + 2

    def _mark_unawaited(self, microbatches: int) -> None:
        """Outputs that are never made, or never come here, count as available: no task waits for them."""
        own = (state for rows in self._states.own.values() for state in rows.values())
        for state in own:
            for microbatch in state.skippers:
                state.is_available[microbatch] = True
        read = (state for rows in self._states.read.values() for state in rows.values())
        for state in read:
            for microbatch in range(microbatches):
                state.is_available[microbatch] = not state.wiring(microbatch).num_readers

    def arrive(self, source: TaskState, microbatch: int) -> None:
        """An output of another stage is here, for the first time."""
        source.is_available[microbatch] = True
        self._supply(source.readers, microbatch)

    def supplied_by(self, source: TaskState, microbatch: int) -> list[Task]:
        """Follower, once after each `arrive`: the tasks that now have everything they need from other stages."""
        supplied = []
        for state in source.readers:
            state.missing_remote[microbatch] -= 1
            if state.missing_remote[microbatch] == 0:
                supplied.append(state.task(microbatch))
        return supplied

    def enqueue(self, state: TaskState, microbatch: int) -> None:
        """A local task was enqueued (or, on a follower, ordered)."""
        state.is_available[microbatch] = True
        self._supply(state.readers, microbatch)
        if state.is_ordered and (following := _next(state, microbatch)) < len(state.missing):
            self._supply((state,), following)

    def report(self, task: Task) -> None:
        """A follower has everything that ``task`` needs from other stages."""
        state, m = self._states.of(task), task.microbatch
        state.unreported[m] -= 1
        if not state.unreported[m] and not state.missing[m]:
            self.num_unreported -= 1
            self._ready.add(state, m)

    def expects_reports(self, task: Task) -> bool:
        """Whether followers report on ``task``."""
        return self._states.knows(task) and self._states.of(task).wiring(task.microbatch).num_remote > 0

    def has_inputs(self, task: Task) -> bool:
        """Whether no input of ``task`` is missing; reports may be."""
        return self._states.of(task).missing[task.microbatch] == 0

    def is_available(self, task: Task) -> bool:
        """Whether ``task`` was enqueued here (on a follower: ordered), or its output has arrived from elsewhere."""
        kind, m, virtual_stage = task
        state = self._states.own[kind].get(virtual_stage) or self._states.read[kind][virtual_stage]
        return bool(state.is_available[m])

    def absent_inputs(self, task: Task) -> tuple[Task, ...]:
        """The inputs of ``task`` that are not here."""
        needed, state = self._graph.inputs(task), self._states.of(task)
        if state.is_ordered:
            before = (m for m in reversed(range(task.microbatch)) if m not in state.skippers)
            needed = (*needed, *(task._replace(microbatch=m) for m in islice(before, 1)))
        return tuple(producer for producer in needed if not self.is_available(producer))

    def _supply(self, states: Sequence[TaskState], microbatch: int) -> None:
        """One more input of ``microbatch`` is there for each of ``states``."""
        for state in states:
            left = state.missing[microbatch] - 1
            state.missing[microbatch] = left
            if left:
                continue
            if state.unreported and state.unreported[microbatch]:
                self.num_unreported += 1
            else:
                self._ready.add(state, microbatch)


def _next(state: TaskState, microbatch: int) -> int:
    """The next microbatch after ``microbatch`` that visits the virtual stage; M if none does."""
    following = microbatch + 1
    while following in state.skippers:
        following += 1
    return following
