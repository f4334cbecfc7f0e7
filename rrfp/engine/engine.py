"""The fast engine: drives the real cores of all stages on a heap of virtual events.

There is no scheduling in here. Cores decide; the engine only moves time: a task started at s on an idle stage ends at
s + its duration, its output arrives at that end + its latency. At one instant everything that completes or arrives
takes effect before any stage decides. The same costs, hints and limits give the same result on every machine.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count

from rrfp.arbiter.arbiter import PauseTimer
from rrfp.arbiter.offers import Offers, may_offer
from rrfp.core import events as ev
from rrfp.core.hint import Hint
from rrfp.core.ready_set import ForcedOrder
from rrfp.core.stage_core import StageCore
from rrfp.core.waiting import describe, wait_line
from rrfp.costs.table import CostTable, Matrix, message_times
from rrfp.engine.record import EngineRecord, EngineResult
from rrfp.errors import DeadlockError
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Mode, StepId, Task
from rrfp.model.topology import Topology


@dataclass(frozen=True, slots=True)
class PauseOver:
    """The longest wait of pause ``number`` of a stage is over."""

    number: int


#: What happens on a stage at a time.
Happening = ev.Arrived | ev.Completed | ev.BegunReported | PauseOver


class EngineClock:
    """The heap of events as a clock: time, and timers for pauses."""

    # ``heap`` has (time, order of insertion, stage, event), ``pushed`` the next order. It is not the engine itself,
    # so that a run makes no reference cycles.

    def __init__(self, heap: list[tuple[float, int, int, Happening]], pushed: Iterator[int]) -> None:
        self.now = 0.0
        self._heap = heap
        self._pushed = pushed

    def time(self) -> float:
        """Virtual seconds."""
        return self.now

    def wake(self, stage: int, seconds: float, pause: int) -> None:
        heappush(self._heap, (self.now + seconds, next(self._pushed), stage, PauseOver(pause)))


def graph_of(costs: CostTable) -> TaskGraph:
    return costs.to_graph()


def run(
    costs: CostTable,
    hints: Sequence[Hint],
    limits: Sequence[Limit],
    *,
    sizes: Sequence[float] | None = None,
    size_correlation: float | None = None,
    byte_rooms: tuple[float | None, ...] | None = None,
    shows_inputs: bool = True,
    in_order: Collection[ForcedOrder] = (),
    takes_offers: bool = False,
) -> EngineResult:
    """Simulate one training step.

    Python's cyclic garbage collector is paused meanwhile, for all threads.

    Args:
        costs: what tasks and messages take.
        hints: one fresh hint a stage.
        limits: one a stage.
        sizes: how large each microbatch is, for hints that ask; None: untold.
        size_correlation: as a step before would have shown it, see `rrfp.hints.View`; None: there was none.
        byte_rooms: likewise.
        shows_inputs: whether the inputs of forwards show how many bytes they will hold, where the table has bytes.
        in_order: (kind, virtual stage) pairs that run in microbatch order.
        takes_offers: where `rrfp.arbiter.offers` may, a stage runs what its core had decided before its task ended. If
            not, each decision knows all that happened until then.
    """
    graph = graph_of(costs)
    cores = [
        StageCore(graph, stage, hint, limit, in_order=in_order)
        for stage, (hint, limit) in enumerate(zip(hints, limits, strict=True))
    ]
    with _collector_paused():
        engine = (_OfferingEngine if takes_offers else _Engine)(costs, graph, cores)
        engine.shows_inputs = shows_inputs and costs.held is not None
        return engine.run(None if sizes is None else tuple(sizes), size_correlation, byte_rooms)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Without the cyclic garbage collector, where it is on."""
    # A run makes no cycles, only up to millions of objects that stay, and looking through them over and over takes a
    # fifth of the time.
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _Engine:
    _takes_offers = False

    def __init__(self, costs: CostTable, graph: TaskGraph, cores: list[StageCore]) -> None:
        self.shows_inputs = False
        self._cores = cores
        self._step = StepId(0, Mode.TRAIN, costs.microbatches)
        self._graph = graph
        self._visits = costs.visits
        self._durations = {kind: _rows(times) for kind, times in costs.durations.items()}
        self._held = None if costs.held is None else _rows(costs.held)
        self._message_times = message_times(costs)
        # (time, order of insertion, stage, event): the order makes the heap total, and ties first come, first served.
        self._heap: list[tuple[float, int, int, Happening]] = []
        self._pushed = count()
        self._idle = [True] * len(cores)
        self._record = EngineRecord(graph.stage_of, len(cores))
        self._clock = clock = EngineClock(self._heap, self._pushed)
        self._pauses = [PauseTimer(core, clock.time, partial(clock.wake, core.stage)) for core in cores]

    def run(
        self,
        sizes: tuple[float, ...] | None,
        size_correlation: float | None,
        byte_rooms: tuple[float | None, ...] | None,
    ) -> EngineResult:
        step = self._step
        known = step.number, step.mode, step.microbatches, sizes, size_correlation, self._visits
        opened = ev.StepOpened(*known, byte_rooms=byte_rooms)
        for stage in range(len(self._cores)):
            self._perform(stage, self._cores[stage].apply(opened), 0.0)
        for stage in range(len(self._cores)):
            self._decide(stage, 0.0)
        heap = self._heap
        while heap:
            now, _, stage, event = heappop(heap)
            self._clock.now = now
            touched = [stage]
            self._apply(stage, event, now)
            while heap and heap[0][0] == now:
                _, _, stage, event = heappop(heap)
                touched.append(stage)
                self._apply(stage, event, now)
            for stage in touched if len(touched) == 1 else sorted({*touched}):
                if self._idle[stage] or self._takes_offers:
                    self._decide(stage, now)
        self._check_finished()
        return self._record.result(tuple(core.peaks for core in self._cores), self._bytes_after)

    def _apply(self, stage: int, event: Happening, now: float) -> None:
        if type(event) is ev.Completed:
            self._idle[stage] = True
        elif type(event) is ev.BegunReported:
            self._pauses[stage].begun_reported(event)
        elif isinstance(event, PauseOver):
            if self._pauses[stage].is_on(event.number):
                self._pauses[stage].end()
            return
        self._perform(stage, self._cores[stage].apply(event), now)

    def _perform(self, stage: int, instructions: Iterable[ev.Instruction], now: float) -> None:
        for instruction in instructions:
            if type(instruction) is ev.Send:
                self._send(stage, instruction, now)
            elif type(instruction) is ev.Preview:
                if self.shows_inputs:
                    self._cores[stage].apply(ev.Previewed(instruction.task, self._bytes_after(instruction.task)))
            elif type(instruction) is ev.ReduceChunk:
                self._cores[stage].apply(ev.ChunkReduced(instruction.virtual_stage))

    def _bytes_after(self, task: Task) -> int:
        return 0 if self._held is None else int(self._held[task.virtual_stage][task.microbatch])

    def _send(self, stage: int, send: ev.Send, now: float) -> None:
        task, peer = send.task, send.peer
        kind, m, virtual_stage = task
        arrival = now + self._message_times[kind][virtual_stage][peer][m]
        self._record.sent(task, peer, now, arrival)
        heappush(self._heap, (arrival, next(self._pushed), peer, ev.Arrived(self._step, task, 0, send.consumed)))
        self._cores[stage].apply(ev.SendReleased(task, peer))

    def _decide(self, stage: int, now: float) -> None:
        core = self._cores[stage]
        choice = core.decide()
        if type(choice) is ev.Idle and not self._pauses[stage].idles(choice):
            choice = core.decide()
        if type(choice) is not ev.Run:
            self._record.waits(stage, core.wait_cause(), now)
            return
        self._record.waits(stage, None, now)
        self._begin(stage, choice.task, now)

    def _begin(self, stage: int, task: Task, now: float) -> None:
        for instruction in self._cores[stage].apply(ev.Enqueued(task)):
            if type(instruction) is ev.ReportBegun:
                begun = ev.BegunReported(self._step, instruction.task, instruction.seconds)
                heappush(self._heap, (now, next(self._pushed), instruction.peer, begun))
        self._idle[stage] = False
        kind, m, virtual_stage = task
        end = now + self._durations[kind][virtual_stage][m]
        self._record.began(stage, task, now, end)
        # As a lane would measure it, to the last bit.
        completed = ev.Completed(task, self._bytes_after(task), end - now)
        heappush(self._heap, (end, next(self._pushed), stage, completed))

    def _check_finished(self) -> None:
        ranks = ((core, Topology(core.stage, len(self._cores))) for core in self._cores)
        waits = ((rank.name, describe(core, rank, most=1)) for core, rank in ranks)
        lines = [f"  {wait_line(name, texts)}" for name, texts in waits if texts]
        if lines:
            raise DeadlockError("deadlock: every stage is idle and nothing is in flight\n" + "\n".join(lines))


