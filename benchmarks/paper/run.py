"""Every table of the paper's section 7 as a simulation, the paper's figures beside ours. Under five minutes.

    python benchmarks/paper/run.py [--only table-1] [--seeds N] [--out DIR] [--quick] [--json [FILE]]

The workloads are simulated, so absolute seconds mean nothing; compare speed-ups. One model serves all cells
(`benchmarks/paper/workloads.py` says what each part of it follows from), nothing is fitted to a cell, and each table
says what its figures rest on. Where a claim does not reproduce, the table says so. `--quick` only shows that everything
runs: its figures mean nothing.
"""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from benchmarks.paper.breakdown import breakdown
from benchmarks.paper.details import dominance, saturation, workload_statistics
from benchmarks.paper.messages import messages
from benchmarks.paper.plots import plot
from benchmarks.paper.runs import Runs
from benchmarks.paper.tables import SECTIONS, Section, Table
from benchmarks.paper.theorem import theorem
from benchmarks.shared.figures import table_of
from benchmarks.shared.load import OtherLoad
from benchmarks.shared.options import parsed, parser_of, report, text_of
from rrfp.lab.sweep.pool import usable_cores

ALL: dict[str, Section] = {
    **{name: SECTIONS[name] for name in ("table-1", "table-2")},
    "messages": messages(),
    "table-3": breakdown(),
    **{name: SECTIONS[name] for name in ("tables-4-5", "table-6", "table-7", "table-8")},
    "limit": saturation(),
    "statistics": workload_statistics(),
    "dominance": dominance(),
    "theorem": theorem(),
}

#: What a section reads of another's runs.
_NEEDS = {"tables-4-5": ("table-1", "table-2")}


def print_table(console: Console, table: Table) -> None:
    """For people."""
    drawn = table_of(table.title, *table.columns)
    drawn.columns[-1].justify = "left"
    drawn.columns[-1].no_wrap = False
    for row in table.rows:
        drawn.add_row(*row)
    console.print(drawn)
    for note in table.notes:
        console.print(f"  {note}", highlight=False)
    console.print()


def main() -> None:
    """Run and print."""
    parser = parser_of("The paper's tables, simulated.", json_file=True)
    parser.add_argument("--only", choices=list(ALL), action="append", help="this table only; may be repeated")
    parser.add_argument("--seeds", type=int, default=3, help="draws of every workload, at least 1")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="processes, at least 1")
    parser.add_argument("--out", type=Path, default=Path("out/paper"), help="where pictures are written")
    arguments = parsed(parser, "seeds", "jobs")

    names = arguments.only or list(ALL)
    runs = Runs(1 if arguments.quick else arguments.seeds, most_microbatches=8 if arguments.quick else None)
    needed = [need for name in names for need in _NEEDS.get(name, ())]
    for name in dict.fromkeys([*names, *needed]):
        ALL[name].want(runs)
    load, started = OtherLoad(), time.monotonic()
    runs.run(arguments.jobs)
    tables = {name: ALL[name].table(runs) for name in names}
    pictures = plot(tables, arguments.out)
    took = time.monotonic() - started
    document = {
        "tables": {name: {"columns": t.columns, "rows": t.rows, "data": t.data} for name, t in tables.items()},
        "pictures": [str(path) for path in pictures],
        "seconds": took,
        "other_load": load.share(),
    }

    def drawn() -> None:
        console = Console(width=max(Console().width, 170))
        for table in tables.values():
            print_table(console, table)
        print(f"{len(runs.found)} runs, {runs.seeds} seeds, {took:.0f} s; pictures: {', '.join(map(str, pictures))}")
        print(load.sentence())

    report(arguments.json, document, drawn, text_of)


if __name__ == "__main__":
    main()
