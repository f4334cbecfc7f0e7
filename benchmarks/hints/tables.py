"""The tables of the hints benchmark, for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from benchmarks.hints.figures import Figure, Figures
from benchmarks.hints.runs import ALIASES, LIMITS, STRICT, Row
from benchmarks.shared.figures import table_of


def tables(figures: Figures) -> Iterator[Table]:
    """Every table, profile by profile."""
    for profile in figures.profiles:
        yield _above_by_jitter(figures, profile)
        yield _above_by_stages(figures, profile)
        yield _gains(figures, profile)
        yield _memory(figures, profile)
        yield _winners(figures, profile)


def _above(row: Row) -> float:
    return row.above


def _methods(figures: Figures) -> Iterator[tuple[str, str, str, bool]]:
    """Every (method, its name in a table, limit, whether a line follows)."""
    for method, limit in figures.runs():
        is_last = limit == LIMITS[-1] or method == list(figures.strict)[-1]
        name = f"strict {method}" if method in STRICT else ALIASES.get(method, method)
        yield method, name, limit, is_last


def _cell(figure: Figure | None) -> str:
    return "-" if figure is None else f"{_one(figure.mean)} ± {figure.spread:.1f}"


def _one(percent: float) -> str:
    """To one decimal; rounding errors of a run at its bound are no negative zero."""
    return f"{round(percent, 1) + 0.0:.1f}"


def _above_by_jitter(figures: Figures, profile: str) -> Table:
    title = f"{profile}: percent above the bound of the same memory, mean over PP and seeds (± over seeds)"
    table = table_of(title, "method", "limit", *figures.jitters)
    for method, name, limit, is_last in _methods(figures):
        cells = [Figure.of(figures.select(profile, method, limit, jitter=j), _above) for j in figures.jitters]
        table.add_row(name, limit, *map(_cell, cells), end_section=is_last)
    return table


def _above_by_stages(figures: Figures, profile: str) -> Table:
    title = f"{profile}: percent above the bound of the same memory, mean over jitter and seeds (± over seeds)"
    table = table_of(title, "method", "limit", *(f"PP {n}" for n in figures.stages))
    for method, name, limit, is_last in _methods(figures):
        cells = [Figure.of(figures.select(profile, method, limit, stages=n), _above) for n in figures.stages]
        table.add_row(name, limit, *map(_cell, cells), end_section=is_last)
    return table


def _gains(figures: Figures, profile: str) -> Table:
    title = f"{profile}: percent less makespan than bfw within the same limit"
    table = table_of(title, "method", "limit", *figures.jitters, "all", "worst cell", "where")
    for method, name, limit, is_last in _methods(figures):
        cells = [Figure.of(figures.select(profile, method, limit, jitter=j), figures.gain) for j in figures.jitters]
        every = Figure.of(figures.select(profile, method, limit), figures.gain)
        worst, (_, stages, jitter) = figures.worst(profile, method, limit)
        table.add_row(
            name, limit, *map(_cell, cells), _cell(every), _one(worst), f"PP {stages} {jitter}", end_section=is_last
        )
    return table


def _memory(figures: Figures, profile: str) -> Table:
    title = f"{profile}: what memory buys: percent less makespan than bfw within 1f1b, and the memory taken for it"
    table = table_of(title, "method", "limit", "all", "largest D / N", "mean D / N")
    for method, name, limit, is_last in _methods(figures):
        rows = figures.select(profile, method, limit)
        most = Figure.of(rows, lambda row: row.peak / row.case.stages)
        mean = Figure.of(rows, lambda row: row.mean_peak / row.case.stages)
        assert most is not None
        assert mean is not None
        speed = _cell(Figure.of(rows, figures.speed))
        table.add_row(name, limit, speed, f"{most.mean:.2f}", f"{mean.mean:.2f}", end_section=is_last)
    return table


def _winners(figures: Figures, profile: str) -> Table:
    title = f"{profile}: which hint wins (percent less makespan than bfw, percent above the bound)"
    table = table_of(title, "limit", "PP", *figures.jitters)
    for limit in LIMITS:
        for stages in figures.stages:
            cells = []
            for jitter in figures.jitters:
                hint, gain, above = figures.winner(profile, stages, limit, jitter)
                cells.append(f"{ALIASES.get(hint, hint)} ({_one(gain)}, {_one(above)})")
            table.add_row(limit, str(stages), *cells, end_section=stages == figures.stages[-1])
    return table