class OfferedSlot:
    """Room for one offered task, which a lane begins when its running one has ended."""

    def __init__(self) -> None:
        self.task: Task | None = None

    def offer(self, task: Task) -> None:
        """Let the lane begin ``task`` next."""
        assert self.task is None, f"{task} is offered beside {self.task}"
        self.task = task

    def withdraw(self) -> bool:
        """Take the task back; False if the lane has begun it."""
        return self.pop() is not None

    def pop(self) -> Task | None:
        """The lane begins what is offered, if anything is."""
        task, self.task = self.task, None
        return task


class _OfferingEngine(_Engine):
    """A stage that ends a task takes the one that was offered to it last, without another decision."""

    _takes_offers = True

    def __init__(self, costs: CostTable, graph: TaskGraph, cores: list[StageCore]) -> None:
        super().__init__(costs, graph, cores)
        self._slots = [OfferedSlot() for _ in cores]
        #: By stage, the offered task that its lane has begun.
        self._begun: list[list[Task]] = [[] for _ in cores]
        self._offers = [
            Offers(core, slot, begun.append) if may_offer(core, depth=1) else None
            for core, slot, begun in zip(cores, self._slots, self._begun, strict=True)
        ]

    def _apply(self, stage: int, event: Happening, now: float) -> None:
        offers = self._offers[stage]
        if type(event) is not ev.Completed or offers is None or self._slots[stage].pop() is None:
            super()._apply(stage, event, now)
            return
        offers.withdraw()  # as before any completion: it is too late
        self._begin(stage, self._begun[stage].pop(), now)
        super()._apply(stage, event, now)
        self._idle[stage] = False

    def _decide(self, stage: int, now: float) -> None:
        if self._idle[stage]:
            super()._decide(stage, now)
        offers = self._offers[stage]
        if not self._idle[stage] and offers is not None:
            offers.revise()


def _rows(matrix: Matrix) -> list[array[float]]:
    """The rows as arrays, since a numpy number costs more to read."""
    return [array("d", row.tobytes()) for row in matrix]
