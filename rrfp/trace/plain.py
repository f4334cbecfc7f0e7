"""Traces as plain data, between the processes of one run.

Not the Chrome form: that begins each run at 0, rounds to nanoseconds and draws only messages of which both ends are
known, while `merge` needs every rank's spans on the common clock and either end of a message.
"""

from __future__ import annotations

from dataclasses import astuple
from functools import partial
from typing import Any

from rrfp.core.usage import Peaks, WaitCause
from rrfp.model.tasks import Task
from rrfp.plain import number, shown, value_error, whole
from rrfp.trace.spans import MessageSpan, StepTrace, TaskSpan, WaitSpan

_whole = partial(whole, error=value_error)
_stage, _peak, _microbatch, _v = (partial(_whole, name) for name in ("stage", "peak", "microbatch", "virtual stage"))
_time = partial(number, "time", error=value_error)
_wait = partial(number, "wait for a core", least=0, error=value_error)
_size = partial(number, "size", least=0, error=value_error)


def to_plain(trace: StepTrace) -> dict[str, Any]:
    return {
        "step": trace.step,
        "start": trace.start,
        "end": trace.end,
        "tasks": [[span.stage, str(span.task), span.num_bytes, *_times(span)] for span in trace.tasks],
        "waits": [[span.stage, span.cause.value, span.start, span.end] for span in trace.waits],
        "messages": [
            [span.source, span.target, str(span.task), span.sent, span.arrived, span.num_bytes]
            for span in trace.messages
        ],
        "dropped": trace.dropped,
        "peaks": [[stage, *astuple(peaks)] for stage, peaks in trace.peaks.items()],
        "skipped": [[*skip] for skip in trace.skipped],
        "sizes": None if trace.sizes is None else [*trace.sizes],
        "core_waits": [*map(list, trace.core_waits.items())],
        "limits": [*map(list, trace.limits.items())],
    }


def from_plain(data: Any) -> StepTrace:
    return StepTrace(
        step=_whole("step", data["step"]),
        start=_time(data["start"]),
        end=_time(data["end"]),
        tasks=tuple(_task_span(*plain) for plain in data["tasks"]),
        waits=tuple(
            WaitSpan(_stage(stage), _cause(cause), _time(start), _time(end))
            for stage, cause, start, end in data["waits"]
        ),
        messages=tuple(
            MessageSpan(
                *(_stage(source), _stage(target), Task.parse(task)),
                *(_time_or_none(sent), _time_or_none(arrived), _whole("num_bytes", num_bytes)),
            )
            for source, target, task, sent, arrived, num_bytes in data["messages"]
        ),
        dropped=_whole("dropped", data["dropped"]),
        peaks={_stage(stage): Peaks(*map(_peak, peaks)) for stage, *peaks in data["peaks"]},
        skipped=tuple((_microbatch(microbatch), _v(v)) for microbatch, v in data["skipped"]),
        sizes=None if data["sizes"] is None else tuple(map(_size, data["sizes"])),
        core_waits={_stage(stage): _wait(seconds) for stage, seconds in data["core_waits"]},
        limits={_stage(stage): _peak(slots) for stage, slots in data["limits"]},
    )


def _cause(value: Any) -> WaitCause:
    if not isinstance(value, str):  # the enumeration would show it, however deep it is
        raise TypeError(f"{shown(value)} is no cause")
    return WaitCause(value)


def _time_or_none(value: Any) -> float | None:
    return None if value is None else _time(value)


def _task_span(stage: Any, task: Any, num_bytes: Any, *times: Any) -> TaskSpan:
    if len(times) not in (2, 3):
        raise ValueError(f"{len(times)} times of a task, must be 2 or 3")
    start, end, *launched = map(_time, times)
    launch = launched[0] if launched else None
    return TaskSpan(_stage(stage), Task.parse(task), start, end, launch, _whole("num_bytes", num_bytes))


def _times(span: TaskSpan) -> tuple[float, ...]:
    return (span.start, span.end) if span.launched is None else (span.start, span.end, span.launched)
