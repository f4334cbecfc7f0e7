"""The parts of a trace: spans of compute, of waiting and of messages, in a bounded ring.

Times are seconds on one clock for all ranks of a host (the lanes' clock), or virtual seconds in the simulator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from rrfp.core.record import record
from rrfp.core.tasks import Task
from rrfp.core.usage import Peaks, WaitCause

DEFAULT_CAPACITY = 65_536


@record
class TaskSpan:
    """``task`` ran on ``stage`` from ``start`` to ``end``.

    ``launched``: where a device computes it, when its call on the host returned; that may be before ``start``.
    """

    stage: int
    task: Task
    start: float
    end: float
    launched: float | None = None


@record
class WaitSpan:
    """The lane of ``stage`` had nothing to run from ``start`` to ``end``, because of ``cause``."""

    stage: int
    cause: WaitCause
    start: float
    end: float


@record
class MessageSpan:
    """The output of ``task`` left stage ``source`` at ``sent`` and reached stage ``target`` at ``arrived``.

    A rank knows one end only: the sender records ``arrived`` as None, the receiver ``sent`` as None; merging traces
    joins the two.
    """

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
class StagePeaks:
    """The most that ``stage`` held in a step."""

    stage: int
    peaks: Peaks


@record
class StepTrace:
    """The spans of one step, of one rank or (merged) of all.

    Attributes:
        step: the step's number, counted from 0 and with evaluations.
        start: when it began: for one rank, when its caller called ``step``; merged, the earliest of those.
        end: when its last task, send and reduction were done; merged, the latest of those.
        tasks: compute spans, by start.
        waits: waiting spans, by start.
        messages: messages between stages.
        dropped: spans lost because the ring was full.
        peaks: the most that each stage held, by stage; merged, the most of any rank. Empty where unknown.
        skipped: of a graph, the (microbatch, virtual stage) pairs that have no tasks, ascending.
    """

    step: int
    start: float
    end: float
    tasks: tuple[TaskSpan, ...] = ()
    waits: tuple[WaitSpan, ...] = ()
    messages: tuple[MessageSpan, ...] = ()
    dropped: int = 0
    peaks: tuple[StagePeaks, ...] = ()
    skipped: tuple[Skip, ...] = ()

    @property
    def num_spans(self) -> int:
        """Spans of all kinds."""
        return len(self.tasks) + len(self.waits) + len(self.messages)


class SpanRing:
    """Keeps the newest ``capacity`` spans."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._recorded = 0

    def record(self, span: Span) -> None:
        """Keep ``span``; the oldest goes when the ring is full."""
        self._spans.append(span)
        self._recorded += 1

    def cut(self, step: int, start: float, end: float, peaks: tuple[StagePeaks, ...] = ()) -> StepTrace:
        """Return everything recorded since the last cut as the trace of ``step``, and forget it."""
        spans, self._spans = list(self._spans), deque(maxlen=self._spans.maxlen)
        dropped, self._recorded = self._recorded - len(spans), 0
        return StepTrace(
            step=step,
            start=start,
            end=end,
            tasks=tuple(span for span in spans if isinstance(span, TaskSpan)),
            waits=tuple(span for span in spans if isinstance(span, WaitSpan)),
            messages=tuple(span for span in spans if isinstance(span, MessageSpan)),
            dropped=dropped,
            peaks=peaks,
        )


def merge(traces: Iterable[StepTrace]) -> StepTrace:
    """One trace of all ranks from one for each rank; joins the two ends of each message.

    Raises:
        ValueError: if there is no trace, or they are of different steps.
    """
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
        peaks=_worst(peak for part in parts for peak in part.peaks),
        skipped=parts[0].skipped,
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


def _worst(peaks: Iterable[StagePeaks]) -> tuple[StagePeaks, ...]:
    by_stage: dict[int, Peaks] = {}
    for entry in peaks:
        by_stage[entry.stage] = Peaks.worst([entry.peaks, by_stage.get(entry.stage, Peaks())])
    return tuple(StagePeaks(stage, by_stage[stage]) for stage in sorted(by_stage))


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
