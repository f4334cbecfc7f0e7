"""The parts of a trace: spans of compute, of waiting and of messages, in a bounded ring.

Times are seconds on one clock for all ranks of a host (the lanes' clock), or virtual seconds in the simulator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from rrfp.core.usage import Peaks, WaitCause
from rrfp.laboratory import METHODS, load
from rrfp.model.record import record
from rrfp.model.tasks import Task
from rrfp.model.visits import Visits

DEFAULT_CAPACITY = 65_536


@record
class TaskSpan:
    """``task`` ran on ``stage`` from ``start`` to ``end``.

    ``launched``: where a device computes it, when its call on the host returned; that may be before ``start``.
    ``num_bytes``: what its microbatch holds on its virtual stage after it.
    """

    stage: int
    task: Task
    start: float
    end: float
    launched: float | None = None
    num_bytes: int = 0


@record
class WaitSpan:
    """The lane of ``stage`` had nothing to run from ``start`` to ``end``, because of ``cause``."""

    stage: int
    cause: WaitCause
    start: float
    end: float


@record
class MessageSpan:
    """The output of ``task`` left ``source`` and reached ``target``."""

    # A rank knows one end only: the sender records ``arrived`` as None, the receiver ``sent`` as None; merging traces
    # joins the two.

    source: int
    target: int
    task: Task
    sent: float | None
    arrived: float | None
    num_bytes: int = 0


#: A microbatch, and a virtual stage that it skips.
Skip = tuple[int, int]

Span = TaskSpan | WaitSpan | MessageSpan


@record
class StepTrace:
    """The spans of one step, of one rank or (merged) of all."""

    #: The step's number, counted from 0 and with evaluations.
    step: int
    #: When it began: for one rank, when its caller called ``step``; merged, the earliest of those.
    start: float
    #: When its last task, send and reduction were done; merged, the latest of those.
    end: float
    #: Compute spans, by start.
    tasks: tuple[TaskSpan, ...] = ()
    #: Waiting spans, by start.
    waits: tuple[WaitSpan, ...] = ()
    #: Messages between stages.
    messages: tuple[MessageSpan, ...] = ()
    #: Spans lost because the ring was full.
    dropped: int = 0
    #: The most that each stage held; merged, the most of any rank. Empty where unknown.
    peaks: Mapping[int, Peaks] = field(default_factory=dict)
    #: Of a graph, the (microbatch, virtual stage) pairs that have no tasks, ascending.
    skipped: tuple[Skip, ...] = ()
    #: Of the microbatches, as the caller gave them (``step(sizes=...)``), or None. Merged, None where ranks received
    #: different ones.
    sizes: tuple[float, ...] | None = None
    #: By stage, the seconds for which its compute thread could run and no core was free. Empty where unknown, such as
    #: on devices.
    core_waits: Mapping[int, float] = field(default_factory=dict)
    #: The chunk tasks that each stage might hold, where that changes from step to step; else empty.
    limits: Mapping[int, int] = field(default_factory=dict)

    @property
    def num_spans(self) -> int:
        return len(self.tasks) + len(self.waits) + len(self.messages)

    def _repr_html_(self) -> str:
        html: str = load(METHODS["StepTrace._repr_html_"])(self)
        return html


def merge(traces: Iterable[StepTrace]) -> StepTrace:
    """One trace of all ranks; joins the two ends of each message."""
    parts = list(traces)
    if len({part.step for part in parts}) != 1:
        raise ValueError(f"traces of one step are needed, got steps {sorted({part.step for part in parts})}")
    return StepTrace(
        step=parts[0].step,
        start=min(part.start for part in parts),
        end=max(part.end for part in parts),
        tasks=tuple(sorted((s for p in parts for s in p.tasks), key=lambda s: (s.start, s.stage))),
        waits=tuple(sorted((s for p in parts for s in p.waits), key=lambda s: (s.start, s.stage))),
        messages=_join(m for p in parts for m in p.messages),
        dropped=sum(part.dropped for part in parts),
        peaks=_worst([part.peaks for part in parts]),
        skipped=parts[0].skipped,
        sizes=parts[0].sizes if len({part.sizes for part in parts}) == 1 else None,
        core_waits=dict(sorted(wait for part in parts for wait in part.core_waits.items())),
        limits=dict(sorted(limit for part in parts for limit in part.limits.items())),
    )


def skips(skipped: Sequence[Collection[int]]) -> tuple[Skip, ...]:
    """``skipped``, by microbatch, as `StepTrace` has it."""
    return tuple((microbatch, v) for microbatch, own in enumerate(skipped) for v in sorted(own))


def shifted(trace: StepTrace, seconds: float) -> StepTrace:
    """The same step on a clock that shows ``seconds`` more."""

    def moved(time: float | None) -> float | None:
        return None if time is None else time + seconds

    return replace(
        trace,
        start=trace.start + seconds,
        end=trace.end + seconds,
        tasks=tuple(
            replace(span, start=span.start + seconds, end=span.end + seconds, launched=moved(span.launched))
            for span in trace.tasks
        ),
        waits=tuple(replace(span, start=span.start + seconds, end=span.end + seconds) for span in trace.waits),
        messages=tuple(replace(span, sent=moved(span.sent), arrived=moved(span.arrived)) for span in trace.messages),
    )


def _worst(every: Sequence[Mapping[int, Peaks]]) -> dict[int, Peaks]:
    stages = sorted({stage for peaks in every for stage in peaks})
    return {stage: Peaks.worst(peaks[stage] for peaks in every if stage in peaks) for stage in stages}


def _join(messages: Iterable[MessageSpan]) -> tuple[MessageSpan, ...]:
    joined: dict[tuple[int, int, Task], MessageSpan] = {}
    for message in messages:
        key = (message.source, message.target, message.task)
        other = joined.get(key, message)
        joined[key] = MessageSpan(
            *key,
            sent=message.sent if message.sent is not None else other.sent,
            arrived=message.arrived if message.arrived is not None else other.arrived,
            num_bytes=max(message.num_bytes, other.num_bytes),
        )
    return tuple(joined.values())


class Recorder:
    """Records the spans of one stage."""

    # A wait begins at the end of the last task, because the lane has been idle since, and ends at the start of the
    # next; a change of the cause cuts it in two.

    def __init__(self, stage: int, now: Callable[[], float], capacity: int = DEFAULT_CAPACITY) -> None:
        self._stage = stage
        self._now = now
        #: The newest ones since the step began, and how many there were.
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._recorded = 0
        self._opened = 0.0
        self._idle_since = 0.0
        self._cause: WaitCause | None = None
        self._cause_since = 0.0
        self._core_wait = 0.0

    def open(self) -> None:
        self._opened = self._idle_since = self._now()
        self._cause = None

    def waiting(self, cause: WaitCause) -> None:
        if self._cause is cause:
            return
        now = self._now()
        if self._cause is None:
            self._cause_since = self._idle_since
        else:
            self._end_wait(now)
            self._cause_since = now
        self._cause = cause

    @property
    def wait(self) -> tuple[WaitCause, float] | None:
        """Cause and beginning of the wait since the last task, if any."""
        return None if self._cause is None else (self._cause, self._cause_since)

    def ran(self, task: Task, start: float, end: float, launched: float | None = None, num_bytes: int = 0) -> None:
        """``task`` has completed. ``launched``, ``num_bytes``: see `TaskSpan`."""
        if self._cause is not None:
            self._end_wait(start)
            self._cause = None
        self._record(TaskSpan(self._stage, task, start, end, launched, num_bytes))
        self._idle_since = end

    def sent(self, peer: int, task: Task, num_bytes: int) -> None:
        self._record(MessageSpan(self._stage, peer, task, self._now(), None, num_bytes))

    def arrived(self, peer: int, task: Task, num_bytes: int) -> None:
        self._record(MessageSpan(peer, self._stage, task, None, self._now(), num_bytes))

    def close(
        self,
        step: int,
        peaks: Peaks | None = None,
        visits: Visits | None = None,
        sizes: tuple[float, ...] | None = None,
        core_wait: float | None = None,
    ) -> StepTrace:
        """The step has ended. ``peaks``, ``visits`` and ``sizes`` are the stage's in that step, where known.

        ``core_wait``: the seconds since the start for which the lane's thread could run and had no core.
        """
        now = self._now()
        if self._cause is not None:
            self._end_wait(now)
            self._cause = None
        spans, self._spans = self._spans, deque(maxlen=self._spans.maxlen)
        dropped, self._recorded = self._recorded - len(spans), 0
        by_type: dict[type, list[Any]] = {TaskSpan: [], WaitSpan: [], MessageSpan: []}
        for span in spans:
            by_type[type(span)].append(span)
        core_waits: dict[int, float] = {}
        if core_wait is not None:
            core_waits, self._core_wait = {self._stage: core_wait - self._core_wait}, core_wait
        return StepTrace(
            step=step,
            start=self._opened,
            end=now,
            tasks=tuple(by_type[TaskSpan]),
            waits=tuple(by_type[WaitSpan]),
            messages=tuple(by_type[MessageSpan]),
            dropped=dropped,
            peaks={} if peaks is None else {self._stage: peaks},
            skipped=() if visits is None else skips(visits.skipped),
            sizes=sizes,
            core_waits=core_waits,
        )

    def _end_wait(self, end: float) -> None:
        if self._cause is not None and end > self._cause_since:
            self._record(WaitSpan(self._stage, self._cause, self._cause_since, end))

    def _record(self, span: Span) -> None:
        self._spans.append(span)
        self._recorded += 1


class TraceHistory:
    """Keeps the traces of the newest steps."""

    def __init__(self, steps: int) -> None:
        #: The most steps that it keeps; 0 keeps none.
        self._steps = steps
        self._traces: deque[StepTrace] = deque()
        self._num_spans = 0

    def add(self, trace: StepTrace) -> None:
        self._traces.append(trace)
        self._num_spans += trace.num_spans
        # The newest step is kept however many spans it has.
        while len(self._traces) > self._steps or (len(self._traces) > 1 and self._num_spans > DEFAULT_CAPACITY):
            self._num_spans -= self._traces.popleft().num_spans

    @property
    def traces(self) -> tuple[StepTrace, ...]:
        return tuple(self._traces)
