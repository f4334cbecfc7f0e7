"""What the page of a report shows of a run, as plain data: columns of whole numbers, times in ticks of 100 ns.

Spans of a stage are by start. A start counts from the end of the span before it (the first one's from the start of the
step), which makes most of them small, so that the data packs well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rrfp.errors import ConfigError
from rrfp.lab.advice.advice import Wishes, advise_file
from rrfp.lab.advice.replays import Method
from rrfp.lab.traces.chrome_reader import TracedRun, read_run
from rrfp.lab.traces.measured_costs import WARM_UP_STEPS, is_training
from rrfp.lab.traces.pictures import IDLE_LOOKS, css
from rrfp.lab.traces.timeline import part_of, virtual_stages
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import KINDS, Kind, Task
from rrfp.trace.breakdown import CAUSE_LABELS, breakdown, idle_waits
from rrfp.trace.held import held_levels
from rrfp.trace.job_data import TracedJob
from rrfp.trace.spans import StepTrace, TaskSpan

#: Ticks of a second.
TICKS = 10_000_000

#: The most tasks and waits of a run that a page shows; the newest step is shown however many it has.
MOST_SPANS = 600_000

#: The most tasks, of all steps together, that are replayed for advice: some ten seconds.
MOST_REPLAYED = 20_000

_KINDS, _CAUSES = list(KINDS), list(IDLE_LOOKS)

Plain = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What of a file is shown."""

    #: The run's name; None: the first.
    run: str | None = None
    #: The most steps, the newest.
    steps: int = 10
    #: Whether steps are replayed for advice; None: unless it takes long.
    advice: bool | None = None


EVERYTHING = ReportOptions()


def report_data(
    paths: Sequence[str], options: ReportOptions = EVERYTHING, replayed: Callable[[], object] = lambda: None
) -> Plain:
    return {"ticks": TICKS, **_looks(), "runs": [_run(path, options, replayed) for path in paths]}


def _looks() -> Plain:
    """Names and colours, as pictures have them."""
    return {
        "kinds": [{"name": kind.value, "label": row.label, "colour": row.colour} for kind, row in KINDS.items()],
        "causes": [
            {"label": CAUSE_LABELS[cause], "face": css(look.face), "ink": css(look.ink), "hatch": cause.value}
            for cause, look in IDLE_LOOKS.items()
        ],
    }


def _run(path: str, options: ReportOptions, replayed: Callable[[], object]) -> Plain:
    run, *others = read_run(path, options.run)
    steps = _shown(run, options.steps)
    stages, names = run.stages, () if run.graph is None else run.graph.names
    shades, parts = _shades(steps, names)
    return {
        "file": path,
        "name": run.name,
        "others": [other.name for other in others],
        "method": None if run.job is None else str(Method(run.job.hint, run.job.limit, run.job.strict)),
        "limit": _limit_text(run.job),
        "stages": stages,
        "slots": _slots(run),
        "names": names,
        "parts": parts,
        "shades": shades,
        "inputs": _inputs(run, steps),
        "recorded": len(run.steps),
        "steps": [_step(trace, stages) for trace in steps],
        "advice": _advice(path, run, options, replayed),
    }


def _shown(run: TracedRun, most: int) -> list[StepTrace]:
    """The newest steps, as many as a page holds."""
    shown: list[StepTrace] = []
    spans = 0
    for trace in reversed(run.steps):
        spans += len(trace.tasks) + len(trace.waits)
        if shown and (len(shown) == most or spans > MOST_SPANS):
            break
        shown.insert(0, trace)
    return shown


def _shades(steps: Sequence[StepTrace], names: Sequence[str]) -> tuple[list[int], list[str]]:
    """By virtual stage the shade of its tasks, its chunk or part; and the names of the parts."""
    held = virtual_stages(steps)
    parts = list(dict.fromkeys(map(part_of, names)))
    shades = [parts.index(part_of(name)) for name in names]
    if not parts:
        shades = [0] * (1 + max((v for own in held.values() for v in own), default=-1))
        for own in held.values():
            for chunk, v in enumerate(own):
                shades[v] = chunk
    return shades, parts


def _inputs(run: TracedRun, steps: Sequence[StepTrace]) -> list[list[list[tuple[int, int]]]]:
    """By kind and virtual stage: kind and virtual stage of what a task reads."""
    graph, ran = run.graph, {(span.task.kind, span.task.virtual_stage) for trace in steps for span in trace.tasks}
    if graph is None:
        graph = TaskGraph.chain(1 + max(v for _, v in ran)) if ran else TaskGraph.chain(1)
    virtual_stages = range(len(graph.stage_of))
    graph = replace(graph, split=tuple((Kind.W, v) in ran for v in virtual_stages))
    return [
        [
            [(_KINDS.index(read.kind), read.virtual_stage) for read in graph.inputs(Task(kind, 0, v))]
            for v in virtual_stages
        ]
        for kind in _KINDS
    ]


def _slots(run: TracedRun) -> list[int | None]:
    """By recorded stage the chunk tasks that the job's limit lets it hold; None: any number, or not known."""
    job = run.job
    if job is None or job.limit is None:
        return [None] * len(run.stages)
    chunks = virtual_stages(run.steps[-1:])
    slots: list[int | None] = []
    for stage in run.stages:
        distance = None if run.graph is None else run.graph.distance_to_sink(stage)
        most = Limit.resolve(job.limit, stage, run.num_stages, distance=distance).microbatches
        slots.append(None if most is None else most * max(1, len(chunks.get(stage, ()))))
    return slots


