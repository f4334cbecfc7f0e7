"""The figures of a comparison for people, and as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from benchmarks.shared.clocks import COPIER, GLOO, LANE, LOOP, MAIN, REST, ZMQ
from benchmarks.shared.comparison import Cell
from benchmarks.shared.figures import table_of
from benchmarks.shared.step_figures import Figures, Ratio, Results
from benchmarks.shared.steps import DISTURBED_CORES

#: Marks figures of disturbed steps, where there are no others.
MARK = "†"
NOTHING = "-"
MIB = 1 << 20

#: Columns of processor time, and their groups of threads.
_THREADS = {"main": (MAIN,), "loop": (LOOP,), "lane": (LANE,), "I/O": (ZMQ, GLOO), "copier": (COPIER,), "rest": (REST,)}


def name_of(method: str, figures: Figures) -> str:
    """A row's first column."""
    return method + (f" {MARK}" if figures.is_disturbed else "")


def times_table(cell: Cell, figures: Mapping[str, Figures], peers: Sequence[str]) -> Table:
    """How long the steps of each method took, and how much it held."""
    columns = (
        "steps",
        "ms",
        "/ bound",
        "/ own bound",
        *(f"/ {name}" for name in peers),
        "over own",
        "in sleeps",
        "held (sum)",
        "MiB (sum)",
        "start",
        "end ms",
    )
    table = table_of(str(cell), "method", *columns)
    for name, one in figures.items():
        table.add_row(
            name_of(name, one),
            f"{len(one.used)}/{len(one.used) + len(one.discarded)}",
            f"{one.seconds * 1e3:,.0f}",
            f"{one.per_bound:.3f}",
            f"{one.per_own_bound:.3f}",
            *(_ratio(one.per_peer.get(peer)) for peer in peers),
            f"{one.overhead.total:.1%}",
            f"{one.overhead.in_sleeps:.1%}",
            f"{max(one.held):g} ({sum(one.held):g})",
            f"{max(one.held_bytes) / MIB:,.0f} ({sum(one.held_bytes) / MIB:,.0f})",
            f"{one.begin_s * 1e3:.1f}",
            f"{one.end_s * 1e3:.1f}",
        )
    return table


def cpu_table(cell: Cell, figures: Mapping[str, Figures]) -> Table:
    """The processor time a task of each method, of all ranks, by thread."""
    table = table_of(f"{cell}: CPU us a task", "method", "in all", *_THREADS)
    for name, one in figures.items():
        by_column = [sum(one.cpu_s[group] for group in groups if group in one.cpu_s) for groups in _THREADS.values()]
        cells = [f"{seconds * 1e6:,.0f}" for seconds in (one.cpu_per_task, *by_column)]
        table.add_row(name_of(name, one), *cells)
    return table


def _ratio(ratio: Ratio | None) -> str:
    return NOTHING if ratio is None else f"{ratio.value:.3f}" + (MARK if ratio.is_disturbed else "")


def discarded(results: Results) -> Iterator[str]:
    """Which steps were not used, and why."""
    yield (
        f"A step is discarded if other processes took more than {DISTURBED_CORES:g} cores meanwhile; "
        f"{MARK}: every step was disturbed, and all are used."
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


def figures_data(results: Results) -> list[dict[str, Any]]:
    """As plain data, one entry for each method in each cell."""
    return [
        {**cell._asdict(), "method": name, **asdict(one), "cpu_per_task": one.cpu_per_task}
        for cell, figures in results.items()
        for name, one in figures.items()
    ]
