"""The results for people, and as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.against_torch.aims import CellAim
from benchmarks.against_torch.clocks import COPIER, GLOO, LANE, LOOP, MAIN, REST, ZMQ
from benchmarks.against_torch.figures import Figures, Ratio, Results
from benchmarks.against_torch.settings import PEERS, Cell
from benchmarks.against_torch.steps import DISTURBED_CORES
from benchmarks.shared.figures import table_of

#: Marks figures of disturbed steps, where there are no others.
_MARK = "†"
_NOTHING = "-"

#: Columns of processor time, and their groups of threads.
_THREADS = {"main": (MAIN,), "loop": (LOOP,), "lane": (LANE,), "I/O": (ZMQ, GLOO), "copier": (COPIER,), "rest": (REST,)}


def print_report(results: Results, aims: Sequence[CellAim]) -> None:
    """For people."""
    console = Console(width=max(Console().width, 140))
    for cell, figures in results.items():
        console.print(_times(cell, figures), _cpu(cell, figures))
    for stages in dict.fromkeys(cell.stages for cell in results):
        cells = [cell for cell in results if cell.stages == stages]
        console.print(_verdicts(stages, cells, [each for each in aims if each.cell.stages == stages]))
    for line in discarded(results):
        console.print(line, soft_wrap=True, highlight=False)


def _times(cell: Cell, figures: Mapping[str, Figures]) -> Table:
    peers = [f"/ {name}" for name in PEERS]
    columns = (
        "steps",
        "ms",
        "/ bound",
        "/ own bound",
        *peers,
        "over own",
        "in sleeps",
        "held (sum)",
        "start",
        "end ms",
    )
    table = table_of(str(cell), "method", *columns)
    for name, one in figures.items():
        table.add_row(
            name + (f" {_MARK}" if one.is_disturbed else ""),
            f"{len(one.used)}/{len(one.used) + len(one.discarded)}",
            f"{one.seconds * 1e3:,.0f}",
            f"{one.per_bound:.3f}",
            f"{one.per_own_bound:.3f}",
            *(_ratio(one.per_peer.get(peer)) for peer in PEERS),
            f"{one.overhead.total:.1%}",
            f"{one.overhead.in_sleeps:.1%}",
            f"{max(one.held):g} ({sum(one.held):g})",
            f"{one.begin_s * 1e3:.1f}",
            f"{one.end_s * 1e3:.1f}",
        )
    return table


def _ratio(ratio: Ratio | None) -> str:
    return _NOTHING if ratio is None else f"{ratio.value:.3f}" + (_MARK if ratio.is_disturbed else "")


def _cpu(cell: Cell, figures: Mapping[str, Figures]) -> Table:
    table = table_of(f"{cell}: CPU us a task", "method", "in all", *_THREADS)
    for name, one in figures.items():
        by_column = [sum(one.cpu_s[group] for group in groups if group in one.cpu_s) for groups in _THREADS.values()]
        cells = [f"{seconds * 1e6:,.0f}" for seconds in (one.cpu_per_task, *by_column)]
        table.add_row(name + (f" {_MARK}" if one.is_disturbed else ""), *cells)
    return table


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
        return _NOTHING
    if one.aim is None:
        return _MARK
    return f"{one.aim.value:.1f}" + ("" if one.aim.met else " NO")


def discarded(results: Results) -> Iterator[str]:
    """Which steps were not used, and why."""
    yield (
        f"A step is discarded if other processes took more than {DISTURBED_CORES:g} cores meanwhile; "
        f"{_MARK}: every step was disturbed, and all are used."
    )
    others = [one.others for figures in results.values() for one in figures.values() if one.others is not None]
    if others:
        yield f"cores that other processes took, at most in a step that is used: {max(others):.2f}"
    steps = [
        f"{cell}: {name}, round {number} ({cores:.2f} cores)"
        for cell, figures in results.items()
        for name, one in figures.items()
        for number, cores in one.discarded.items()
    ]
    yield f"discarded: {'; '.join(steps) or 'none'}"


def document_of(results: Results, aims: Sequence[CellAim]) -> dict[str, Any]:
    """As plain data."""
    return {
        "figures": [
            {**cell._asdict(), "method": name, **asdict(one), "cpu_per_task": one.cpu_per_task}
            for cell, figures in results.items()
            for name, one in figures.items()
        ],
        "aims": [each.aim.to_json() for each in aims if each.aim is not None],
        "not_judged": [f"{each.method}, {each.kind}, {each.cell}" for each in aims if each.aim is None],
    }
