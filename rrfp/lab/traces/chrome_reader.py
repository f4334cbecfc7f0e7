"""Reads the files of `rrfp.trace.chrome`: tasks, waits and messages of every step, to the nanosecond."""

import math
import os
import reprlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from rrfp.core.usage import Peaks
from rrfp.costs.table import checked_sizes
from rrfp.errors import ConfigError
from rrfp.model import plain_graph
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Task
from rrfp.plain import Reader, fields_of, flag, number, one_of, or_none, read_json, shown, text, value_error, whole
from rrfp.trace.breakdown import CAUSE_LABELS
from rrfp.trace.chrome import BYTES, CORE_WAITS, GRAPH, LAUNCHED, LIMITS, SIZES, SKIPPED, STEPS_THREAD
from rrfp.trace.job_data import JOB, TracedJob, read_limit
from rrfp.trace.spans import MessageSpan, Skip, StepTrace, TaskSpan, WaitSpan

T = TypeVar("T")

#: Readers of the numbers of a file, which the caller of `read_chrome` knows.
_whole, _number = partial(whole, error=value_error), partial(number, error=value_error)


def is_message(event: dict[str, Any]) -> bool:
    """Whether ``event`` begins an arrow with its message's times."""
    return event.get("ph") == "s" and event.get("cat") == "message" and "args" in event


def read_message(event: dict[str, Any]) -> tuple[int, MessageSpan]:
    """Step and message of an arrow's beginning, without its time of sending."""
    args = event["args"]
    if not isinstance(args, dict):
        raise ValueError(f"args is {shown(args)}, must be an object")
    source = _whole("tid", event.get("tid"), STEPS_THREAD + 1) - STEPS_THREAD - 1
    target, num_bytes = (_whole("args.to stage", args.get("to stage")), _whole("args.bytes", args.get("bytes")))
    step, task, arrived = _whole("args.step", args.get("step")), args.get("task"), args.get("arrived")
    if not isinstance(task, str):
        raise ValueError(f"args.task is {shown(task)}, must be a task such as F3@5")
    at = or_none(_number, "args.arrived", arrived)
    return step, MessageSpan(source, target, Task.parse(task), None, None if at is None else at / 1e6, num_bytes)


def read_clock_error(other_data: Any) -> float:
    """The most seconds by which one time may differ between ranks."""
    clocks = other_data.get("clocks", []) if isinstance(other_data, dict) else []
    if not isinstance(clocks, list):
        raise ValueError(f"otherData.clocks is {shown(clocks)}, must be a list")
    values = [clock.get("error_s") if isinstance(clock, dict) else None for clock in clocks]
    errors = [_number(f"otherData.clocks[{index}].error_s", value, 0) for index, value in enumerate(values)]
    return sum(sorted(errors)[-2:])  # of the two ranks that know their offsets least


def read_job(other_data: Any) -> TracedJob | None:
    """How the job ran, where the file says so."""
    plain = other_data.get(JOB) if isinstance(other_data, dict) else None
    if plain is not None and not isinstance(plain, dict):
        raise ValueError(f"otherData.{JOB} is {shown(plain)}, must be an object")
    return None if plain is None else TracedJob(**fields_of(plain, _JOB, error=_job_error))


def _job_error(field: str, reason: str) -> ValueError:
    return value_error(f"otherData.{JOB}.{field}", reason)


_NAME = partial(or_none, text)
_JOB: dict[str, Reader] = {
    "hint": _NAME,
    "limit": read_limit,
    "strict": _NAME,
    "order": partial(one_of, ("free", "natural")),
    "members": partial(whole, least=1),
    "coordination": partial(one_of, ("leader", "agreement")),
    "takes_offers": flag,
    "is_serial": flag,
}


_CAUSES = {f"wait: {label}": cause for cause, label in CAUSE_LABELS.items()}
#: A larger thread id is a mistake: reports have a row for each stage.
MOST_STAGES = 16_384


@dataclass(frozen=True, slots=True)
class TracedRun:
    """One pipeline run of a trace file."""

    name: str
    num_stages: int
    #: Its steps in order; times are seconds from the first one's start.
    steps: tuple[StepTrace, ...]
    #: The most seconds by which times of two ranks may be apart that were the same; 0 on one host.
    clock_error: float = 0.0
    #: Of its virtual stages, if they have names; None: a chain.
    graph: TaskGraph | None = None
    #: How it ran; None where the file does not say.
    job: TracedJob | None = None

    @property
    def stages(self) -> tuple[int, ...]:
        spans = (spans for step in self.steps for spans in (step.tasks, step.waits))
        return tuple(sorted({span.stage for some in spans for span in some}))


