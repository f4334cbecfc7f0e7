"""The breakdown of a stage's time in one step: compute, blocked by cause, and the runtime itself.

Every instant of the step counts exactly once, so the parts sum to the step's time whatever was recorded: where spans
overlap, compute wins over waiting and an earlier wait over a later one. What no span covers is the runtime's own time
(`other`), except after the stage's last task, where nothing was left to run.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from rrfp.core.usage import WaitCause
from rrfp.trace.spans import StepTrace, WaitSpan

#: The display name of each cause.
CAUSE_LABELS = {
    WaitCause.INPUT: "input",
    WaitCause.MEMORY: "memory",
    WaitCause.ORDER: "TP order",
    WaitCause.CHOICE: "choice",
    WaitCause.DRAINED: "nothing left",
}


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of one stage in one step; ``step`` is the sum of all others."""

    #: From the step's start to its end.
    step: float
    #: At least one task ran.
    compute: float
    #: Blocked: no task had its inputs.
    input: float = 0.0
    #: Blocked: a forward had its inputs, and the memory limit blocked it.
    memory: float = 0.0
    #: Blocked: a task had its inputs, and the tensor-parallel group's order did not have it yet.
    order: float = 0.0
    #: Idle by choice: a backward could run, and the hint waited for a forward that was on its way.
    choice: float = 0.0
    #: Blocked: every task of the stage had started, and other stages still computed.
    drained: float = 0.0
    #: Neither in a task nor blocked: the runtime's own time, such as dispatch.
    other: float = 0.0

    @property
    def blocking(self) -> float:
        """Seconds without compute, all causes together."""
        return self.input + self.memory + self.order + self.choice + self.drained

    @property
    def by_cause(self) -> dict[WaitCause, float]:
        return {cause: getattr(self, cause.value) for cause in WaitCause}

    @property
    def parts(self) -> dict[str, float]:
        """All seconds, by the names under which people see them."""
        blocked = {CAUSE_LABELS[cause]: seconds for cause, seconds in self.by_cause.items()}
        return {"compute": self.compute, **blocked, "other": self.other}

    @property
    def compute_share(self) -> float:
        """Part of the step in which the stage computed, 0..1."""
        return self.share(self.compute)

    @property
    def blocking_share(self) -> float:
        """Part of the step in which the stage was blocked, 0..1."""
        return self.share(self.blocking)

    def share(self, seconds: float) -> float:
        """``seconds`` as a part of the step, 0..1."""
        return seconds / self.step if self.step > 0 else 0.0

    def __str__(self) -> str:
        """The step's milliseconds, and the parts that are not 0 in percent."""
        shares = ", ".join(f"{name} {self.share(own):.1%}" for name, own in self.parts.items() if own)
        return f"{1e3 * self.step:.1f} ms: {shares or 'nothing'}"

    def to_json(self) -> dict[str, float | dict[str, float]]:
        """Plain data: seconds, the causes under ``blocking_by_cause``."""
        return {
            "step": self.step,
            "compute": self.compute,
            "blocking": self.blocking,
            "blocking_by_cause": {cause.value: seconds for cause, seconds in self.by_cause.items()},
            "other": self.other,
        }


def breakdown(trace: StepTrace, stage: int) -> Breakdown:
    """The breakdown of ``stage`` between the trace's start and end.

    With one rank's trace that is the rank's own step; with a merged one it is the whole pipeline's, where a stage that
    ended before the others counts as drained from then on.
    """
    busy = _busy(trace, stage)
    compute = sum([end - start for start, end in busy])
    blocked = dict.fromkeys(WaitCause, 0.0)
    for wait in _idle_waits(trace, stage, busy):
        blocked[wait.cause] += wait.end - wait.start
    step = trace.end - trace.start
    by_cause = {cause.value: seconds for cause, seconds in blocked.items()}
    # Rounding may leave a few ulp below zero.
    other = max(0.0, step - compute - sum(blocked.values()))
    return Breakdown(step=step, compute=compute, other=other, **by_cause)


def blank_seconds(trace: StepTrace, stage: int, start: float, end: float) -> float:
    """Seconds of ``stage`` in neither a task nor a wait."""
    spans = [(span.start, span.end) for span in trace.tasks if span.stage == stage]
    spans += [(wait.start, wait.end) for wait in idle_waits(trace, stage)]
    return max(0.0, end - start - sum(high - low for low, high in _union(spans, start, end)))


def mean(breakdowns: Iterable[Breakdown]) -> Breakdown:
    """The average of each part, over stages or over steps."""
    parts = list(breakdowns)
    if not parts:
        raise ValueError("the mean of no breakdowns")
    names = [field.name for field in fields(Breakdown)]
    return Breakdown(**{name: sum(getattr(part, name) for part in parts) / len(parts) for name in names})


def idle_waits(trace: StepTrace, stage: int) -> list[WaitSpan]:
    """The waits of ``stage``, cut to overlap nothing and no edge."""
    return _idle_waits(trace, stage, _busy(trace, stage))


def _busy(trace: StepTrace, stage: int) -> list[tuple[float, float]]:
    return _union([(span.start, span.end) for span in trace.tasks if span.stage == stage], trace.start, trace.end)


def _idle_waits(trace: StepTrace, stage: int, busy: list[tuple[float, float]]) -> list[WaitSpan]:
    # Time after the stage's last task that no wait covers is returned as drained.
    gaps = _gaps(busy, trace.start, trace.end)
    cut: list[WaitSpan] = []
    free_from = trace.start
    for wait in sorted((span for span in trace.waits if span.stage == stage), key=lambda span: span.start):
        start, end = max(wait.start, free_from), min(wait.end, trace.end)
        free_from = max(free_from, end)
        while gaps and gaps[0][1] <= start:
            gaps.popleft()
        for gap_start, gap_end in gaps:
            if gap_start >= end:
                break
            cut.append(WaitSpan(stage, wait.cause, max(start, gap_start), min(end, gap_end)))
    if busy:
        last_end = busy[-1][1]
        covered = _union([(span.start, span.end) for span in cut], last_end, trace.end)
        cut += [WaitSpan(stage, WaitCause.DRAINED, *gap) for gap in _gaps(covered, last_end, trace.end)]
    return sorted((span for span in cut if span.end > span.start), key=lambda span: span.start)


def _union(intervals: Iterable[tuple[float, float]], low: float, high: float) -> list[tuple[float, float]]:
    """The disjoint intervals that cover the same instants, cut to bounds."""
    union: list[tuple[float, float]] = []
    last = -math.inf  # the end of the last interval in there
    for start, end in sorted(intervals):
        start, end = start if start > low else low, end if end < high else high
        if end <= start:
            continue
        if start <= last:
            start, end = union.pop()[0], end if end > last else last
        union.append((start, end))
        last = end
    return union


def _gaps(busy: Sequence[tuple[float, float]], low: float, high: float) -> deque[tuple[float, float]]:
    """The parts of ``low``..``high`` outside the disjoint intervals of ``busy``."""
    starts, ends = [low, *[end for _, end in busy]], [*[start for start, _ in busy], high]
    return deque([gap for gap in zip(starts, ends, strict=True) if gap[1] > gap[0]])
