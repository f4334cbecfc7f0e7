"""Links that take long, and what memory does about them.

    python benchmarks/links/run.py [--links 6-7 ...] [--delays 60 ...] [--methods NAME ...] [--pace 3] [--rounds N]
        [--quick] [--json]
    python benchmarks/links/run.py --simulate [--png FILE] [--quick] [--json]
    python benchmarks/links/run.py --trace [--simulate] [--iterations 10] [--methods NAME ...] [--quick] [--json]

PipeMorph's setting (NSDI '26): 8 stages, 24 microbatches, F 9, B 10 and W 6 ms; one to three links between neighbours
take 10, 30 or 60 ms each way. Neither sender nor receiver waits meanwhile: what crosses such a link arrives later, in
its order. Tasks sleep, as behind an accelerator. In processes tasks and delays are ``--pace`` times as long, and
milliseconds are divided by it.

**Processes**, one a stage under torchrun: torch's 1F1B and ZBV over gloo, and RRFP over its default transport, strict
1F1B with a whole backward, else the default hint with a split one. All methods alternate by step; before the measured
rounds of a setting each runs a step, ``auto`` five. Medians of undisturbed steps (see benchmarks/peers/run.py);
"*" where all were disturbed. "simulated" is the engine's time for RRFP's methods.

**--simulate** has every method and every setting, whole and split, by the engine. The bound is that of any order of
whole backwards: the undisturbed step, and one round trip of each slow link. "claimed, auto" is of two such pipelines
that share forwards by claims (``share_replicas=True``), with the same slow links. Its second table is of pipelines for
which no lemma holds: unequal stages, jitter, microbatches of different sizes, two chunks a stage; each has one or two
slow links of half a period to three periods. In percent over the same pipeline without a limit; memory is the mean
limit over N.

**--trace** plays PipeMorph's published trace instead, 1030 iterations in which nine times one to three links are slow
(benchmarks/links/trace.py), with delays in proportion to the tasks. Simulated, each iteration is a step. Between
processes a step stands for ``--iterations``, by default ten, in about five minutes: methods alternate by step, torch's
1F1B and ``auto`` unless others are named, and every step counts.

"held" is the sum over stages of the most microbatches that each held. Beside some rows are PipeMorph's own measurements
on GPUs, from its published logs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.links import settings as links_settings
from benchmarks.links import trace
from benchmarks.links.measured import Row, aims_of, measure, rows_of
from benchmarks.links.plot import plot
from benchmarks.links.settings import AUTO, TORCH_1F1B, TRACE, Settings
from benchmarks.links.simulated import (
    CLAIMED,
    DELAYS,
    LINKS,
    METHODS,
    MICROBATCHES,
    PUBLISHED,
    STAGES,
    Cell,
    Kind,
    cells,
    kinds,
)
from benchmarks.links.trace import Aim, Play
from benchmarks.shared.load import OtherLoad
from benchmarks.shared.options import parsed, parser_of


def main() -> None:
    """Measure, or simulate, and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--simulate", action="store_true", help="by the engine")
    parser.add_argument("--png", type=Path, metavar="FILE", help="with --simulate: draw one link's delay")
    parser.add_argument("--links", nargs="*", choices=LINKS, default=list(LINKS), help="the slow ones; may be none")
    parser.add_argument("--delays", nargs="+", type=int, choices=DELAYS, default=list(DELAYS), help="each way, in ms")
    known = list(links_settings.METHODS)
    parser.add_argument("--methods", nargs="+", choices=known, help="by name; default: all")
    parser.add_argument("--trace", action="store_true", help="PipeMorph's trace")
    parser.add_argument("--iterations", type=int, choices=(1, 2, 5, 10), help="of the trace, for each step")
    parser.add_argument("--pace", type=float, default=1.0, help="how much longer tasks and delays are than PipeMorph's")
    parser.add_argument("--rounds", type=int, default=3, help="measured steps of each method and setting, at least 1")
    arguments = parsed(parser, "rounds")
    console = Console(width=180)
    if arguments.trace:
        play_trace(arguments, console)
        return
    if arguments.simulate:
        if arguments.png:
            plot(arguments.png)
        found, others = list(cells()), list(kinds(2) if arguments.quick else kinds())
        if arguments.json:
            print(json.dumps({"cells": list(map(asdict, found)), "kinds": list(map(asdict, others))}))
            return
        console.print(table_of(found))
        console.print(table_of_kinds(others))
        return
    load, settings = OtherLoad(), settings_of(arguments)
    rows = list(rows_of(settings, measure(settings)))
    aims = aims_of(rows, settings.stages)
    if arguments.json:
        print(json.dumps(document_of(settings, rows, aims, load.share())))
        return
    console.print(table_of_rows(rows))
    print_aims(aims)
    print(load.sentence())


