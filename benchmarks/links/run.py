"""Links that take long, and what memory does about them.

    python benchmarks/links/run.py --simulate [--quick] [--json]

PipeMorph's setting (NSDI '26): 8 stages, 24 microbatches, F 9, B 10 and W 6 ms; one to three links between neighbours
take 10, 30 or 60 ms each way, which the lanes do not notice. Backward runs whole or split; rows without a schedule have
the default hint and the limit of their name. "held" is the sum over stages of the most microbatches that each held.
The bound is that of any order of whole backwards: the undisturbed step, and one round trip of each slow link. Beside
them are PipeMorph's own measurements on GPUs, from its published logs, for the cells that it has.

The second table is of pipelines for which no lemma holds: unequal stages, jitter, microbatches of different sizes, two
chunks a stage; each has one or two slow links of half a period to three periods. In percent over the same pipeline
without a limit; memory is the mean limit over N.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from benchmarks.links.simulated import METHODS, PUBLISHED, Cell, Kind, cells, kinds
from benchmarks.shared.options import parsed, parser_of


def main() -> None:
    """Simulate and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--simulate", action="store_true", help="by the engine, as ever")
    arguments = parsed(parser)
    found, others = list(cells()), list(kinds(2) if arguments.quick else kinds())
    if arguments.json:
        print(json.dumps({"cells": list(map(asdict, found)), "kinds": list(map(asdict, others))}))
        return
    console = Console(width=180)
    console.print(table_of(found))
    console.print(table_of_kinds(others))


def table_of(found: Sequence[Cell]) -> Table:
    """Milliseconds, and microbatches held, of every method by setting."""
    table = Table(title="ms (held)", title_justify="left")
    for head in ("slow links", "ms", *METHODS, "bound", "PipeMorph's 1F1B / ZB / own"):
        table.add_column(head, justify="right")
    undisturbed = next(cell.milliseconds for cell in found if cell.method == "whole, 2n")
    for links, delay in dict.fromkeys((cell.links, cell.delay) for cell in found):
        own = {cell.method: cell for cell in found if (cell.links, cell.delay) == (links, delay)}
        bound = undisturbed + 2 * delay * len(links.split(", "))
        published = " / ".join(map(str, PUBLISHED.get((links, delay), ())))
        cells_of = (f"{own[method].milliseconds:.0f} ({own[method].held})" for method in METHODS)
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
