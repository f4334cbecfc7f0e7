"""1F1B with blocking sends: the baseline as Megatron-LM runs it, whose stages stop to communicate.

Megatron's pipeline without interleaving sends and receives in fixed places of 1F1B's order, in one batch of
point-to-point operations at a time, and waits for the batch before it goes on. Modelled here:

**Order.** Stage i warms up with w = min(M, N - 1 - i) forwards. A receive from where there is no neighbour, and a send
to it, is nothing.

    warm-up, m = 0 .. w-1:       receive F(m);  run F(m);  send F(m)
    then, if w < M:              receive F(w)
    steady, m = 0 .. M-w-1:      run F(w+m);  send F(w+m) and receive B(m) in one batch;
                                 run B(m);    send B(m) and receive F(w+m+1) in one batch (the last time only send)
    cool-down, m = M-w .. M-1:   receive B(m);  run B(m);  send B(m)

**Transfers.** A send is a rendezvous: the transfer starts once the sender has reached its send and the receiver has
posted its receive, and takes the cost table's latency. Both stages compute nothing until it has ended. A batch starts
its transfers independently and ends when the last of them has. Batches meet in pairs, so the order cannot deadlock.

**Split costs.** Megatron's backward makes both gradients in one call: W runs right after its B, and only then does B's
output leave. (`strict="1f1b"` in the engine lets it leave at B's end; to compare the sends alone, take unsplit costs.)

The eager counterpart is strict 1F1B in the engine: the same order of tasks, and messages that leave while the lane goes
on. It is never later, task by task, because each of its starts waits for a subset of what it waits for here. The two do
*not* coincide when all latencies are zero: a rendezvous without latency still holds a sender in its warm-up until the
receiver has come to its receive, and where a long forward follows, that time is lost. No difference in makespan was
found where, without latency, no stage's times differ between microbatches.

Times only move forward along fixed orders, so there are no events to sort: each stage is run as far as it gets, and
again when a transfer it waits for is matched. Linear in the number of tasks.
"""

from __future__ import annotations

from collections.abc import Iterator

from rrfp.core.usage import Peaks, WaitCause
from rrfp.costs.table import CostTable
from rrfp.engine.engine import graph_of
from rrfp.engine.record import EngineResult
from rrfp.errors import ConfigError
from rrfp.model.tasks import Kind, Task
from rrfp.schedules.registry import make_schedule
from rrfp.trace.spans import MessageSpan, TaskSpan, WaitSpan


def run_blocking(costs: CostTable) -> EngineResult:
    # A wait has the cause INPUT while its stage communicates, and DRAINED after its last operation; a message is sent
    # when its transfer starts; each stage holds what 1F1B holds.
    if costs.graph is not None:
        raise ConfigError("the costs are of a graph, must be of a chain with blocking sends")
    if costs.chunks != 1:
        raise ConfigError(f"chunks is {costs.chunks}, must be 1 with blocking sends")
    return _Run(costs).result()


#: Transfers of one stage at a time, each named by its output's task.
_Batch = list[Task]


def _program(stage: int, stages: int, microbatches: int, *, split: bool) -> Iterator[Task | _Batch]:
    """What a stage computes and transfers, in order; batches are empty where there is no neighbour."""

    def moves(kind: Kind, m: int, v: int) -> _Batch:
        edge = v if kind is Kind.F else v - 1
        return [Task(kind, m, v)] if m < microbatches and 0 <= edge < stages - 1 else []

    kinds = (Kind.B, Kind.W) if split else (Kind.B,)
    warm_up = min(microbatches, stages - 1 - stage)
    for m in range(warm_up):
        yield moves(Kind.F, m, stage - 1)
        yield Task(Kind.F, m, stage)
        yield moves(Kind.F, m, stage)
    yield moves(Kind.F, warm_up, stage - 1)
    for m in range(microbatches - warm_up):
        yield Task(Kind.F, warm_up + m, stage)
        yield moves(Kind.F, warm_up + m, stage) + moves(Kind.B, m, stage + 1)
        yield from (Task(kind, m, stage) for kind in kinds)
        yield moves(Kind.B, m, stage) + moves(Kind.F, warm_up + m + 1, stage - 1)
    for m in range(microbatches - warm_up, microbatches):
        yield moves(Kind.B, m, stage + 1)
        yield from (Task(kind, m, stage) for kind in kinds)
        yield moves(Kind.B, m, stage)