def play_trace(arguments: argparse.Namespace, console: Console) -> None:
    """PipeMorph's trace: one row a method."""
    load = OtherLoad()
    if arguments.simulate:
        base, ours, plays = "1F1B", "split, auto", list(trace.simulated(iterations=arguments.iterations or 1))
    else:
        settings = settings_of(arguments)
        base, ours, plays = TORCH_1F1B, AUTO, list(trace.measured(measure(settings), settings.pace))
    aims = trace.aims_of(plays, base, ours)
    if arguments.json:
        document = {"plays": list(map(asdict, plays)), "aims": aims_in_json(aims), "other_load": load.share()}
        print(json.dumps(document))
        return
    console.print(table_of_plays(plays))
    print_aims(aims)
    for method, (here, whole) in trace.PUBLISHED.items():
        print(f"PipeMorph's logs, {method}: {here} samples/s over these iterations, {whole} over its whole run")
    if not arguments.simulate:
        print(load.sentence())


def settings_of(arguments: argparse.Namespace) -> Settings:
    """What the command line asks for."""
    default = [TORCH_1F1B, AUTO] if arguments.trace else links_settings.METHODS
    methods = tuple(dict.fromkeys(arguments.methods or default))
    if arguments.trace:
        pace, per_step = arguments.pace, arguments.iterations or 10
        shape = (2, (TRACE,), ("0",), methods, 6, 2)
        if not arguments.quick:
            shape = (STAGES, (TRACE,), ("0",), methods, MICROBATCHES, trace.ITERATIONS // per_step)
        return Settings(*shape, pace=pace, iterations=per_step)
    if arguments.quick:
        return Settings(2, ("none", "0-1"), ("60",), methods, microbatches=6, rounds=1)
    profiles, delays = ("none", *dict.fromkeys(arguments.links)), tuple(map(str, dict.fromkeys(arguments.delays)))
    return Settings(STAGES, profiles, delays, methods, MICROBATCHES, arguments.rounds, pace=arguments.pace)


def document_of(
    settings: Settings, rows: Sequence[Row], aims: Sequence[Aim], other_load: float | None
) -> dict[str, Any]:
    """All figures as plain data."""
    return {
        "settings": asdict(settings),
        "rows": list(map(asdict, rows)),
        "aims": aims_in_json(aims),
        "other_load": other_load,
    }


def aims_in_json(aims: Sequence[Aim]) -> list[dict[str, Any]]:
    """Each with whether it is met."""
    return [{**asdict(aim), "met": aim.is_met} for aim in aims]


def print_aims(aims: Sequence[Aim]) -> None:
    """A line each."""
    for aim in aims:
        print(f"{aim.name}: {aim.value:.2f}, {aim.sense} {aim.limit:g}: {'met' if aim.is_met else 'missed'}")


def table_of_plays(plays: Sequence[Play]) -> Table:
    """The trace, by method."""
    table = Table("method", "ms a step", "held", "disturbed steps", title="PipeMorph's trace")
    for play in plays:
        table.add_row(play.method, f"{play.milliseconds:.0f}", f"{play.held:.0f}", str(play.disturbed))
    return table


def table_of_rows(rows: Sequence[Row]) -> Table:
    """Measured steps, by setting and method."""
    table = Table("slow links", "ms each way", "method", "ms", "simulated", "held", title="processes")
    for row in rows:
        simulated = "" if row.simulated is None else f"{row.simulated:.0f}"
        mark = "*" if row.is_disturbed else ""
        figures = (f"{row.milliseconds:.0f}{mark}", simulated, f"{row.held:.0f}")
        table.add_row(row.links, str(row.delay), row.method, *figures)
    return table


def table_of(found: Sequence[Cell]) -> Table:
    """Milliseconds, and microbatches held, of every method by setting."""
    table = Table(title="ms (held)", title_justify="left")
    for head in ("slow links", "ms", *METHODS, CLAIMED, "bound", "PipeMorph's 1F1B / ZB / own"):
        table.add_column(head, justify="right")
    undisturbed = next(cell.milliseconds for cell in found if cell.method == "whole, 2n")
    for links, delay in dict.fromkeys((cell.links, cell.delay) for cell in found):
        own = {cell.method: cell for cell in found if (cell.links, cell.delay) == (links, delay)}
        bound = undisturbed + 2 * delay * len(links.split(", "))
        published = " / ".join(map(str, PUBLISHED.get((links, delay), ())))
        cells_of = (f"{own[method].milliseconds:.0f} ({own[method].held})" for method in (*METHODS, CLAIMED))
        table.add_row(links, str(delay), *cells_of, f"{bound:.0f}", published)
    return table


def table_of_kinds(found: Sequence[Kind]) -> Table:
    """Percent over no limit, and memory, by kind of pipeline."""
    table = Table("pipelines", "limit", "% over no limit", "worst", "memory / N", title="other pipelines")
    for kind in found:
        figures = (f"{kind.over_unlimited:.1f}", f"{kind.worst:.1f}", f"{kind.held:.2f}")
        table.add_row(kind.pipelines, kind.limit, *figures)
    return table


if __name__ == "__main__":
    main()
