"""Pictures of the paper's tables beside ours; only this file of them draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.tables import Table
from rrfp.lab.traces.pictures import require_matplotlib, save_picture

#: Paper, over blocking, over eager, at equal memory: distinct in grey and for colour-blind eyes.
_COLOURS = ("#1b1f24", "#2f6db5", "#f5b041", "#4fa58c")


def plot(tables: Mapping[str, Table], folder: Path) -> list[Path]:
    """Draw what there is to draw; returns the files."""
    require_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    both = ("table-1", "table-2")
    drawn = [_speedups(tables[name], folder / f"{name}.png") for name in both if name in tables]
    if "table-6" in tables:
        drawn.append(_jitter(tables["table-6"], folder / "table-6.png"))
    if "limit" in tables:
        drawn.append(_limits(tables["limit"], folder / "limit.png"))
    return drawn


def _speedups(table: Table, path: Path) -> Path:
    rows: Sequence[Any] = table.data
    series = {
        "paper, limit 32": [row["paper"]["bf"] for row in rows],
        "ours over blocking 1F1B": [row["over_blocking"]["bf"] for row in rows],
        "ours over eager 1F1B": [row["over_eager"]["bf"] for row in rows],
        "ours at 1F1B's memory, over eager": [row["equal_memory"]["bf"] for row in rows],
    }
    figure, axes = _figure(9.5, 1.4 + 0.52 * len(rows))
    height = 0.8 / len(series)
    for place, ((label, values), colour) in enumerate(zip(series.items(), _COLOURS, strict=True)):
        positions = [row + (place - (len(series) - 1) / 2) * height for row in range(len(rows))]
        axes.barh(positions, values, height * 0.92, label=label, color=colour)
    axes.axvline(1.0, color="#5b6470", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [str(row["spelled_out"]) for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("speed-up of BF over 1F1B")
    axes.set_title(table.title, fontsize=10, loc="left")
    figure.legend(loc="lower center", ncols=2, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.62 / figure.get_figheight(), 1, 1))
    save_picture(path, lambda: figure)
    return path


def _jitter(table: Table, path: Path) -> Path:
    rows: Sequence[Any] = table.data
    levels = [row["level"] for row in rows]
    lines = {
        "1F1B, paper": ([row["paper"][0] for row in rows], _COLOURS[0], "--"),
        "RRFP, paper": ([row["paper"][1] for row in rows], _COLOURS[1], "--"),
        "1F1B eager, ours": ([row["eager"] for row in rows], _COLOURS[0], "-"),
        "BF limit 32, ours": ([row["bf"] for row in rows], _COLOURS[1], "-"),
        "BF at 1F1B's memory, ours": ([row["bf_equal_memory"] for row in rows], _COLOURS[3], "-"),
    }
    figure, axes = _figure(6.5, 4.0)
    for label, (values, colour, style) in lines.items():
        axes.plot(levels, values, style, color=colour, marker="o", markersize=4, label=label)
    axes.set_ylabel("slowdown against the method's own J0, percent")
    axes.set_xlabel("jitter level")
    axes.set_title(table.title, fontsize=10, loc="left")
    axes.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    save_picture(path, lambda: figure)
    return path


def _limits(table: Table, path: Path) -> Path:
    rows: Sequence[Any] = table.data
    figure, axes = _figure(6.5, 3.6)
    axes.plot([row["limit"] for row in rows], [row["over_eager"] for row in rows], "o-", color=_COLOURS[1])
    axes.axhline(1.0, color="#5b6470", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks([row["limit"] for row in rows], [str(row["limit"]) for row in rows])
    axes.set_xlabel("limit: microbatches a stage may hold")
    axes.set_ylabel("speed-up over eager 1F1B")
    axes.set_title(table.title, fontsize=10, loc="left")
    figure.tight_layout()
    save_picture(path, lambda: figure)
    return path


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
