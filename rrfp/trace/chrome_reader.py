"""Reads the files of `rrfp.trace.chrome`: tasks, waits and messages of every step, to the nanosecond."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rrfp.core.tasks import Task
from rrfp.core.usage import Peaks, WaitCause
from rrfp.errors import ConfigError
from rrfp.trace.breakdown import CAUSE_LABELS
from rrfp.trace.chrome import STEPS_THREAD
from rrfp.trace.chrome_messages import is_message, read_clock_error, read_message
from rrfp.trace.spans import MessageSpan, StagePeaks, StepTrace, TaskSpan, WaitSpan

_CAUSES = {f"wait: {label}": cause for cause, label in CAUSE_LABELS.items()}


@dataclass(frozen=True, slots=True)
class TracedRun:
    """One pipeline run of a trace file.

    Attributes:
        name: as the writer named it.
        num_stages: its stages.
        steps: its steps in order; times are seconds from the first one's start.
        clock_error: the most seconds by which times of two ranks may be apart that were the same; 0 on one host.
    """

    name: str
    num_stages: int
    steps: tuple[StepTrace, ...]
    clock_error: float = 0.0


def read_chrome(path: str | os.PathLike[str]) -> list[TracedRun]:
    """The runs of a file, at least one.

    Raises:
        ConfigError: if it cannot be read, or was not written by `rrfp.trace.chrome`; one line naming the file.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{os.fspath(path)}: cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{os.fspath(path)}: is not JSON ({error})") from None
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list):
        raise ConfigError(f"{os.fspath(path)}: traceEvents is missing, must be the list of a trace written by rrfp")
    by_run: dict[Any, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for index, event in enumerate(events):
        if not isinstance(event, dict):
            raise ConfigError(f"{os.fspath(path)}: traceEvents[{index}] must be an object")
        if isinstance(event.get("pid"), int):
            by_run[event["pid"]].append((index, event))
    try:
        clock_error = read_clock_error(document.get("otherData"))
        runs = [replace(_Reader().read(pairs), clock_error=clock_error) for pairs in by_run.values()]
    except ValueError as error:
        raise ConfigError(f"{os.fspath(path)}: {error}") from None
    runs = [run for run in runs if run.steps and run.num_stages]
    if not runs:
        raise ConfigError(f"{os.fspath(path)}: holds no step of a pipeline, must be a trace written by rrfp")
    return runs


class _Reader:
    """Collects the events of one run."""

    def __init__(self) -> None:
        self._name = "pipeline"
        self._steps: dict[int, tuple[float, float]] = {}
        self._tasks: dict[int, list[TaskSpan]] = defaultdict(list)
        self._waits: dict[int, list[WaitSpan]] = defaultdict(list)
        self._messages: dict[int, list[MessageSpan]] = defaultdict(list)
        self._peaks: dict[int, tuple[StagePeaks, ...]] = {}

    def read(self, events: Sequence[tuple[int, dict[str, Any]]]) -> TracedRun:
        for index, event in events:
            try:
                self._read_event(event)
            except (KeyError, TypeError, ValueError) as error:
                reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
                raise ConfigError(f"traceEvents[{index}]: {reason}") from None
        stages = {span.stage for spans in (self._tasks, self._waits) for step in spans.values() for span in step}
        return TracedRun(self._name, 1 + max(stages, default=-1), tuple(self._trace(step) for step in self._steps))

    def _read_event(self, event: dict[str, Any]) -> None:
        if event.get("ph") == "M" and event.get("name") == "process_name":
            self._name = str(event["args"]["name"])
        elif is_message(event):
            step, message = read_message(event)
            self._messages[step].append(message)
        elif event.get("ph") == "X" and event.get("cat") in ("step", "computation", "wait"):
            step, stage = int(event["args"]["step"]), int(event["tid"]) - STEPS_THREAD - 1
            # Rounded as the writer did, so that slices that touched still touch.
            start, end = event["ts"] / 1e6, round(event["ts"] + event["dur"], 3) / 1e6
            if not math.isfinite(start) or not math.isfinite(end):
                raise ValueError(f"ts and dur are {event['ts']} and {event['dur']}, must be finite")
            if event["cat"] == "step":
                self._steps[step] = (start, end)
                self._peaks[step] = _peaks(event["args"].get("peaks", {}))
            elif stage < 0:
                raise ValueError(f"tid is {event['tid']}, must be 1 or more for a stage")
            elif event["cat"] == "computation":
                self._tasks[step].append(TaskSpan(stage, Task.parse(event["name"]), start, end))
            else:
                self._waits[step].append(WaitSpan(stage, _cause(event["name"]), start, end))

    def _trace(self, step: int) -> StepTrace:
        start, end = self._steps[step]
        tasks, waits = _by_start(self._tasks[step]), _by_start(self._waits[step])
        return StepTrace(step, start, end, tasks, waits, tuple(self._messages[step]), peaks=self._peaks[step])


def _cause(name: str) -> WaitCause:
    if name not in _CAUSES:
        raise ValueError(f"name is {name!r}, must be one of: {', '.join(_CAUSES)}")
    return _CAUSES[name]


def _peaks(by_stage: Any) -> tuple[StagePeaks, ...]:
    try:
        return tuple(
            StagePeaks(int(stage), Peaks(**{name: int(value) for name, value in peaks.items()}))
            for stage, peaks in by_stage.items()
        )
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"peaks are {by_stage!r}, must be numbers by name, by stage") from None


def _by_start(spans: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(sorted(spans, key=lambda span: (span.start, span.stage)))