def read_chrome(path: str | os.PathLike[str]) -> list[TracedRun]:
    """The runs of a file, at least one."""
    document = read_json(path)
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list):
        raise ConfigError(f"{os.fspath(path)}: traceEvents is missing, must be the list of a trace written by rrfp")
    by_run: dict[Any, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for index, event in enumerate(events):
        if not isinstance(event, dict):
            raise ConfigError(f"{os.fspath(path)}: traceEvents[{index}] must be an object")
        if _is_ours(event):
            try:
                by_run[_read(whole, "pid", event)].append((index, event))
            except ValueError as error:
                raise ConfigError(f"{os.fspath(path)}: traceEvents[{index}]: {error}") from None
    try:
        other = document.get("otherData")
        clock_error, job = read_clock_error(other), read_job(other)
        runs = [replace(_Reader().read(pairs), clock_error=clock_error, job=job) for pairs in by_run.values()]
    except ValueError as error:
        raise ConfigError(f"{os.fspath(path)}: {error}") from None
    runs = [run for run in runs if run.steps and run.num_stages]
    if not runs:
        raise ConfigError(f"{os.fspath(path)}: holds no step of a pipeline, must be a trace written by rrfp")
    return runs


def read_run(path: str | os.PathLike[str], name: str | None) -> list[TracedRun]:
    """The run of a name, or the first one, ahead of the others of a file."""
    runs = read_chrome(path)
    chosen = next((run for run in runs if name in (None, run.name)), None)
    if chosen is None:
        raise ConfigError(f"run is {name!r}, must be one of: {', '.join(run.name for run in runs)}")
    return [chosen, *(run for run in runs if run is not chosen)]


def _is_ours(event: dict[str, Any]) -> bool:
    if event.get("ph") == "M":
        return event.get("name") == "process_name"
    return is_message(event) or (event.get("ph") == "X" and event.get("cat") in ("step", "computation", "wait"))


class _Reader:
    def __init__(self) -> None:
        self._name = "pipeline"
        self._steps: dict[int, tuple[float, float]] = {}
        self._tasks: dict[int, list[TaskSpan]] = defaultdict(list)
        self._waits: dict[int, list[WaitSpan]] = defaultdict(list)
        self._messages: dict[int, list[MessageSpan]] = defaultdict(list)
        self._peaks: dict[int, dict[int, Peaks]] = {}
        self._limits: dict[int, dict[int, int]] = {}
        self._sizes: dict[int, tuple[float, ...] | None] = {}
        self._core_waits: dict[int, dict[int, float]] = {}
        #: Step -> the first event of one of its stages.
        self._mentioned: dict[int, int] = {}
        self._graph: TaskGraph | None = None
        #: Step -> what its slice says of skipped virtual stages, and the number of its event.
        self._skipped: dict[int, tuple[Any, int]] = {}

    def read(self, events: Sequence[tuple[int, dict[str, Any]]]) -> TracedRun:
        for index, event in events:
            try:
                self._read_event(index, event)
            except ValueError as error:
                raise ConfigError(f"traceEvents[{index}]: {error}") from None
        for step, index in self._mentioned.items():
            if step not in self._steps:
                raise ConfigError(f"traceEvents[{index}]: args.step is {step}, and that step has no slice of its own")
        stages = {span.stage for spans in (self._tasks, self._waits) for step in spans.values() for span in step}
        count = 1 + max(stages, default=-1)
        if self._graph is not None:
            count = max(count, self._graph.placement.stages)
            self._check_placed(len(self._graph.stage_of))
        return TracedRun(self._name, count, tuple(self._trace(step) for step in self._steps), graph=self._graph)

    def _check_placed(self, count: int) -> None:
        for spans in self._tasks.values():
            for span in spans:
                if span.task.virtual_stage >= count:
                    raise ConfigError(f"{span.task} ran, must be on a virtual stage of the graph, 0..{count - 1}")

    def _read_event(self, index: int, event: dict[str, Any]) -> None:
        if is_message(event):
            step, message = read_message(event)
            self._messages[step].append(message)
            return
        args = event.get("args")
        if not isinstance(args, dict):
            raise ValueError(f"args is {shown(args)}, must be an object")
        if event["ph"] == "M":
            self._name = _read(text, "name", args, "args.")
            self._graph = _graph(args[GRAPH]) if GRAPH in args else None
            return
        step = _read(whole, "step", args, "args.")
        ts, dur = _read(number, "ts", event), _read(number, "dur", event, "", 0)
        # Rounded as the writer did, so that slices that touched still touch.
        start, end = ts / 1e6, max(ts, round(ts + dur, 3)) / 1e6
        if not math.isfinite(end):
            raise ValueError(f"ts + dur is {ts + dur}, must be finite")
        if event["cat"] == "step":
            self._read_step(step, start, end, args)
            self._skipped[step] = args.get(SKIPPED, {}), index
        else:
            self._mentioned.setdefault(step, index)
            self._read_slice(step, start, end, event)

    def _read_step(self, step: int, start: float, end: float, args: dict[str, Any]) -> None:
        if step in self._steps:
            raise ValueError(f"args.step is {step}, which the run has twice")
        self._steps[step] = (start, end)
        self._peaks[step] = _by_stage("peaks", args.get("peaks", {}), _peaks_of, "numbers from 0 on by name,")
        self._sizes[step] = _sizes(args[SIZES]) if SIZES in args else None
        slots = partial(_whole, LIMITS, least=1)
        self._limits[step] = _by_stage(LIMITS, args.get(LIMITS, {}), lambda n: slots(int(n)), "numbers from 1 on")
        self._core_waits[step] = _core_waits(args.get(CORE_WAITS, {}))

    def _read_slice(self, step: int, start: float, end: float, event: dict[str, Any]) -> None:
        tid, name = _read(whole, "tid", event), _read(text, "name", event)
        stage = tid - STEPS_THREAD - 1
        if not 0 <= stage < MOST_STAGES:
            raise ValueError(f"tid is {tid}, must be 1 to {MOST_STAGES} for a stage")
        if event["cat"] == "computation":
            args = event["args"]
            launched = _number(f"args.{LAUNCHED}", args[LAUNCHED]) / 1e6 if LAUNCHED in args else None
            num_bytes = _whole(f"args.{BYTES}", args.get(BYTES, 0))
            task = Task.parse(name.partition(" ")[0])
            self._tasks[step].append(TaskSpan(stage, task, start, end, launched, num_bytes))
        else:
            cause = _CAUSES[one_of(_CAUSES, "name", name, error=value_error)]
            self._waits[step].append(WaitSpan(stage, cause, start, end))

    def _trace(self, step: int) -> StepTrace:
        start, end = self._steps[step]
        tasks, waits = _by_start(self._tasks[step]), _by_start(self._waits[step])
        plain, index = self._skipped[step]
        try:
            skipped = _skipped(plain, self._graph)
        except ValueError as error:
            raise ConfigError(f"traceEvents[{index}]: {error}") from None
        messages = tuple(self._messages[step])
        stage_data: Any = {
            "peaks": self._peaks[step],
            "core_waits": self._core_waits[step],
            "limits": self._limits[step],
        }
        return StepTrace(
            step, start, end, tasks, waits, messages, skipped=skipped, sizes=self._sizes[step], **stage_data
        )


def _read(reader: Reader, name: str, data: dict[str, Any], prefix: str = "", *span: float) -> Any:
    if name not in data:
        raise ValueError(f"{prefix}{name} is missing")
    return reader(f"{prefix}{name}", data[name], *span, error=value_error)


def _by_stage(field: str, by_stage: Any, read: Callable[[Any], T], wanted: str) -> dict[int, T]:
    """What ``read`` makes of each stage's value; it raises ValueError for a wrong one."""
    try:
        found = {int(stage): read(value) for stage, value in by_stage.items()}
        if min(found, default=0) < 0:
            raise ValueError
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise ValueError(f"args.{field} is {shown(by_stage)}, must be {wanted} by stage") from None
    return found


def _peaks_of(by_name: Any) -> Peaks:
    return Peaks(**{name: _whole(name, int(value)) for name, value in by_name.items()})


def _graph(plain: Any) -> TaskGraph:
    """Backward counts as whole."""
    fields = plain_graph.PLAIN_FIELDS
    if not isinstance(plain, dict) or not plain.keys() >= set(fields):
        raise ValueError(f"args.{GRAPH} is {reprlib.repr(plain)}, must be an object with {', '.join(fields)}")
    return plain_graph.graph_from_plain(plain)


def _skipped(plain: Any, graph: TaskGraph | None) -> tuple[Skip, ...]:
    numbers = {} if graph is None else {name: v for v, name in enumerate(graph.names)}
    if not isinstance(plain, Mapping) or not plain.keys() <= numbers.keys():
        raise ValueError(
            f"args.{SKIPPED} is {reprlib.repr(plain)}, must be lists of microbatches by virtual stage: "
            f"{', '.join(numbers) or 'none, as the run has no graph'}"
        )
    skips = []
    for name, microbatches in plain.items():
        field = f"args.{SKIPPED}.{name}"
        if not isinstance(microbatches, list):
            raise value_error(field, f"is {reprlib.repr(microbatches)}, must be a list of microbatches")
        skips += [(_whole(field, microbatch), numbers[name]) for microbatch in microbatches]
    return tuple(sorted(skips))


def _core_waits(by_stage: Any) -> dict[int, float]:
    field = f"args.{CORE_WAITS}"
    if not isinstance(by_stage, dict) or not all(stage.isascii() and stage.isdigit() for stage in by_stage):
        raise ValueError(f"{field} is {shown(by_stage)}, must be seconds by stage")
    return {int(stage): _number(field, seconds, 0) for stage, seconds in by_stage.items()}


def _sizes(value: Any) -> tuple[float, ...]:
    """Their number is checked with the whole step."""
    if not isinstance(value, list):
        raise ValueError(f"args.{SIZES} is {shown(value)}, must be a list of numbers, one a microbatch")
    try:
        return checked_sizes(value, len(value))
    except ConfigError as error:
        raise ValueError(f"args.{error}") from None


def _by_start(spans: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(sorted(spans, key=lambda span: (span.start, span.stage)))
