"""Every hint within every limit, simulated, beside a lower bound for the same memory. Under five minutes on two cores.

    python benchmarks/hints/run.py [--profile mllm] [--seeds 5] [--latency none] [--size-error 0]
                               [--unsplit] [--jobs J] [--csv FILE] [--png FILE] [--quick] [--json [FILE]]

Backward is split, unless --unsplit is given. Microbatches: 64. A hint may hold, on stage i of N: N - i microbatches
(limit 1f1b), N, or 2N. Beside them the schedules 1f1b and zb-h1, run strictly with eager sends; their own order holds
what the limits 1f1b and N allow. All methods meet the same cost tables (jitter J0 to J3, 5 seeds; profiles llm and
mllm, unless --profile names others). The pyramid hints receive each microbatch's planned time, without jitter; the
others ignore it. bf and bfw are one rule and are run once.

Each figure is a mean over its cells; ± is the standard deviation over the seeds. A gain compares makespans on the same
table within the same limit, so never two memories; "what memory buys" does compare limits, and shows both D, the
largest of any stage and the mean over stages. No run beats the bound, and the bound may lie below what is possible:
where every method is far above it, as for deep pipelines, the distance says little.

--csv writes one line a run. `--quick` only shows that everything runs: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.hints.figures import Figure, Figures
from benchmarks.hints.plot import plot
from benchmarks.hints.runs import HINTS, Case, Row, run_cases
from benchmarks.hints.tables import tables
from benchmarks.shared.load import OtherLoad
from benchmarks.shared.options import parsed, parser_of, report, text_of
from rrfp.costs import JITTER_LEVELS, PROFILES
from rrfp.errors import ConfigError
from rrfp.lab.sweep.pool import usable_cores
from rrfp.lab.traces.pictures import require_matplotlib

#: Two of all, for time; `benchmarks/profiles/run.py` compares the default hint on all.
DEFAULT_PROFILES = ("llm", "mllm")
STAGES, MICROBATCHES = (4, 8, 16, 32, 64), 64
QUICK_STAGES, QUICK_MICROBATCHES, QUICK_JITTERS = (2, 4), 8, ("J0", "J3")


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """Every cost table."""
    quick, split = arguments.quick, not arguments.unsplit
    stages, microbatches = (QUICK_STAGES, QUICK_MICROBATCHES) if quick else (STAGES, MICROBATCHES)
    return [
        Case(profile, n, microbatches, jitter, arguments.latency, seed, arguments.size_error, split)
        for profile in arguments.profile or DEFAULT_PROFILES
        for n in stages
        for jitter in (QUICK_JITTERS if quick else JITTER_LEVELS)
        for seed in range(1 if quick else arguments.seeds)
    ]


def flat(row: Row) -> dict[str, Any]:
    """One line of the CSV."""
    own = {name: value for name, value in asdict(row).items() if name != "case"}
    return {**asdict(row.case), **own, "percent_above": row.above}


def plain(figures: Figures) -> list[dict[str, Any]]:
    """Every cell: a profile, PP, jitter level, method and limit, over the seeds."""
    cells = []
    for profile in figures.profiles:
        for method, limit in figures.runs():
            for n in figures.stages:
                for jitter in figures.jitters:
                    rows = figures.select(profile, method, limit, stages=n, jitter=jitter)
                    above, gain = Figure.of(rows, lambda row: row.above), Figure.of(rows, figures.gain)
                    assert above is not None
                    assert gain is not None
                    where = {"profile": profile, "stages": n, "jitter": jitter, "method": method, "limit": limit}
                    peak = max(row.peak for row in rows)
                    cells.append({**where, "above": asdict(above), "gain": asdict(gain), "peak": peak})
    return cells


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """One line a run."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(flat(rows[0])))
        writer.writeheader()
        writer.writerows(map(flat, rows))


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parser = parser_of("Every hint within every limit, beside a lower bound.", json_file=True)
    parser.add_argument(
        "--profile", choices=list(PROFILES), action="append", help="instead of llm and mllm; may be repeated"
    )
    parser.add_argument("--seeds", type=int, default=5, help="draws of every workload, at least 1")
    parser.add_argument("--latency", default="none", help="a latency model, such as none, wire or spike")
    parser.add_argument("--unsplit", action="store_true", help="backward is one task: no weight tasks, no zb-h1")
    parser.add_argument("--size-error", type=float, default=0.0, help="relative error of the sizes that hints receive")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="processes, at least 1")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write every run")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw percent above the bound over PP")
    arguments = parsed(parser, "seeds", "jobs")
    if not 0 <= arguments.size_error <= 1:
        parser.error(f"--size-error is {arguments.size_error}, must be 0 to 1")
    return arguments


def main() -> None:
    """Run and print."""
    arguments = arguments_of()
    load, started = OtherLoad(), time.monotonic()
    try:
        if arguments.png:
            require_matplotlib()
        rows = list(run_cases(cases_of(arguments), HINTS, arguments.jobs))
    except ConfigError as error:
        sys.exit(f"error: {error}")
    took = time.monotonic() - started
    figures = Figures(rows, HINTS)
    if arguments.csv:
        write_csv(rows, arguments.csv)
    if arguments.png:
        plot(figures, arguments.png)
    document = {"cells": plain(figures), "runs": len(rows), "seconds": took, "other_load": load.share()}

    def print_tables() -> None:
        console = Console(width=max(Console().width, 170))
        for table in tables(figures):
            console.print(table)
        print(f"{len(rows)} runs, {took:.0f} s on {arguments.jobs} processes")
        print(load.sentence())

    report(arguments.json, document, print_tables, text_of)


if __name__ == "__main__":
    main()
