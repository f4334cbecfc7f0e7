"""Chrome's trace-event JSON, which https://ui.perfetto.dev and chrome://tracing open.

A pipeline run is a process there, a stage one of its threads: tasks and waits are slices of the thread, messages are
arrows between the slice of the task that made them and the slice of the task that reads them. Perfetto ties an arrow's
end to whatever slice is open on the thread at that moment, so both ends are put strictly inside their slices, and a
message whose reader is not in the trace, or took no time, has no arrow.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from rrfp.core.tasks import Kind, Task
from rrfp.costs.atomic_files import write_atomically
from rrfp.trace.breakdown import CAUSE_LABELS, idle_waits
from rrfp.trace.spans import MessageSpan, StepTrace, TaskSpan

Event = dict[str, Any]

#: Thread ids: the steps first, then the stages.
STEPS_THREAD = 0
KIND_NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.W: "weight gradient"}

#: Seconds by which an arrow's end lies inside its slice, unless the slice is too short.
_INSIDE = 1e-6


def write_chrome(path: str | os.PathLike[str], traces: Sequence[StepTrace], *, name: str = "pipeline") -> None:
    """Write the steps of one run to a file, replacing its content.

    Args:
        path: the file; its folder must exist.
        traces: merged traces, in the order of the steps.
        name: the run's name in the viewer.

    Raises:
        ConfigError: if the file cannot be written; its old content stays then.
    """
    document = {"displayTimeUnit": "ms", "traceEvents": chrome_events(traces, name=name)}
    write_atomically(path, json.dumps(document, separators=(",", ":")))


def chrome_events(traces: Sequence[StepTrace], *, name: str = "pipeline", pid: int = 1) -> list[Event]:
    """The trace events of one run; lists of several runs, each with its own ``pid``, may be joined.

    Times are microseconds from the first step's start. A step that does not start later than the one in front of it
    (every simulated step starts at 0) is laid behind it.
    """
    stages = sorted({span.stage for trace in traces for spans in (trace.tasks, trace.waits) for span in spans})
    events = list(_names(name, pid, stages))
    arrow = 0
    origin = traces[0].start if traces else 0.0
    for trace, following in zip_longest(traces, traces[1:]):
        same_clock = following is not None and following.start > trace.start
        # One rank may begin the next step a little before another has returned from this one.
        until = min(trace.end, following.start) if same_clock else trace.end
        events.extend(_Step(trace, until, origin, pid).events(stages, arrow))
        arrow += len(trace.messages)
        if following is not None and not same_clock:
            origin += following.start - trace.end
    return events


def _names(name: str, pid: int, stages: Iterable[int]) -> Iterator[Event]:
    def metadata(event: str, tid: int, **args: object) -> Event:
        return {"ph": "M", "pid": pid, "tid": tid, "name": event, "args": args}

    yield metadata("process_name", STEPS_THREAD, name=name)
    yield metadata("process_sort_index", STEPS_THREAD, sort_index=pid)
    for tid, thread in [(STEPS_THREAD, "steps"), *((_thread(stage), f"stage {stage}") for stage in stages)]:
        yield metadata("thread_name", tid, name=thread)
        yield metadata("thread_sort_index", tid, sort_index=tid)


def _thread(stage: int) -> int:
    return stage + 1


class _Step:
    """The events of one step."""

    def __init__(self, trace: StepTrace, until: float, origin: float, pid: int) -> None:
        self._trace = trace
        self._until = until
        self._origin = origin
        self._pid = pid
        self._spans = {span.task: span for span in trace.tasks}
        #: Task spans by stage, kind and microbatch, by start.
        self._by_microbatch: dict[tuple[int, Kind, int], list[TaskSpan]] = defaultdict(list)
        for span in sorted(trace.tasks, key=lambda span: span.start):
            self._by_microbatch[span.stage, span.task.kind, span.task.microbatch].append(span)

    def events(self, stages: Iterable[int], first_arrow: int) -> Iterator[Event]:
        """Slices before arrows: viewers read events of one instant in the order of the file."""
        trace = self._trace
        args: dict[str, object] = {"step": trace.step}
        if trace.peaks:
            args["peaks"] = {str(entry.stage): asdict(entry.peaks) for entry in trace.peaks}
        yield self._slice("step", f"step {trace.step}", STEPS_THREAD, trace.start, self._until, args)
        for span in trace.tasks:
            yield self._task(span)
        for stage in stages:
            for wait in idle_waits(trace, stage):
                end = min(wait.end, self._until)
                if end > wait.start:
                    label = f"wait: {CAUSE_LABELS[wait.cause]}"
                    event = self._slice("wait", label, _thread(stage), wait.start, end, {"step": trace.step})
                    yield {**event, "cname": "grey"}
        for arrow, message in enumerate(trace.messages, first_arrow):
            yield from self._arrow(message, arrow)

    def _task(self, span: TaskSpan) -> Event:
        kind, microbatch, virtual_stage = span.task
        args = {
            "kind": KIND_NAMES[kind],
            "microbatch": microbatch,
            "virtual stage": virtual_stage,
            "step": self._trace.step,
        }
        return self._slice("computation", str(span.task), _thread(span.stage), span.start, span.end, args)

    def _slice(self, cat: str, name: str, tid: int, start: float, end: float, args: dict[str, object]) -> Event:
        ts = self._microseconds(start)
        # The end is rounded, not the duration: slices that touch must not overlap by rounding.
        duration = round(self._microseconds(end) - ts, 3)
        return {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": self._pid,
            "tid": tid,
            "ts": ts,
            "dur": duration,
            "args": args,
        }

    def _arrow(self, message: MessageSpan, arrow: int) -> Iterator[Event]:
        sender = self._spans.get(message.task)
        if sender is None or (reader := self._reader(message, sender)) is None:
            return
        leaves = max(sender.end - _INSIDE, (sender.start + sender.end) / 2)
        # Clocks of two ranks may differ by a little; an arrow backwards in time would not be drawn.
        arrives = max(min(reader.start + _INSIDE, (reader.start + reader.end) / 2), leaves)
        if leaves >= sender.end or arrives >= reader.end:
            return
        common = {"cat": "message", "name": _arrow_name(message.task), "id": arrow, "pid": self._pid}
        yield {"ph": "s", **common, "tid": _thread(sender.stage), "ts": self._microseconds(leaves)}
        yield {"ph": "f", "bp": "e", **common, "tid": _thread(reader.stage), "ts": self._microseconds(arrives)}

    def _reader(self, message: MessageSpan, sender: TaskSpan) -> TaskSpan | None:
        """The first task on the target that can have read the message.

        It has the kind and microbatch of the sender; with several chunks the earlier ones ran before the sender.
        """
        kind, microbatch, _ = message.task
        candidates = self._by_microbatch.get((message.target, kind, microbatch), [])
        return next((span for span in candidates if span.end >= sender.end and span is not sender), None)

    def _microseconds(self, time: float) -> float:
        return round((time - self._origin) * 1e6, 3)


def _arrow_name(task: Task) -> str:
    return "activation" if task.kind is Kind.F else "gradient"
