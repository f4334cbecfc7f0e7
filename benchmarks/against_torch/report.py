"""The results for people, and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.against_torch.aims import CellAim
from benchmarks.against_torch.settings import PEERS
from benchmarks.shared.comparison import Cell
from benchmarks.shared.figures import table_of
from benchmarks.shared.step_figures import Results
from benchmarks.shared.step_report import MARK, NOTHING, cpu_table, discarded, figures_data, times_table


def print_report(results: Results, aims: Sequence[CellAim]) -> None:
    """For people."""
    console = Console(width=max(Console().width, 180))
    for cell, figures in results.items():
        console.print(times_table(cell, figures, PEERS), cpu_table(cell, figures))
    for stages in dict.fromkeys(cell.stages for cell in results):
        cells = [cell for cell in results if cell.stages == stages]
        console.print(_verdicts(stages, cells, [each for each in aims if each.cell.stages == stages]))
    for line in discarded(results):
        console.print(line, soft_wrap=True, highlight=False)


def _verdicts(stages: int, cells: Sequence[Cell], aims: Sequence[CellAim]) -> Table:
    table = table_of(f"aims, PP {stages}", "figure", "method", "at most", *(f"{c.profile} {c.jitter}" for c in cells))
    rows: dict[tuple[str, str], dict[Cell, CellAim]] = {}
    for each in aims:
        rows.setdefault((each.kind, each.method), {})[each.cell] = each
    for (kind, method), by_cell in sorted(rows.items(), key=lambda row: row[0][0]):
        limits = {f"{each.aim.limit:g} {each.aim.unit}" for each in by_cell.values() if each.aim is not None}
        table.add_row(kind, method, " / ".join(sorted(limits)), *(_verdict(by_cell.get(cell)) for cell in cells))
    return table


def _verdict(one: CellAim | None) -> str:
    if one is None:
        return NOTHING
    if one.aim is None:
        return MARK
    return f"{one.aim.value:.1f}" + ("" if one.aim.met else " NO")


def document_of(results: Results, aims: Sequence[CellAim]) -> dict[str, Any]:
    """As plain data."""
    return {
        "figures": figures_data(results),
        "aims": [each.aim.to_json() for each in aims if each.aim is not None],
        "not_judged": [f"{each.method}, {each.kind}, {each.cell}" for each in aims if each.aim is None],
    }
