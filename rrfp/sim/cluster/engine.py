"""The engine of `rrfp.sim.engine` for stages of T ranks: the real core of every rank on one heap of virtual events.

There is no scheduling in here, and no coordination: a `Coordinator` has the ranks of a group enqueue one order. Time
moves as in the plain engine. A task takes what its slowest rank takes, and rank t of a stage sends to rank t of the
next, every message with its own latency. At one instant everything that completes or arrives takes effect before any
group decides.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from rrfp.core import events as ev
from rrfp.core.graph import Graph
from rrfp.core.tasks import Kind, Mode, StepId, Task
from rrfp.core.topology import Topology
from rrfp.core.usage import WaitCause
from rrfp.core.waiting import describe, wait_line
from rrfp.costs.rank_latency import RankLatencies
from rrfp.costs.table import CostTable
from rrfp.errors import DeadlockError
from rrfp.sim.cluster.rank_group import RankGroup
from rrfp.sim.cluster.result import GroupCounts, TensorParallelResult
from rrfp.trace.spans import MessageSpan, TaskSpan, WaitSpan


class Coordinator(Protocol):
    """How the ranks of each group come to one order."""

    def follow(self, group: RankGroup, rank: int, instruction: ev.Instruction) -> None:
        """A core asks for something that only concerns its group (`ReportReady`, `Order`)."""

    def note_arrival(self, group: RankGroup, rank: int, producer: Task) -> None:
        """``rank`` has the output of ``producer``, a task of another stage."""

    def decide(self, group: RankGroup) -> None:
        """Something happened to ``group``: have its ranks enqueue what they may."""

    def counts(self, group: RankGroup) -> GroupCounts:
        """What it took so far."""

    def stalled(self, group: RankGroup) -> str | None:
        """Nothing will happen any more: why ``group``, which has a task ready on all ranks, does not run it."""


class TensorParallelEngine:
    """See the module's docstring.

    Args:
        costs: what tasks take, on the slowest rank of a group.
        graph: the dependency graph of the costs.
        latencies: what the messages of each rank take.
        groups: one a stage.
    """

    def __init__(self, costs: CostTable, graph: Graph, latencies: RankLatencies, groups: Sequence[RankGroup]) -> None:
        self.now = 0.0
        self.graph = graph
        self.groups = groups
        self.step = StepId(0, Mode.TRAIN, costs.microbatches)
        place = graph.placement
        self._stage_of = [place.stage_of(v) for v in range(place.num_virtual_stages)]
        self._durations = {Kind.F: costs.forward.tolist(), Kind.B: costs.backward.tolist()}
        if costs.weight is not None:
            self._durations[Kind.W] = costs.weight.tolist()
        self._latency = {Kind.F: latencies.forward.tolist(), Kind.B: latencies.backward.tolist()}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._inserted = 0
        self._touched: set[int] = set()
        self._waiting: list[tuple[WaitCause, float] | None] = [None] * len(groups)
        self._spans: list[list[TaskSpan]] = [[] for _ in groups]
        self._waits: list[WaitSpan] = []
        self._messages: list[MessageSpan] = []

    def run(self, coordinator: Coordinator, sizes: tuple[float, ...] | None) -> TensorParallelResult:
        """Simulate one training step.

        Raises:
            DeadlockError: if tasks remain and nothing will ever happen.
        """
        self._coordinator = coordinator
        opened = ev.StepOpened(self.step.number, self.step.mode, self.step.microbatches, sizes)
        for group in self.groups:
            for core in (*group.cores, group.witness):
                core.apply(opened)
        for group in self.groups:
            self._decide(group)
        heap = self._heap
        while heap:
            self.now = heap[0][0]
            self._touched.clear()
            while heap and heap[0][0] == self.now:
                heapq.heappop(heap)[2]()
            for stage in sorted(self._touched):
                self._decide(self.groups[stage])
        self._check_finished()
        return self._result()

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """``act`` happens ``seconds`` from now; at once if 0."""
        if seconds:
            heapq.heappush(self._heap, (self.now + seconds, self._inserted, act))
            self._inserted += 1
        else:
            act()

    def touch(self, group: RankGroup) -> None:
        """``group`` decides once everything of this instant has taken effect."""
        self._touched.add(group.stage)

    def tell(self, group: RankGroup, rank: int, event: ev.Event) -> None:
        """The core of ``rank`` takes ``event`` in, and what it asks for is done."""
        group.told.add(rank)
        self._touched.add(group.stage)
        for instruction in group.cores[rank].apply(event):
            if isinstance(instruction, ev.Send):
                self._send(group, rank, instruction)
            elif isinstance(instruction, ev.ReduceChunk):
                self.tell(group, rank, ev.ChunkReduced(instruction.virtual_stage))
            elif isinstance(instruction, ev.ReportReady | ev.Order):
                self._coordinator.follow(group, rank, instruction)

    def enqueue(self, group: RankGroup, rank: int, task: Task) -> None:
        """``rank`` hands ``task`` to its lane."""
        group.join(rank, task)
        self.tell(group, rank, ev.Enqueued(task))

    def _send(self, group: RankGroup, rank: int, send: ev.Send) -> None:
        task = send.task
        # Row v of a latency matrix is the edge between v and v + 1, whichever way it is travelled.
        row = task.virtual_stage if task.kind is Kind.F else task.virtual_stage - 1
        latencies = self._latency[task.kind][row][task.microbatch]
        if rank == 0:
            self._messages.append(MessageSpan(group.stage, send.peer, task, self.now, self.now + max(latencies)))
        event = ev.Arrived(self.step, task, consumed=send.consumed)
        self._push(self.now + latencies[rank], partial(self._arrive, self.groups[send.peer], rank, event))
        self.tell(group, rank, ev.SendReleased(task, send.peer))

    def _arrive(self, group: RankGroup, rank: int, event: ev.Arrived) -> None:
        self.tell(group, rank, event)
        group.arrive(event)
        self._coordinator.note_arrival(group, rank, event.task)

    def _complete(self, group: RankGroup, event: ev.Completed) -> None:
        group.complete(event)
        for rank in range(len(group.cores)):
            self.tell(group, rank, event)
        self._start_next(group)

    def _decide(self, group: RankGroup) -> None:
        self._coordinator.decide(group)
        self._start_next(group)
        self._wait(group.stage, group.wait_cause())

    def _start_next(self, group: RankGroup) -> None:
        """Free lanes go on at once with what they have; if it takes no time, it ends before any group decides."""
        task = group.startable()
        if task is None:
            return
        group.start(task)
        end = self.now + self._durations[task.kind][task.virtual_stage][task.microbatch]
        self._spans[group.stage].append(TaskSpan(group.stage, task, self.now, end))
        # As a lane would measure it, to the last bit.
        self._push(end, partial(self._complete, group, ev.Completed(task, seconds=end - self.now)))

    def _push(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (time, self._inserted, act))
        self._inserted += 1

    def _wait(self, stage: int, cause: WaitCause | None) -> None:
        """From now on the lane of ``stage`` is idle for ``cause``, or busy if None."""
        before = self._waiting[stage]
        if before is not None and before[0] is cause:
            return
        if before is not None and before[1] < self.now:
            self._waits.append(WaitSpan(stage, before[0], before[1], self.now))
        self._waiting[stage] = None if cause is None else (cause, self.now)

    def _check_finished(self) -> None:
        lines = []
        for group in self.groups:
            topology = Topology(group.stage, len(self.groups))
            if texts := describe(group.witness, topology, most=1):
                cause = self._coordinator.stalled(group)
                lines.append(f"  {wait_line(topology.name, texts) if cause is None else f'{topology.name}: {cause}'}")
        if lines:
            raise DeadlockError("deadlock: every group is idle and nothing is in flight\n" + "\n".join(lines))

    def _result(self) -> TensorParallelResult:
        self.now = max((spans[-1].end for spans in self._spans if spans), default=0.0)
        for group in self.groups:
            self._wait(group.stage, None)
        return TensorParallelResult(
            makespan=self.now,
            spans=tuple(map(tuple, self._spans)),
            waits=tuple(sorted(self._waits, key=lambda wait: (wait.start, wait.stage))),
            messages=tuple(self._messages),
            orders=tuple(tuple(map(tuple, group.orders)) for group in self.groups),
            peaks=tuple(tuple(core.peaks for core in group.cores) for group in self.groups),
            counts=tuple(map(self._coordinator.counts, self.groups)),
        )
