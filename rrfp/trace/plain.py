"""Traces as plain data, between the processes of one run.

Not the Chrome form: that begins each run at 0, rounds to nanoseconds and draws only messages of which both ends are
known, while `merge` needs every rank's spans on the common clock and either end of a message.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

from rrfp.core.tasks import Task
from rrfp.core.usage import Peaks, WaitCause
from rrfp.trace.spans import MessageSpan, StagePeaks, StepTrace, TaskSpan, WaitSpan


def to_plain(trace: StepTrace) -> dict[str, Any]:
    """``trace`` as JSON-able data."""
    return {
        "step": trace.step,
        "start": trace.start,
        "end": trace.end,
        "tasks": [[span.stage, str(span.task), *_times(span)] for span in trace.tasks],
        "waits": [[span.stage, span.cause.value, span.start, span.end] for span in trace.waits],
        "messages": [
            [span.source, span.target, str(span.task), span.sent, span.arrived, span.num_bytes]
            for span in trace.messages
        ],
        "dropped": trace.dropped,
        "peaks": [[entry.stage, *astuple(entry.peaks)] for entry in trace.peaks],
    }


def from_plain(data: dict[str, Any]) -> StepTrace:
    """Read `to_plain`'s data back.

    Raises:
        KeyError, TypeError, ValueError: if the data are not `to_plain`'s.
    """
    return StepTrace(
        step=data["step"],
        start=data["start"],
        end=data["end"],
        tasks=tuple(TaskSpan(stage, Task.parse(task), *times) for stage, task, *times in data["tasks"]),
        waits=tuple(WaitSpan(stage, WaitCause(cause), start, end) for stage, cause, start, end in data["waits"]),
        messages=tuple(
            MessageSpan(source, target, Task.parse(task), *rest) for source, target, task, *rest in data["messages"]
        ),
        dropped=data["dropped"],
        peaks=tuple(StagePeaks(stage, Peaks(*peaks)) for stage, *peaks in data["peaks"]),
    )


def _times(span: TaskSpan) -> tuple[float, ...]:
    return (span.start, span.end) if span.launched is None else (span.start, span.end, span.launched)
