"""Chrome's trace-event JSON, which https://ui.perfetto.dev and chrome://tracing open.

A pipeline run is a process there, a stage one of its threads: tasks and waits are slices of the thread, messages are
arrows between the slice of the task that made them and the slice of the task that reads them. Perfetto ties an arrow's
end to whatever slice is open on the thread at that moment, so both ends are put strictly inside their slices, and a
message whose reader is not in the trace, or took no time, has no arrow. The arrow's beginning has the message's real
time of arrival among its arguments. A counter track for each stage shows the chunk tasks that it held.

The run of a graph of parts has that graph beside its name, each task has its part, and each step what it skipped. Where
the caller gave sizes of microbatches, each step has those too.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from typing import Any

from rrfp.atomic_files import write_atomically
from rrfp.errors import ConfigError
from rrfp.model.graph import TaskGraph
from rrfp.model.plain_graph import graph_to_plain
from rrfp.model.tasks import KINDS, SENT_TO, Kind, Mode, Side, Task
from rrfp.plain import shown
from rrfp.trace.breakdown import CAUSE_LABELS, idle_waits
from rrfp.trace.held import Level, held_levels
from rrfp.trace.job_data import JOB, TracedJob
from rrfp.trace.spans import MessageSpan, Skip, StepTrace, TaskSpan

Event = dict[str, Any]

#: Thread ids: the steps first, then the stages.
STEPS_THREAD = 0

#: An argument of a task on a device: when its call returned, in microseconds on the axis of the file.
LAUNCHED = "launched"

#: An argument of a task: the bytes that its microbatch holds on its virtual stage after it.
BYTES = "bytes"

#: The argument of a step that has the sizes of its microbatches.
SIZES = "sizes"
LIMITS = "limits"

#: The argument of a step that has, by stage, the seconds for which its compute thread had no core.
CORE_WAITS = "core waits"

#: The argument of a run's name that has its graph, and that of a step that has the skipped virtual stages.
GRAPH, SKIPPED = "graph", "skipped"

#: The series of a stage's counter.
HELD = "chunk tasks"

#: Seconds by which an arrow's end lies inside its slice, unless the slice is too short.
_INSIDE = 1e-6


def write_chrome(
    path: str | os.PathLike[str],
    traces: Sequence[StepTrace],
    *,
    name: str = "pipeline",
    graph: TaskGraph | None = None,
    job: TracedJob | None = None,
) -> None:
    """Write the steps of one run to a file, replacing its content."""
    given: object = traces
    if not isinstance(given, Sequence) or not all(isinstance(each, StepTrace) for each in given):
        raise ConfigError(f"traces is {shown(traces)}, must be a list with result.trace of each step")
    stages, other = _stages(traces), None if job is None else {JOB: job.to_plain()}
    write_runs(path, [ChromeRun(name, stages, traces, traces[0].start if traces else 0.0, graph)], other)


@dataclass(frozen=True, slots=True)
class ChromeRun:
    """One run of a file."""

    name: str
    #: Those that have a thread.
    stages: Sequence[int]
    #: Merged traces, in the order of the steps; read once, one step ahead of the file.
    traces: Iterable[StepTrace]
    #: The time that is 0 in the file; runs with one clock share it.
    origin: float
    #: Whose virtual stages have names; None: a chain.
    graph: TaskGraph | None = None


def write_runs(
    path: str | os.PathLike[str],
    runs: Iterable[ChromeRun],
    # Further facts about the file, as plain data, for its field ``otherData``.
    other_data: Mapping[str, object] | None = None,
) -> None:
    """Write several runs to a file, each a process in the viewer."""
    write_atomically(path, _pieces(runs, other_data))


def _pieces(runs: Iterable[ChromeRun], other_data: Mapping[str, object] | None) -> Iterator[str]:
    other = "" if other_data is None else f'"otherData":{_json(other_data)},'
    yield f'{{"displayTimeUnit":"ms",{other}"traceEvents":['
    comma = ""
    for pid, run in enumerate(runs, 1):
        for event in _run_events(run, pid):
            yield comma + _json(event)
            comma = ","
    yield "]}"


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def chrome_events(traces: Sequence[StepTrace], *, name: str = "pipeline", pid: int = 1) -> list[Event]:
    """The trace events of one run, in microseconds from its start."""
    # Lists of several runs, each with its own ``pid``, may be joined. A step that does not start later than the one
    # in front of it (every simulated step starts at 0) is laid behind it.
    return list(_run_events(ChromeRun(name, _stages(traces), traces, traces[0].start if traces else 0.0), pid))


def _stages(traces: Iterable[StepTrace]) -> list[int]:
    return sorted({span.stage for trace in traces for spans in (trace.tasks, trace.waits) for span in spans})


def _run_events(run: ChromeRun, pid: int) -> Iterator[Event]:
    yield from _names(run, pid)
    arrow, origin = 0, run.origin
    # Each with the one after it; the last one with None.
    for trace, following in pairwise(chain(run.traces, (None,))):
        assert trace is not None
        same_clock = following is not None and following.start > trace.start
        # One rank may begin the next step a little before another has returned from this one.
        until = trace.end if following is None or not same_clock else min(trace.end, following.start)
        yield from _Step(trace, until, origin, pid, run.graph).events(run.stages, arrow)
        arrow += len(trace.messages)
        if following is not None and not same_clock:
            origin += following.start - trace.end


def _names(run: ChromeRun, pid: int) -> Iterator[Event]:
    def metadata(event: str, tid: int, **args: object) -> Event:
        return {"ph": "M", "pid": pid, "tid": tid, "name": event, "args": args}

    graph = {} if run.graph is None else {GRAPH: graph_to_plain(run.graph)}
    yield metadata("process_name", STEPS_THREAD, name=run.name, **graph)
    yield metadata("process_sort_index", STEPS_THREAD, sort_index=pid)
    for tid, thread in [(STEPS_THREAD, "steps"), *((_thread(stage), f"stage {stage}") for stage in run.stages)]:
        yield metadata("thread_name", tid, name=thread)
        yield metadata("thread_sort_index", tid, sort_index=tid)


def _thread(stage: int) -> int:
    return stage + 1


class _Step:
    def __init__(self, trace: StepTrace, until: float, origin: float, pid: int, graph: TaskGraph | None) -> None:
        self._trace = trace
        self._graph = graph
        self._until = until
        self._origin = origin
        self._pid = pid
        self._spans = {span.task: span for span in trace.tasks}
        #: Task spans by stage, kind and microbatch, by start.
        self._by_microbatch: dict[tuple[int, Kind, int], list[TaskSpan]] = defaultdict(list)
        for span in sorted(trace.tasks, key=lambda span: span.start):
            self._by_microbatch[span.stage, span.task.kind, span.task.microbatch].append(span)

    def events(self, stages: Iterable[int], first_arrow: int) -> Iterator[Event]:
        """Arrows last: viewers read simultaneous events in file order."""
        trace = self._trace
        args: dict[str, object] = {"step": trace.step}
        if trace.peaks:
            args["peaks"] = {str(stage): asdict(peaks) for stage, peaks in trace.peaks.items()}
        if trace.limits:
            args[LIMITS] = {str(stage): slots for stage, slots in trace.limits.items()}
        if self._graph is not None and trace.skipped:
            args[SKIPPED] = _by_name(trace.skipped, self._graph)
        if trace.sizes is not None:
            args[SIZES] = [*trace.sizes]
        if trace.core_waits:
            args[CORE_WAITS] = {str(stage): seconds for stage, seconds in trace.core_waits.items()}
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
            for level in held_levels(trace, stage):
                yield self._counter(stage, level)
        for arrow, message in enumerate(trace.messages, first_arrow):
            yield from self._arrow(message, arrow)

    def _task(self, span: TaskSpan) -> Event:
        kind, microbatch, virtual_stage = span.task
        args: dict[str, object] = {
            "kind": KINDS[kind].label,
            "microbatch": microbatch,
            "virtual stage": virtual_stage,
            "step": self._trace.step,
        }
        if span.launched is not None:
            args[LAUNCHED] = self._microseconds(span.launched)
        if span.num_bytes:
            args[BYTES] = span.num_bytes
        name = str(span.task) if self._graph is None else self._graph.text_of(span.task)
        return self._slice("computation", name, _thread(span.stage), span.start, span.end, args)

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

    def _counter(self, stage: int, level: Level) -> Event:
        # Viewers tell counters apart by process and name, whatever the thread.
        track = {"cat": "memory", "name": f"stage {stage} held", "pid": self._pid, "tid": _thread(stage)}
        return {"ph": "C", **track, "ts": self._microseconds(level.time), "args": {HELD: level.held}}

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
        args: dict[str, object] = {
            "task": str(message.task),
            "step": self._trace.step,
            "to stage": message.target,
            "arrived": None if message.arrived is None else self._microseconds(message.arrived),
            "bytes": message.num_bytes,
        }
        yield {"ph": "s", **common, "tid": _thread(sender.stage), "ts": self._microseconds(leaves), "args": args}
        yield {"ph": "f", "bp": "e", **common, "tid": _thread(reader.stage), "ts": self._microseconds(arrives)}

    def _reader(self, message: MessageSpan, sender: TaskSpan) -> TaskSpan | None:
        """The first task on the target that can have read the message."""
        # It has the kind and microbatch of the sender; with several chunks the earlier ones ran before the sender.
        kind, microbatch, v = message.task
        candidates = self._by_microbatch.get((message.target, kind, microbatch), [])
        if self._graph is not None:
            readers = self._graph.consumers(kind, v, Mode.TRAIN)
            candidates = [span for span in candidates if (kind, span.task.virtual_stage) in readers]
        return next((span for span in candidates if span.end >= sender.end and span is not sender), None)

    def _microseconds(self, time: float) -> float:
        return round((time - self._origin) * 1e6, 3)


def _by_name(skipped: Iterable[Skip], graph: TaskGraph) -> dict[str, list[int]]:
    plain: dict[str, list[int]] = {}
    for microbatch, v in skipped:
        plain.setdefault(graph.names[v], []).append(microbatch)
    return plain


def _arrow_name(task: Task) -> str:
    return "activation" if SENT_TO.get(task.kind) is Side.AFTER else "gradient"
