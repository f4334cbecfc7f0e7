"""Readers of files: of costs, sizes, schedules, traces and event logs, and of a pipeline's state in a checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from fuzz.mutations import JSON, to_json
from fuzz.targets import Decode, Target, plain

from rrfp.core.event_history import EventHistory
from rrfp.core.stage_core import StageCore
from rrfp.core.usage import Peaks, WaitCause
from rrfp.costs import make_costs, read_costs
from rrfp.costs import to_json as to_json_text
from rrfp.errors import ConfigError
from rrfp.hints.registry import create_hint
from rrfp.lab.cluster.random_run import RandomRun
from rrfp.lab.commands.trace import RunReport
from rrfp.lab.generators.multimodal import multimodal_costs
from rrfp.lab.simulation import read_sizes
from rrfp.lab.sweep.experiment import named_or_read_schedule
from rrfp.lab.traces.chrome_reader import read_chrome
from rrfp.lab.traces.measured_costs import measured_costs
from rrfp.memory.admission import Limit
from rrfp.memory.measured import Largest, Measured, Spent
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Mode, Task
from rrfp.model.topology import Topology
from rrfp.pipeline.state import VERSION, PipelineState
from rrfp.runtime import records
from rrfp.schedules.csv import CsvSchedule, to_csv
from rrfp.schedules.registry import make_schedule
from rrfp.trace.chrome import ChromeRun, write_runs
from rrfp.trace.event_log import read_event_log, write_event_log
from rrfp.trace.spans import MessageSpan, StepTrace, TaskSpan, WaitSpan

#: A file that is read a thousand times a second belongs into memory.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

M = 3


def in_a_file(read: Callable[[Path], object], name: str) -> Callable[[], AbstractContextManager[Decode]]:
    """The ``open`` of a decoder that reads a file; its error is one line, not too long for a terminal."""

    @contextmanager
    def open_() -> Iterator[Decode]:
        with TemporaryDirectory(dir=MEMORY) as folder:
            path = Path(folder) / name

            def decode(case: bytes) -> object:
                path.write_bytes(case)
                return read(path)

            yield decode

    return open_


# Costs and sizes.


@cache
def _cost_files() -> list[Any]:
    tables = [make_costs(profile, 2, M, chunks=chunks) for profile in ("llm", "mllm") for chunks in (1, 2)]
    tables += [replace(tables[0], sizes=(1.0, 0.0, 2.5)), replace(multimodal_costs("branch", 2, M), sizes=(3, 2, 1))]
    return [json.loads(to_json_text(each)) for table in tables for each in (table, table.to_unsplit())]


def _costs(random: Random) -> Any:
    return random.choice(_cost_files())


def _sizes(random: Random) -> Any:
    return [random.choice((0, 1, 2.5, 1e9)) for _ in range(M)]


def _read_sizes(path: Path) -> object:
    return read_sizes(path, M)


# Schedules.

_GRAPHS = (TaskGraph.chain(2), TaskGraph.chain(2, split=True), TaskGraph.chain(2, chunks=2))
_NAMES = ("1f1b", "zb-h1", "interleaved-1f1b")
_TEXTS = [to_csv(make_schedule(name, graph, 4), graph) for name, graph in zip(_NAMES, _GRAPHS, strict=True)]


def _rows(random: Random) -> Any:
    return [line.split(",") for line in random.choice(_TEXTS).splitlines()]


def _as_csv(tree: Any) -> bytes:
    if type(tree) is not list:
        return str(tree).encode(errors="replace")
    rows = [",".join(map(str, row)) if type(row) is list else str(row) for row in tree]
    return "\n".join(rows).encode(errors="surrogatepass")


def _read_schedule(path: Path) -> object:
    schedule = named_or_read_schedule(str(path))
    assert isinstance(schedule, CsvSchedule)
    refused = list[ConfigError]()
    for graph in _GRAPHS:
        try:
            return schedule.for_graph(graph, 4)
        except ConfigError as error:
            refused.append(error)
    raise refused[0]


# Traces.


def _steps(random: Random) -> list[StepTrace]:
    def span(stage: int, kind: Kind, m: int, start: float) -> TaskSpan:
        return TaskSpan(stage, Task(kind, m, stage), start, start + 0.5, random.choice((None, start)))

    steps = []
    for number in range(random.randint(1, 3)):
        at = 10.0 * number
        tasks = tuple(
            span(stage, kind, 0, at + stage + 3 * (kind is Kind.B)) for stage in (0, 1) for kind in (Kind.F, Kind.B)
        )
        waits = (WaitSpan(1, random.choice(list(WaitCause)), at, at + 1),)
        messages = (
            MessageSpan(0, 1, Task(Kind.F, 0, 0), at + 0.5, at + 0.75, 64),
            MessageSpan(1, 0, Task(Kind.B, 0, 1), at + 4.5, at + 4.75, 64),
        )
        peaks = {0: Peaks(1, 2, 3, 4), 1: Peaks(1, 2, 3, 4)}
        sizes = random.choice((None, (2.5,)))
        steps.append(StepTrace(number, at, at + 5, tasks, waits, messages, peaks=peaks, sizes=sizes))
    return steps


def _a_trace(random: Random) -> Any:
    return random.choice(_trace_files())


@cache
def _trace_files() -> list[Any]:
    return [_trace_file(Random(seed)) for seed in range(8)]


def _trace_file(random: Random) -> Any:
    with TemporaryDirectory(dir=MEMORY) as folder:
        path = f"{folder}/trace.json"
        run = ChromeRun("pipeline", range(2), _steps(random), 0.0)
        clocks = [{"host": "a", "ranks": [0], "seconds": 0.0, "error_s": 1e-5}] * random.choice((0, 2))
        write_runs(path, [run], {"clocks": clocks})
        return json.loads(Path(path).read_text())


def _read_trace(path: Path) -> object:
    runs = read_chrome(path)
    reports = [RunReport.of(path, run) for run in runs]
    return reports, measured_costs([("trace", runs[0])], skip_first=0)


# Event logs: a tree is the list of the lines.


def _a_log(random: Random) -> Any:
    return random.choice(_logs())


@cache
def _logs() -> list[Any]:
    return [log for seed in range(4) for log in _logs_of(seed)]


def _logs_of(seed: int) -> Iterator[Any]:
    """Of all ranks of a pipeline that has run two steps."""
    cores: list[StageCore] = []

    def make_core(*arguments: Any, **keywords: Any) -> StageCore:
        cores.append(StageCore(*arguments, **keywords, history=EventHistory()))
        return cores[-1]

    graph, limit = TaskGraph.chain(2, split=seed % 2 == 0), Limit(2) if seed < 2 else Limit(bytes=30)
    hints, sizes = [create_hint("bfw") for _ in range(2)], lambda _: 9
    run = RandomRun(graph, hints, [limit] * 2, seed=seed, num_bytes=sizes, make_core=make_core)
    run.run([(Mode.TRAIN, 2), (Mode.TRAIN, 2)])
    with TemporaryDirectory(dir=MEMORY) as folder:
        for core in cores:
            path = write_event_log(folder, Topology(core.stage, 2), core, "the test ended")
            yield list(map(json.loads, path.read_text().splitlines()))


def _as_lines(tree: Any) -> bytes:
    return b"\n".join(map(to_json, tree)) if isinstance(tree, list) else to_json(tree)


# The state of a pipeline.


def _a_state(random: Random) -> Any:
    sizes = (Largest(3, 2, 0.5),) * random.choice((0, 2))
    measured = tuple(
        Measured(v, tuple(Spent(kind.value, 2, 0.5) for kind in Kind), sizes, sizes)
        for v in range(random.randint(0, 2))
    )
    numbers = (VERSION, 3, 7, "bf", "2n", None)
    return records.to_plain(PipelineState(*numbers, random.random() < 0.5, 2, 1, 0, measured))


def _read_state(case: bytes) -> object:
    """The state as a program has it that saved it as JSON."""
    try:
        plain: Any = json.loads(case)
    except (ValueError, RecursionError):
        plain = case
    return PipelineState.read(plain)


TARGETS: tuple[Target, ...] = (
    Target("costs", (ConfigError,), _costs, to_json, JSON, in_a_file(read_costs, "costs.json")),
    Target("sizes", (ConfigError,), _sizes, to_json, JSON, in_a_file(_read_sizes, "sizes.json")),
    Target("schedules", (ConfigError,), _rows, _as_csv, JSON, in_a_file(_read_schedule, "schedule.csv")),
    Target("traces", (ConfigError,), _a_trace, to_json, JSON, in_a_file(_read_trace, "trace.json")),
    Target("event logs", (ConfigError,), _a_log, _as_lines, JSON, in_a_file(read_event_log, "events.jsonl")),
    Target("states", (ConfigError,), _a_state, to_json, JSON, plain(_read_state)),
)
