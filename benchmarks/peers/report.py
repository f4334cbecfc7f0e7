"""The results for people, and as plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers.aims import CellAim
from benchmarks.peers.settings import PEERS
from benchmarks.shared.comparison import Cell
from benchmarks.shared.figures import table_of
from benchmarks.shared.step_figures import Figures, Ratio, Results
from benchmarks.shared.step_report import MARK, MIB, NOTHING, cpu_table, discarded, name_of, times_table


def print_report(results: Results, aims: Sequence[CellAim]) -> None:
    """For people."""
    console = Console(width=max(Console().width, 220))
    for cell, figures in results.items():
        console.print(times_table(cell, figures, ()), orders_table(cell, figures))
        console.print(peers_table(cell, figures), cpu_table(cell, figures))
    for stages in dict.fromkeys(cell.stages for cell in results):
        cells = [cell for cell in results if cell.stages == stages]
        console.print(_verdicts(stages, cells, [each for each in aims if each.cell.stages == stages]))
    for line in discarded(results):
        console.print(line, soft_wrap=True, highlight=False)


def orders_table(cell: Cell, figures: Mapping[str, Figures]) -> Table:
    """Over the bound, beside what the orders alone give."""
    table = table_of(f"{cell}: orders", "method", "/ bound [95%]", "order alone / bound", "/ order alone")
    for name, one in figures.items():
        low, high = one.per_bound_interval
        over = f"{one.per_bound:.3f} [{low:.3f}-{high:.3f}]"
        table.add_row(name_of(name, one), over, f"{one.alone_per_bound:.3f}", f"{one.per_alone:.3f}")
    return table


def peers_table(cell: Cell, figures: Mapping[str, Figures]) -> Table:
    """Over each peer, what the orders alone give in brackets, beside what was held."""
    peers = [name for name in PEERS if name in figures]
    title = f"{cell}: over each peer (and their orders alone)"
    table = table_of(title, "method", "held (sum)", "MiB (sum)", *(f"/ {name}" for name in peers))
    for name, one in figures.items():
        table.add_row(
            name_of(name, one),
            f"{max(one.held):g} ({sum(one.held):g})",
            f"{max(one.held_bytes) / MIB:,.0f} ({sum(one.held_bytes) / MIB:,.0f})",
            *(_ratio(one.per_peer[peer]) for peer in peers),
        )
    return table


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.value:.3f}{MARK if ratio.is_disturbed else ''} ({ratio.alone:.3f})"


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
        "cells": [_cell(cell, name, one) for cell, figures in results.items() for name, one in figures.items()],
        "aims": [each.aim.to_json() for each in aims if each.aim is not None],
        "not_judged": [f"{each.method}, {each.kind}, {each.cell}" for each in aims if each.aim is None],
    }


def _cell(cell: Cell, method: str, one: Figures) -> dict[str, Any]:
    """The row of `run`'s documentation."""
    low, high = one.per_bound_interval
    over_low, over_high = one.overhead_interval
    numbers = {
        "ms": 1e3 * one.seconds,
        "over_bound": one.per_bound,
        "low": low,
        "high": high,
        "engine_over_bound": one.alone_per_bound,
        "over_engine": one.per_alone,
        "over_executed_order": 1 + one.overhead.total,
        "over_executed_low": 1 + over_low,
        "over_executed_high": 1 + over_high,
        "held_microbatches": max(one.held),
        "held_microbatches_sum": sum(one.held),
        "held_bytes": max(one.held_bytes),
        "held_bytes_sum": sum(one.held_bytes),
        "cpu_ms_task": 1e3 * one.cpu_per_task,
        "begin_ms": 1e3 * one.begin_s,
        "end_ms": 1e3 * one.end_s,
    }
    return {
        "profile": cell.profile,
        "jitter": cell.jitter,
        "stages": cell.stages,
        "method": method,
        "steps": len(one.used),
        "discarded": len(one.discarded),
        "disturbed": one.is_disturbed,
        **{name: round(value, 4) for name, value in numbers.items()},
        "over": {name: _over(ratio) for name, ratio in one.per_peer.items() if name != method},
    }


def _over(ratio: Ratio) -> dict[str, Any]:
    low, high = ratio.interval
    numbers = {"value": ratio.value, "low": low, "high": high, "engine": ratio.alone}
    return {**{name: round(value, 4) for name, value in numbers.items()}, "disturbed": ratio.is_disturbed}


def text_of(document: Mapping[str, Any]) -> str:
    """JSON with a line for each cell, so that two runs can be compared by line."""
    parts = []
    for name, value in document.items():
        rows = ",\n".join(json.dumps(row) for row in value) if name in ("cells", "aims") and value else None
        parts.append(f"{json.dumps(name)}: " + (json.dumps(value) if rows is None else f"[\n{rows}\n]"))
    return "{\n" + ",\n".join(parts) + "\n}\n"
