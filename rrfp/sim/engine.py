"""The fast engine: drives the real cores of all stages on a heap of virtual events.

There is no scheduling in here. Cores decide; the engine only moves time: a task started at s on an idle stage ends at
s + its duration, its output arrives at that end + its latency. At one instant everything that completes or arrives
takes effect before any stage decides. The same costs, hints and limits give the same result on every machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rrfp.core import events as ev
from rrfp.core.admission import Limit
from rrfp.core.graph import Graph
from rrfp.core.hint import Hint
from rrfp.core.progress import Peaks, WaitCause
from rrfp.core.readiness import ForcedOrder
from rrfp.core.stage_core import StageCore
from rrfp.core.tasks import Kind, Mode, StepId, Task
from rrfp.core.topology import Placement
from rrfp.costs.table import CostTable
from rrfp.errors import DeadlockError
from rrfp.trace.spans import MessageSpan, StepTrace, TaskSpan, WaitSpan


@dataclass(frozen=True, slots=True)
class EngineResult:
    """One simulated step.

    Attributes:
        makespan: end of the last task, in seconds from the start.
        spans: for each stage, its tasks in the order in which they ran.
        waits: why lanes were idle, up to the makespan.
        messages: messages between stages.
        peaks: the most that each stage held.
    """

    makespan: float
    spans: tuple[tuple[TaskSpan, ...], ...]
    waits: tuple[WaitSpan, ...]
    messages: tuple[MessageSpan, ...]
    peaks: tuple[Peaks, ...]

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each stage's lane computed."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    def trace(self, step: int = 0) -> StepTrace:
        """The step as a trace of all stages."""
        tasks = sorted((span for spans in self.spans for span in spans), key=lambda span: (span.start, span.stage))
        return StepTrace(step, 0.0, self.makespan, tuple(tasks), self.waits, self.messages)


def graph_of(costs: CostTable) -> Graph:
    """The chain of virtual stages that a cost table describes."""
    placement = Placement(costs.stages, costs.chunks, costs.placement)
    return Graph(placement, split=(costs.split,) * placement.num_virtual_stages)


def run(
    costs: CostTable,
    hints: Sequence[Hint],
    limits: Sequence[Limit],
    *,
    sizes: Sequence[float] | None = None,
    in_order: Collection[ForcedOrder] = (),
) -> EngineResult:
    """Simulate one training step.

    Args:
        costs: what tasks and messages take.
        hints: one fresh hint a stage.
        limits: one a stage.
        sizes: how large each microbatch is, for hints that ask; None: untold.
        in_order: (kind, virtual stage) pairs that run in microbatch order.

    Raises:
        DeadlockError: if tasks remain and nothing will ever happen; the message says what each stage waits for.
        HintError: if a hint breaks its contract.
    """
    graph = graph_of(costs)
    cores = [
        StageCore(graph, stage, hint, limit, in_order=in_order)
        for stage, (hint, limit) in enumerate(zip(hints, limits, strict=True))
    ]
    return _Engine(costs, graph, cores).run(None if sizes is None else tuple(sizes))


class _Engine:
    def __init__(self, costs: CostTable, graph: Graph, cores: list[StageCore]) -> None:
        self._cores = cores
        self._step = StepId(0, Mode.TRAIN, costs.microbatches)
        place = graph.placement
        self._stage_of = [place.stage_of(v) for v in range(place.num_virtual_stages)]
        # Plain lists: a numpy scalar costs more to read than the whole heap operation.
        self._durations = {Kind.F: costs.forward.tolist(), Kind.B: costs.backward.tolist()}
        if costs.weight is not None:
            self._durations[Kind.W] = costs.weight.tolist()
        self._latency = {Kind.F: costs.latency_forward.tolist(), Kind.B: costs.latency_backward.tolist()}
        # (time, order of insertion, stage, event): the order makes the heap total, and ties first come, first served.
        self._heap: list[tuple[float, int, int, ev.Event]] = []
        self._inserted = 0
        self._idle = [True] * len(cores)
        self._waiting: list[tuple[WaitCause, float] | None] = [None] * len(cores)
        self._spans: list[list[TaskSpan]] = [[] for _ in cores]
        self._waits: list[WaitSpan] = []
        self._messages: list[MessageSpan] = []

    def run(self, sizes: tuple[float, ...] | None) -> EngineResult:
        opened = ev.StepOpened(self._step.number, self._step.mode, self._step.microbatches, sizes)
        for core in self._cores:
            core.apply(opened)
        for stage in range(len(self._cores)):
            self._decide(stage, 0.0)
        heap = self._heap
        while heap:
            now = heap[0][0]
            touched = set()
            while heap and heap[0][0] == now:
                _, _, stage, event = heapq.heappop(heap)
                self._apply(stage, event, now)
                touched.add(stage)
            for stage in sorted(touched):
                if self._idle[stage]:
                    self._decide(stage, now)
        self._check_finished()
        return self._result()

    def _apply(self, stage: int, event: ev.Event, now: float) -> None:
        if isinstance(event, ev.Completed):
            self._idle[stage] = True
        for instruction in self._cores[stage].apply(event):
            if isinstance(instruction, ev.Send):
                self._send(stage, instruction, now)
            elif isinstance(instruction, ev.ReduceChunk):
                self._apply(stage, ev.ChunkReduced(instruction.virtual_stage), now)

    def _send(self, stage: int, send: ev.Send, now: float) -> None:
        task = send.task
        # Row v of a latency matrix is the edge between v and v + 1, whichever way it is travelled.
        row = task.virtual_stage if task.kind is Kind.F else task.virtual_stage - 1
        arrival = now + self._latency[task.kind][row][task.microbatch]
        self._messages.append(MessageSpan(stage, send.peer, task, now, arrival))
        self._push(arrival, send.peer, ev.Arrived(self._step, task, consumed=send.consumed))
        self._apply(stage, ev.SendReleased(task, send.peer), now)

    def _decide(self, stage: int, now: float) -> None:
        choice = self._cores[stage].decide()
        if choice is None:
            self._wait(stage, self._cores[stage].wait_cause(), now)
        else:
            self._wait(stage, None, now)
            self._start(stage, choice.task, now)

    def _start(self, stage: int, task: Task, now: float) -> None:
        self._cores[stage].apply(ev.Enqueued(task))
        self._idle[stage] = False
        duration = self._durations[task.kind][task.virtual_stage][task.microbatch]
        end = now + duration
        self._spans[stage].append(TaskSpan(stage, task, now, end))
        # As a lane would measure it, to the last bit.
        self._push(end, stage, ev.Completed(task, seconds=end - now))

    def _push(self, time: float, stage: int, event: ev.Event) -> None:
        heapq.heappush(self._heap, (time, self._inserted, stage, event))
        self._inserted += 1

    def _wait(self, stage: int, cause: WaitCause | None, now: float) -> None:
        """From now on ``stage`` is idle for ``cause``, or busy if None."""
        before = self._waiting[stage]
        if before is not None and before[0] is cause:
            return
        if before is not None and before[1] < now:
            self._waits.append(WaitSpan(stage, before[0], before[1], now))
        self._waiting[stage] = None if cause is None else (cause, now)

    def _check_finished(self) -> None:
        lines = []
        for core in self._cores:
            for task, missing in core.awaited(1):
                if missing:
                    owed = ", ".join(f"{i} from stage {self._stage_of[i.virtual_stage]}" for i in missing)
                    cause = f"waits for {owed}"
                elif task in core.ready:
                    cause = f"is ready, and hint {type(core.hint).__name__} waits for something else"
                else:
                    cause = "has its inputs, and the memory limit keeps it out"
                lines.append(f"  stage {core.stage}: {task} {cause}")
        if lines:
            raise DeadlockError("deadlock: every stage is idle and nothing is in flight\n" + "\n".join(lines))

    def _result(self) -> EngineResult:
        makespan = max((spans[-1].end for spans in self._spans if spans), default=0.0)
        for stage in range(len(self._cores)):
            self._wait(stage, None, makespan)
        return EngineResult(
            makespan,
            tuple(map(tuple, self._spans)),
            tuple(sorted(self._waits, key=lambda wait: (wait.start, wait.stage))),
            tuple(self._messages),
            tuple(core.peaks for core in self._cores),
        )
