"""Recorded steps as the engine runs them again: what tasks and messages took, and the gaps between them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np

from rrfp.core.usage import WaitCause
from rrfp.costs.table import CostTable, Matrix
from rrfp.errors import ConfigError
from rrfp.lab.traces.chrome_reader import TracedRun
from rrfp.lab.traces.measured_costs import TracedStep, is_training, named_step, table_of
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import KINDS, F, Kind, Task
from rrfp.schedules.executed import ExecutedSchedule
from rrfp.trace.breakdown import breakdown, idle_waits, mean
from rrfp.trace.spans import StepTrace, TaskSpan, WaitSpan

#: Fewer steps give no interval that means anything.
LEAST_STEPS = 5

#: The most that a stage's thread may have waited for a core, as a part of the time of its tasks.
MOST_CORE_WAIT = 0.1

#: Rows by kind, V x M, as the durations of a cost table.
Rows = Mapping[Kind, Matrix]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedStep:
    """One step, in seconds."""

    costs: CostTable
    #: How long each task could have run and had not begun.
    dispatch: Rows
    #: The same while its group's order did not have it.
    order: Rows
    #: By the first task of each stage, how late it began, beside `dispatch`: ranks call ``step`` at different times.
    opening: Mapping[Task, float]
    #: From the end of the last task to that of the step.
    closing: float
    #: What it took.
    seconds: float

    def table(self) -> CostTable:
        """The costs, with every gap as a part of the task behind it."""
        rows = {kind: own + self.dispatch[kind] + self.order[kind] for kind, own in self.costs.durations.items()}
        for (kind, m, v), late in self.opening.items():
            rows[kind][v, m] += late
        return with_durations(self.costs, rows)


def with_durations(costs: CostTable, rows: Rows) -> CostTable:
    changed: Mapping[str, Any] = {KINDS[kind].name: own for kind, own in rows.items()}
    return replace(costs, **changed)


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """The steps of a run that count."""

    run: TracedRun
    traces: tuple[StepTrace, ...]
    steps: tuple[RecordedStep, ...]
    #: The order in which each ran.
    executed: tuple[ExecutedSchedule, ...]
    #: The others, one line a reason.
    left_out: tuple[str, ...]
    #: Messages of all steps between stages, and those whose time is not recorded.
    messages: int
    filled: int

    @property
    def costs(self) -> CostTable:
        """Of the first step; all have its shape."""
        return self.steps[0].costs

    def waited(self, cause: WaitCause) -> list[float]:
        """For each stage, the part of the steps for which it waited because of ``cause``, 0..1."""
        parts = [mean(breakdown(trace, stage) for trace in self.traces) for stage in range(self.costs.stages)]
        return [part.share(part.by_cause[cause]) for part in parts]

    def peak_held(self) -> int:
        """The most chunk tasks that a stage held."""
        return max((peaks.held for trace in self.traces for peaks in trace.peaks.values()), default=0)

    def core_wait(self) -> float | None:
        """The largest part of its tasks' time for which a stage waited for a core; None where not recorded."""
        parts = [
            waited / seconds
            for trace in self.traces
            for stage, waited in trace.core_waits.items()
            if (seconds := sum(span.end - span.start for span in trace.tasks if span.stage == stage))
        ]
        by_stage = np.array(parts).reshape(len(self.traces), -1) if parts else None
        return None if by_stage is None else float(np.median(by_stage, axis=0).max())


def read_recording(name: str, run: TracedRun, *, skip_first: int, most: int) -> Recorded:
    """The newest training steps of a run, ``most`` at most.

    Steps of another number of microbatches than most are left out; too few steps are a ConfigError.
    """
    training = [trace for trace in run.steps if is_training(trace)]
    left_out = Counter({"evaluation(s)": len(run.steps) - len(training), "at the beginning": skip_first})
    left_out["at the beginning"] = min(skip_first, len(training))
    pairs = [(trace, named_step(name, run, trace)) for trace in training[skip_first:]]
    [(microbatches, _)] = Counter(step.microbatches for _, step in pairs).most_common(1) or [(0, 0)]
    left_out[f"not of {microbatches} microbatches"] = sum(step.microbatches != microbatches for _, step in pairs)
    pairs = [(trace, step) for trace, step in pairs if step.microbatches == microbatches]
    left_out["older"] = max(0, len(pairs) - most)
    pairs = pairs[-most:]
    reasons = tuple(f"{count} {reason}" for reason, count in left_out.items() if count)
    if len(pairs) < LEAST_STEPS:
        beside = f" beside those left out ({', '.join(reasons)})" if reasons else ""
        raise ConfigError(
            f"{name} has {len(pairs)} training step(s) to replay{beside}, must have at least {LEAST_STEPS}: train "
            "more before save_trace, which has the newest 16 steps (the option trace_steps)"
        )
    for trace, step in pairs:
        if step.shape != pairs[-1][1].shape:
            raise ConfigError(f"{name}: step {trace.step} has {step.shape}, step {pairs[-1][0].step} another shape")
    steps, messages, filled = [], 0, 0
    for trace, step in pairs:
        table, measured, absent = _table(name, step)
        messages, filled = messages + measured + absent, filled + absent
        steps.append(_recorded(trace, step, table))
    traces = tuple(trace for trace, _ in pairs)
    executed = tuple(_executed(name, step, table.costs) for (_, step), table in zip(pairs, steps, strict=True))
    return Recorded(run, traces, tuple(steps), executed, reasons, messages, filled)


