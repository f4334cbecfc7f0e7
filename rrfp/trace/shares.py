"""How many of the stages compute or wait, over the time of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from rrfp.core.tasks import Kind
from rrfp.core.usage import WaitCause
from rrfp.trace.spans import StepTrace, TaskSpan, WaitSpan

State = Kind | WaitCause


def shares(
    trace: StepTrace, waits: Iterable[WaitSpan], stages: int, start: float, end: float, bins: int
) -> dict[State, list[float]]:
    """The part of the stages in each state, 0..1, by intervals of equal length.

    Args:
        trace: the step; tasks of one stage do not overlap.
        waits: when its stages were idle.
        stages: their number.
        start, end: seconds after the step's start.
        bins: intervals between the two.
    """
    width = (end - start) / bins
    seconds: dict[State, list[float]] = defaultdict(lambda: [0.0] * bins)
    tasks: list[tuple[State, TaskSpan | WaitSpan]] = [(span.task.kind, span) for span in trace.tasks]
    for state, span in [*tasks, *((wait.cause, wait) for wait in waits)]:
        low, high = max(span.start - trace.start, start), min(span.end - trace.start, end)
        if high <= low:
            continue
        for index in range(int((low - start) / width), min(bins - 1, int((high - start) / width)) + 1):
            begin = start + index * width
            seconds[state][index] += max(0.0, min(high, begin + width) - max(low, begin))
    return {state: [part / (width * stages) for part in parts] for state, parts in seconds.items()}
