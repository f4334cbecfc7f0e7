"""What it costs that the ranks of a group run the same tasks in the same order. Takes about two minutes.

    python benchmarks/tp/run.py [--tp 2,4,8] [--quick] [--json]

PP 2 x TP ranks under torchrun, over zmq, with a leader or by agreement. Tasks of 10 ms (7-13) begin with a real gloo
collective over the group and then sleep, as an accelerator leaves the CPU idle. Every rank sends its tensors up to 4 ms
late, by times of its own, so that ready sets differ. bf, limit 2n. Methods alternate by step and share the tables.

coordination: share of a step in which a task was ready on all ranks of a group and all its lanes idle; mean over groups
and steps. For a leader at depth 2 that is what its word is late although it is given one task ahead.
to start: from the moment when a task could run (the one before it has ended on all ranks, and it is ready on all) until
it has begun on all ranks.
messages: messages between the ranks of a group, a task of the group.
step: its time, relative to "leader, depth 2" in the same round; median.

With TP 8 sixteen processes share the machine's cores: what they cost each other is in the figures. `--quick` only shows
that everything runs: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.shared.figures import Aim, Spread, median_interval, table_of, us
from benchmarks.shared.load import OtherLoad
from benchmarks.shared.options import parsed, parser_of
from benchmarks.shared.workers import run_workers
from benchmarks.tp.oracle import GroupStep, measure
from benchmarks.tp.settings import METHODS, Settings
from rrfp.model.graph import TaskGraph
from rrfp.trace.plain import from_plain

#: The most that a leader's coordination may take of a step, by TP.
AIMS = {2: 0.005, 4: 0.01}

_LEADER = "leader, depth 2"

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Figures:
    """One method at one TP; see the head of this file."""

    coordination: float
    to_start: Spread
    messages_per_task: float
    iteration: float
    iteration_interval: tuple[float, float]


def groups_of(settings: Settings, line: Line) -> list[GroupStep]:
    """Each group's step.

    Raises:
        SystemExit: if two ranks of a group ran different orders, which must never happen.
    """
    traces = [from_plain(trace) for trace in line["traces"]]
    graph = TaskGraph.chain(settings.stages)
    steps = [
        measure(graph, stage, settings.limit(), settings.microbatches, traces[stage * settings.tp :][: settings.tp])
        for stage in range(settings.stages)
    ]
    if any(step.orders_differ for step in steps):
        raise SystemExit(f"{line['method']}: the ranks of a group ran different orders")
    return steps


def figures_of(settings: Settings, lines: Sequence[Line]) -> dict[str, Figures]:
    """Figures by method."""
    seconds: dict[str, list[float]] = defaultdict(list)
    steps: dict[str, list[GroupStep]] = defaultdict(list)
    messages: dict[str, int] = defaultdict(int)
    for line in (line for line in lines if line["round"] > 0):
        groups = groups_of(settings, line)
        seconds[line["method"]].append(max(step.seconds for step in groups))
        steps[line["method"]] += groups
        messages[line["method"]] += line["messages"]
    tasks = 2 * settings.microbatches * settings.stages * settings.rounds
    ratios = {name: [own / base for own, base in zip(seconds[name], seconds[_LEADER], strict=True)] for name in METHODS}
    return {
        method: Figures(
            coordination=mean(step.share for step in steps[method]),
            to_start=Spread.of([gap for step in steps[method] for gap in step.gaps]),
            messages_per_task=messages[method] / tasks,
            iteration=median(ratios[method]),
            iteration_interval=median_interval(ratios[method]),
        )
        for method in METHODS
    }


def aims_of(figures: Mapping[int, Mapping[str, Figures]]) -> list[Aim]:
    """The leader's share at each TP that has an aim."""
    return [
        Aim(f"leader, TP {tp}", methods[_LEADER].coordination * 100, AIMS[tp] * 100, unit="%")
        for tp, methods in figures.items()
        if tp in AIMS
    ]


def print_tables(figures: Mapping[int, Mapping[str, Figures]], aims: Sequence[Aim]) -> None:
    """For people."""
    console = Console()
    table = table_of("to start: us", "TP, method", "coordination", "to start p50", "p99", "messages", "step")
    for tp, methods in figures.items():
        for method, each in methods.items():
            start = (us(each.to_start.p50), us(each.to_start.p99))
            cells = (f"{each.coordination:.2%}", *start, f"{each.messages_per_task:.1f}", f"{each.iteration:.3f}")
            table.add_row(f"{tp}, {method}", *cells)
        table.add_section()
    console.print(table)
    if aims:
        shares = table_of("aims", "share of the step", "measured %", "aim %", "met")
        for aim in aims:
            shares.add_row(aim.name, f"{aim.value:.2f}", f"at most {aim.limit:g}", "yes" if aim.met else "NO")
        console.print(shares)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__, quick="a smoke run: TP 2, one short step")
    parser.add_argument("--tp", default="2,4,8", help="ranks in a group, comma-separated (default: 2,4,8)")
    given = parsed(parser)
    try:
        given.sizes = [int(text) for text in given.tp.split(",")]
    except ValueError:
        parser.error(f"--tp is {given.tp!r}, must be whole numbers from 1 on, comma-separated")
    if min(given.sizes) < 1:
        parser.error(f"--tp is {given.tp!r}, must be whole numbers from 1 on, comma-separated")
    return given


def main() -> None:
    """Entry point."""
    given, load = arguments(), OtherLoad()
    figures = {}
    for tp in track(given.sizes, "TP", disable=given.json, transient=True):
        settings = Settings(tp, microbatches=4, rounds=1) if given.quick else Settings(tp)
        figures[tp] = figures_of(
            settings,
            list(run_workers(Path(__file__).with_name("worker.py"), settings.stages * settings.tp, settings.to_json())),
        )
    aims = aims_of(figures)
    if given.json:
        plain = {tp: {method: asdict(each) for method, each in methods.items()} for tp, methods in figures.items()}
        print(json.dumps({"figures": plain, "aims": [aim.to_json() for aim in aims], "other_load": load.share()}))
        return
    print_tables(figures, aims)
    print(load.sentence())


if __name__ == "__main__":
    main()
