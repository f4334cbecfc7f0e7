"""The default hint over all cost profiles, against bfw, eager 1F1B, zb-h1 and zb-v in the same memory.

    python benchmarks/profiles/run.py [--profile zipf] [--seeds 20] [--stages 4 8 16] [--jobs J] [--quick] [--json]

Simulated without latency: 4 N microbatches, jitter J0 to J3, seeds from 1000 on. All methods meet the same cost tables,
and hints receive planned times as sizes. A gain is percent less makespan. Each figure is a mean over PP, jitter level
and seed, ± its 95% interval (the seeds are the samples), and in brackets the mean of the worst PP and jitter level.

Equal slots: both methods may hold as many microbatches on each stage: N - s on stage s (1f1b), N or 2N; in V twice as
many halves. A microbatch holds bytes in proportion to its planned time on a stage. Pyramids hold the large ones
together, so that at equal slots the default hint holds more bytes than bfw: the last table says how many. "Own bytes of
n": a limit on bytes, on each stage what the default hint held there at most by the count n (and a thousandth), against
bfw by count. "bfw's bytes of n": what bfw held there at most, so that both have equal peak bytes. "Bytes a rank of n":
every stage may hold what bfw held by count on its fullest one, and bfw has the same limit. Forwards show how large they
are when their inputs arrive, as in a pipeline.

By the order of microbatches: pyramids in any bytes, the caller's order, the default hint, which chooses one of these,
and the one that was better on this very table, which is the most that any choice between them can reach. [x] is the
percent of tables that lose over 1%.

Below the tables are the aims that are missed. `--quick` only shows that everything runs: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from benchmarks.profiles.figures import COMPARISONS, Figures, Gain
from benchmarks.profiles.runs import COUNTS, Case, run_cases
from benchmarks.shared.figures import table_of
from benchmarks.shared.load import OtherLoad
from benchmarks.shared.options import parsed, parser_of
from rrfp.costs import JITTER_LEVELS, PROFILES
from rrfp.errors import ConfigError
from rrfp.lab.sweep.pool import usable_cores

FIRST_SEED = 1000


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parser = parser_of("The default hint over all cost profiles.")
    parser.add_argument("--profile", choices=list(PROFILES), action="append", help="this one only; may be repeated")
    parser.add_argument("--seeds", type=int, default=20, help="draws of every workload, at least 1")
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 8, 16], help="numbers of stages")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="processes, at least 1")
    arguments = parsed(parser, "seeds", "jobs")
    if arguments.quick:
        arguments.seeds, arguments.stages = 1, [2]
    return arguments


def tables(figures: Figures) -> Iterator[Table]:
    """A row a profile."""
    for title, comparisons in COMPARISONS.items():
        table = table_of(f"{title}: percent less makespan", "profile", *(each.name for each in comparisons))
        for profile in figures.profiles:
            table.add_row(profile, *(_cell(figures.gain(profile, each), "order" in title) for each in comparisons))
        yield table
    held = table_of("percent more bytes than bfw at equal slots, mean over the stages", "profile", *COUNTS)
    for profile in figures.profiles:
        held.add_row(profile, *(f"{figures.more_bytes(profile, count):.0f}" for count in COUNTS))
    yield held


def _cell(gain: Gain, shows_behind: bool) -> str:
    last = f"[{gain.behind:.0f}]" if shows_behind else f"({gain.worst[1]:.1f})"
    return f"{gain.mean:.1f} ± {gain.interval:.1f} {last}"


def plain(figures: Figures) -> list[dict[str, object]]:
    """Every figure, for programs."""
    return [
        {
            "table": title,
            "comparison": comparison.name,
            "profile": profile,
            **asdict(figures.gain(profile, comparison)),
            "cells": figures.cells(profile, comparison),
        }
        for title, comparisons in COMPARISONS.items()
        for comparison in comparisons
        for profile in figures.profiles
    ]


def main() -> None:
    """Run and print."""
    arguments = arguments_of()
    load, started = OtherLoad(), time.monotonic()
    cases = [
        Case(profile, stages, jitter, seed)
        for profile in arguments.profile or PROFILES
        for stages in sorted(arguments.stages, reverse=True)  # long ones first: no straggler at the end
        for jitter in JITTER_LEVELS
        for seed in range(FIRST_SEED, FIRST_SEED + arguments.seeds)
    ]
    try:
        figures = Figures(list(run_cases(cases, arguments.jobs)))
    except ConfigError as error:
        sys.exit(f"error: {error}")
    took = time.monotonic() - started
    missed = list(figures.missed())
    if arguments.json:
        held = {p: {count: figures.more_bytes(p, count) for count in COUNTS} for p in figures.profiles}
        document = {
            "gains": plain(figures),
            "more_bytes": held,
            "missed": missed,
            "passed": figures.passed,
            "tables": len(cases),
        }
        print(json.dumps({**document, "seconds": took, "other_load": load.share()}))
        return
    console = Console(width=max(Console().width, 170))
    for table in tables(figures):
        console.print(table)
    print(f"a stage passed its limit on bytes by at most {figures.passed:.1f}%")
    print("\n".join(("aims that are missed:", *missed)) if missed else "no aim is missed")
    print(f"{len(cases)} tables, {took:.0f} s on {arguments.jobs} processes")
    print(load.sentence())


if __name__ == "__main__":
    main()