def _limit_text(job: TracedJob | None) -> str:
    """Why a stage has no number of slots, where it has none."""
    if job is None:
        return "the trace does not say which limit the job had"
    if job.strict is not None:
        return "a fixed order holds what it holds: no limit"
    return "the limit is on bytes" if getattr(job.limit, "bytes", None) or str(job.limit).endswith("B") else ""


def _step(trace: StepTrace, stages: Sequence[int]) -> Plain:
    by_stage = _by_stage(trace)
    own = [by_stage.get(stage) or replace(trace, tasks=(), waits=(), messages=()) for stage in stages]
    slots = trace.limits
    return {
        "number": trace.step,
        "training": is_training(trace),
        "start": _ticks(trace.start),
        "end": _ticks(trace.end),
        "sizes": trace.sizes,
        "slots": [slots.get(stage) for stage in stages] if slots else None,
        "stages": [_stage(each, stage) for each, stage in zip(own, stages, strict=True)],
        "messages": _messages(trace),
    }


def _by_stage(trace: StepTrace) -> Mapping[int, StepTrace]:
    """The step of each stage alone: what looks for a stage's spans then finds few others."""
    tasks, waits = defaultdict(list), defaultdict(list)
    for span in trace.tasks:
        tasks[span.stage].append(span)
    for wait in trace.waits:
        waits[wait.stage].append(wait)
    return {
        stage: replace(trace, tasks=tuple(tasks[stage]), waits=tuple(waits[stage]), messages=())
        for stage in {*tasks, *waits}
    }


def _stage(trace: StepTrace, stage: int) -> Plain:
    tasks: list[TaskSpan] = sorted(trace.tasks, key=lambda span: (span.start, span.end))
    waits, levels, part = idle_waits(trace, stage), held_levels(trace, stage), breakdown(trace, stage)
    gaps, lengths = _columns(trace.start, ((span.start, span.end) for span in tasks))
    wait_gaps, wait_lengths = _columns(trace.start, ((wait.start, wait.end) for wait in waits))
    level_gaps, _ = _columns(trace.start, ((level.time, level.time) for level in levels))
    return {
        "kind": "".join(str(_KINDS.index(span.task.kind)) for span in tasks),
        "microbatch": [span.task.microbatch for span in tasks],
        "virtual": [span.task.virtual_stage for span in tasks],
        "gap": gaps,
        "length": lengths,
        "bytes": [span.num_bytes for span in tasks] if any(span.num_bytes for span in tasks) else None,
        "cause": "".join(str(_CAUSES.index(wait.cause)) for wait in waits),
        "waitGap": wait_gaps,
        "waitLength": wait_lengths,
        "levelGap": level_gaps,
        "held": [level.held for level in levels],
        "parts": [_ticks(seconds) for seconds in (part.compute, *(part.by_cause[c] for c in _CAUSES), part.other)],
    }


def _columns(start: float, spans: Iterable[tuple[float, float]]) -> tuple[list[int], list[int]]:
    """Gaps before spans, and their lengths."""
    gaps, lengths, before = [], [], _ticks(start)
    for low, high in spans:
        first, last = _ticks(low), _ticks(high)
        gaps.append(first - before)
        lengths.append(last - first)
        before = last
    return gaps, lengths


def _ticks(seconds: float) -> int:
    return round(seconds * TICKS)


def _messages(trace: StepTrace) -> list[Plain]:
    """By edge, the time from the end of the task that made each message to its arrival."""
    ends = {span.task: span.end for span in trace.tasks}
    edges: dict[tuple[int, int], list[tuple[Task, int]]] = defaultdict(list)
    for message in trace.messages:
        end = ends.get(message.task)
        if end is not None and message.arrived is not None:
            # Clocks of two hosts may differ by a little.
            latency = max(0, _ticks(message.arrived) - _ticks(end))
            edges[message.source, message.target].append((message.task, latency))
    return [
        {
            "edge": edge,
            "kind": "".join(str(_KINDS.index(task.kind)) for task, _ in sent),
            "microbatch": [task.microbatch for task, _ in sent],
            "virtual": [task.virtual_stage for task, _ in sent],
            "latency": [latency for _, latency in sent],
        }
        for edge, sent in sorted(edges.items())
    ]


def _advice(path: str, run: TracedRun, options: ReportOptions, replayed: Callable[[], object]) -> Plain:
    training = [trace for trace in run.steps[WARM_UP_STEPS:] if is_training(trace)][-10:]
    tasks = sum(len(trace.tasks) for trace in training)
    command = f"rrfp advise {path}" + (f" --run '{run.name}'" if options.run is not None else "")
    if options.advice is False:
        return {"refusal": f"Not asked for (--no-advice). To ask: {command}"}
    if options.advice is None and tasks > MOST_REPLAYED:
        return {"refusal": f"Left out, as it would replay {tasks} tasks dozens of times (--advice). To ask: {command}"}
    try:
        advice = advise_file(path, Wishes(run=run.name), replayed, title=f"{path}: {run.name}")
    except ConfigError as error:
        return {"refusal": str(error)}
    return {**advice.to_json(), "text": str(advice)}
