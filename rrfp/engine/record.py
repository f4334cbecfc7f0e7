"""What ran, travelled and waited in one step of the engine.

Spans are made of it in the end: a million of them, made on the way, would push what the cores work with out of the
processor's caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat

from rrfp.core.usage import Peaks, WaitCause
from rrfp.model.tasks import Task
from rrfp.trace.spans import MessageSpan, StepTrace, TaskSpan, WaitSpan


@dataclass(frozen=True, slots=True)
class EngineResult:
    """One simulated step."""

    #: End of the last task, in seconds from the start.
    makespan: float
    #: For each stage, its tasks in the order in which they ran.
    spans: tuple[tuple[TaskSpan, ...], ...]
    #: Why lanes were idle, up to the makespan.
    waits: tuple[WaitSpan, ...]
    messages: tuple[MessageSpan, ...]
    peaks: tuple[Peaks, ...]

    @property
    def busy(self) -> tuple[float, ...]:
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    def trace(self, step: int = 0) -> StepTrace:
        tasks = sorted((span for spans in self.spans for span in spans), key=lambda span: (span.start, span.stage))
        return StepTrace(step, 0.0, self.makespan, tuple(tasks), self.waits, self.messages)


class EngineRecord:
    """Takes down what happens."""

    def __init__(self, stage_of: Sequence[int], stages: int) -> None:
        self._stage_of = stage_of
        self._ran: list[list[Task]] = [[] for _ in range(stages)]
        self._starts: list[list[float]] = [[] for _ in range(stages)]
        self._ends: list[list[float]] = [[] for _ in range(stages)]
        self._sent: list[Task] = []
        self._sent_to: list[int] = []
        self._sent_at: list[float] = []
        self._arrived_at: list[float] = []
        self._waiting: list[tuple[WaitCause, float] | None] = [None] * stages
        self._waits: list[WaitSpan] = []

    def began(self, stage: int, task: Task, start: float, end: float) -> None:
        self._ran[stage].append(task)
        self._starts[stage].append(start)
        self._ends[stage].append(end)

    def sent(self, task: Task, peer: int, sent_at: float, arrived_at: float) -> None:
        self._sent.append(task)
        self._sent_to.append(peer)
        self._sent_at.append(sent_at)
        self._arrived_at.append(arrived_at)

    def waits(self, stage: int, cause: WaitCause | None, now: float) -> None:
        """From now on ``stage`` is idle for ``cause``, or busy if None."""
        before = self._waiting[stage]
        if (before is None and cause is None) or (before is not None and before[0] is cause):
            return
        if before is not None and before[1] < now:
            self._waits.append(WaitSpan(stage, before[0], before[1], now))
        self._waiting[stage] = None if cause is None else (cause, now)

    def result(self, peaks: tuple[Peaks, ...], bytes_after: Callable[[Task], int]) -> EngineResult:
        """All of it; ``bytes_after`` a task its microbatch holds so many on its virtual stage."""
        makespan = max((ends[-1] for ends in self._ends if ends), default=0.0)
        stages = range(len(self._ran))
        for stage in stages:
            self.waits(stage, None, makespan)
        columns = zip(self._ran, self._starts, self._ends, strict=True)
        spans = tuple(
            tuple(map(TaskSpan, repeat(stage), *here, repeat(None), map(bytes_after, here[0])))
            for stage, here in zip(stages, columns, strict=True)
        )
        sources = [self._stage_of[task.virtual_stage] for task in self._sent]
        return EngineResult(
            makespan,
            spans,
            tuple(sorted(self._waits, key=lambda wait: (wait.start, wait.stage))),
            tuple(map(MessageSpan, sources, self._sent_to, self._sent, self._sent_at, self._arrived_at)),
            peaks,
        )