class _Stage:
    def __init__(self, actions: Iterator[Task | _Batch]) -> None:
        self.actions = actions
        #: The batch that it waits in; its transfers have been posted.
        self.batch: _Batch | None = None
        self.now = 0.0
        self.idle_since = 0.0
        self.spans: list[TaskSpan] = []
        self.waits: list[WaitSpan] = []

    def wait(self, stage: int, cause: WaitCause, until: float) -> None:
        """The stage computed nothing from `idle_since` to ``until``."""
        if self.idle_since < until:
            self.waits.append(WaitSpan(stage, cause, self.idle_since, until))
        self.idle_since = until


class _Run:
    def __init__(self, costs: CostTable) -> None:
        self._costs = costs
        self._durations = {kind: times.tolist() for kind, times in costs.durations.items()}
        self._latency = {Kind.F: costs.latency_forward.tolist(), Kind.B: costs.latency_backward.tolist()}
        self._stages = [
            _Stage(_program(stage, costs.stages, costs.microbatches, split=costs.split))
            for stage in range(costs.stages)
        ]
        #: When the first of the two stages came to a transfer, and when a matched transfer ends.
        self._posted: dict[Task, float] = {}
        self._ends: dict[Task, float] = {}
        self._messages: list[MessageSpan] = []
        self._runnable = list(reversed(range(costs.stages)))

    def result(self) -> EngineResult:
        while self._runnable:
            self._advance(self._runnable.pop())
        assert not self._posted, "batches meet in pairs"
        makespan = max(stage.spans[-1].end for stage in self._stages)
        for number, stage in enumerate(self._stages):
            stage.wait(number, WaitCause.INPUT, stage.now)
            stage.wait(number, WaitCause.DRAINED, makespan)
        graph = graph_of(self._costs)
        schedule = make_schedule("1f1b", graph, self._costs.microbatches)
        # A stage receives one tensor at a time, and uses it at once.
        received = int(self._costs.stages > 1)
        waits = (wait for stage in self._stages for wait in stage.waits)
        return EngineResult(
            makespan,
            tuple(tuple(stage.spans) for stage in self._stages),
            tuple(sorted(waits, key=lambda wait: (wait.start, wait.stage))),
            tuple(sorted(self._messages, key=lambda message: (message.sent, message.source, message.task))),
            tuple(
                Peaks(held=schedule.peak_held(number, graph), received=received) for number in range(self._costs.stages)
            ),
        )

    def _advance(self, number: int) -> None:
        """Run stage ``number`` until it waits for another, or is done."""
        stage = self._stages[number]
        while True:
            if stage.batch is not None:
                if any(output not in self._ends for output in stage.batch):
                    return
                stage.now = max(map(self._ends.__getitem__, stage.batch))
                stage.batch = None
            action = next(stage.actions, None)
            if action is None:
                return
            if isinstance(action, Task):
                self._compute(number, action)
            elif action:
                stage.batch = action
                for output in action:
                    self._post(number, output)

    def _compute(self, number: int, task: Task) -> None:
        stage = self._stages[number]
        stage.wait(number, WaitCause.INPUT, stage.now)
        end = stage.now + self._durations[task.kind][number][task.microbatch]
        stage.spans.append(TaskSpan(number, task, stage.now, end))
        stage.now = stage.idle_since = end

    def _post(self, number: int, output: Task) -> None:
        """Stage ``number`` has come to the transfer of ``output``, at either end."""
        now = self._stages[number].now
        if output not in self._posted:
            self._posted[output] = now
            return
        start = max(self._posted.pop(output), now)
        source = output.virtual_stage
        target = source + 1 if output.kind is Kind.F else source - 1
        end = start + self._latency[output.kind][min(source, target)][output.microbatch]
        self._ends[output] = end
        self._messages.append(MessageSpan(source, target, output, start, end))
        self._runnable.append(target if number == source else source)