def _table(name: str, step: TracedStep) -> tuple[CostTable, int, int]:
    crosses = any(len({step.tasks[task].stage for task in pair}) > 1 for pair in _pairs(step))
    if crosses and not step.latencies:
        raise ConfigError(f"{name}, step {step.number}: no time of a message is recorded, must be some")
    return table_of([step]) if step.latencies or crosses else table_of([step], latency="none")


def _pairs(step: TracedStep) -> Iterator[tuple[Task, Task]]:
    graph = step.shape.to_graph()
    for task in step.tasks:
        yield from ((producer, task) for producer in graph.inputs(task) if producer in step.tasks)


def check_cores(name: str, recording: Recorded) -> None:
    """Refuse tasks that shared cores: they take longer while others run."""
    job = recording.run.job
    if job is not None and job.is_serial:
        raise ConfigError(
            f"{name}: all stages ran in one process, whose tasks run one at a time on a CPU: must be a trace of one "
            "process a stage"
        )
    if (part := recording.core_wait()) is not None and part > MOST_CORE_WAIT:
        raise ConfigError(
            f"{name}: tasks shared cores: a stage's thread waited for one for {part:.0%} of the time of its tasks, "
            f"must be at most {MOST_CORE_WAIT:.0%}: run no more ranks than the host has idle cores, with "
            "OMP_NUM_THREADS=1; rrfp trace says where the time went all the same"
        )


def _executed(name: str, step: TracedStep, costs: CostTable) -> ExecutedSchedule:
    spans = sorted(step.tasks.values(), key=lambda span: (span.start, span.end))
    orders = [tuple(span.task for span in spans if span.stage == stage) for stage in range(costs.stages)]
    return ExecutedSchedule(f"{name}, step {step.number}", costs.to_graph(), step.visits, tuple(orders))


# The gaps in front of tasks.

#: What keeps a ready task of a kind from its lane by right: the engine makes such waits itself.
_BY_RIGHT = {kind: WaitCause.MEMORY if kind is F else WaitCause.CHOICE for kind in Kind}


def _recorded(trace: StepTrace, step: TracedStep, costs: CostTable) -> RecordedStep:
    graph = costs.to_graph()
    dispatch = {kind: np.zeros_like(rows) for kind, rows in costs.durations.items()}
    order = {kind: np.zeros_like(rows) for kind, rows in costs.durations.items()}
    opening = {}
    for stage in range(costs.stages):
        spans = sorted((s for s in step.tasks.values() if s.stage == stage), key=lambda span: (span.start, span.end))
        gaps = list(_gaps(trace, step, graph, stage, spans))
        known = [seconds for seconds, _ in gaps[1:] if seconds is not None]
        usual = float(np.median(known)) if known else 0.0
        for span, (seconds, ordered) in zip(spans, gaps, strict=True):
            kind, m, v = span.task
            order[kind][v, m] = ordered
            dispatch[kind][v, m] = usual if seconds is None else seconds
        if spans:
            kind, m, v = first = spans[0].task
            late = dispatch[kind][v, m]
            dispatch[kind][v, m] = min(late, usual)
            opening[first] = late - dispatch[kind][v, m]
    closing = trace.end - max(span.end for span in step.tasks.values())
    return RecordedStep(costs, dispatch, order, opening, max(0.0, closing), step.seconds)


def _gaps(
    trace: StepTrace, step: TracedStep, graph: TaskGraph, stage: int, spans: Sequence[TaskSpan]
) -> Iterator[tuple[float | None, float]]:
    """Before each task, seconds of dispatch, None where another wait hides them; and of the group's order."""
    causes = (WaitCause.ORDER, *_BY_RIGHT.values())
    waits = deque(wait for wait in idle_waits(trace, stage) if wait.cause in causes)
    free = trace.start
    for span in spans:
        ready, is_known = free, True
        for producer in graph.inputs(span.task):
            if (made := step.tasks.get(producer)) is None:  # on a virtual stage that is skipped
                continue
            latency = 0.0 if made.stage == stage else step.latencies.get((producer, stage))
            is_known &= latency is not None
            ready = max(ready, made.end + (latency or 0.0))
        while waits and waits[0].end <= free:
            waits.popleft()
        near = [*takewhile(lambda wait, start=span.start: wait.start < start, waits)]  # type: ignore[misc]
        ordered = _within(near, WaitCause.ORDER, ready, span.start)
        is_known &= not _within(near, _BY_RIGHT[span.task.kind], ready, span.start)
        yield (max(0.0, span.start - ready - ordered) if is_known else None), ordered
        free = max(free, span.end)


def _within(waits: Sequence[WaitSpan], cause: WaitCause, start: float, end: float) -> float:
    spans = ((max(wait.start, start), min(wait.end, end)) for wait in waits if wait.cause is cause)
    return sum(high - low for low, high in spans if high > low)
