"""The hints benchmark as a picture; only this file of it draws."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.hints.figures import Figure, Figures
from benchmarks.hints.runs import ALIASES, LIMITS, STRICT, Row
from rrfp.trace.plot import DARK, DPI, MUTED, TEXT_SIZE, TITLE_SIZE, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Distinct for all common colour blindnesses (Okabe and Ito's palette), ours the strongest.
_STYLES = {
    "bfw": ("#000000", "o"),
    "fb": ("#b8bec8", "s"),
    "b-priority": ("#cc79a7", "v"),
    "f-priority": ("#e69f00", "^"),
    "slot-aware": ("#56b4e9", "D"),
    "bfw-pyramid": ("#009e73", "P"),
    "slot-aware-pyramid": ("#d55e00", "o"),
    "1f1b": ("#5b6470", "x"),
    "zb-h1": ("#5b6470", "+"),
}


def plot(figures: Figures, path: Path) -> None:
    """A row a profile, a column a limit: percent above the bound over PP, mean over jitter levels and seeds."""
    require_matplotlib()
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(11.0, 0.9 + 2.9 * len(figures.profiles)), dpi=DPI, facecolor="white")
    grid = picture.subplots(len(figures.profiles), len(LIMITS), sharex=True, sharey="row", squeeze=False)
    for axes_row, profile in zip(grid, figures.profiles, strict=True):
        for axes, limit in zip(axes_row, LIMITS, strict=True):
            _panel(axes, figures, profile, limit)
        axes_row[0].set_ylabel("percent above the bound", fontsize=TEXT_SIZE, color=MUTED)
    for axes in grid[-1]:
        axes.set_xlabel("stages (PP)", fontsize=TEXT_SIZE, color=MUTED)
    named = {label: handle for axes in grid[0] for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    picture.legend(named.values(), named.keys(), loc="lower center", ncols=5, fontsize=TEXT_SIZE, frameon=False)
    picture.tight_layout(rect=(0, 0.5 / picture.get_figheight(), 1, 1))
    picture.savefig(path, format="png")


def _panel(axes: Axes, figures: Figures, profile: str, limit: str) -> None:
    memory = {"1f1b": "N - i on stage i", "N": "N", "2N": "2N"}[limit]
    axes.set_title(f"{profile}, memory {memory}", fontsize=TITLE_SIZE, loc="left", color=DARK)
    methods = [method for method, column in figures.runs() if column == limit]
    for place, method in enumerate(methods):
        colour, shape = _STYLES[method]
        label = f"strict {method}" if method in STRICT else ALIASES.get(method, method)
        cells = [Figure.of(figures.select(profile, method, limit, stages=n), _above) for n in figures.stages]
        shown = [(n, cell) for n, cell in zip(figures.stages, cells, strict=True) if cell is not None]
        axes.errorbar(
            # A little apart, so that whiskers of equal methods can be distinguished.
            [n * 1.02 ** (place - len(methods) / 2) for n, _ in shown],
            [cell.mean for _, cell in shown],
            [cell.spread for _, cell in shown],
            label=label,
            color=colour,
            marker=shape,
            markersize=4,
            linewidth=1.6 if method == figures.hints[-1] else 0.9,
            elinewidth=0.7,
            capsize=1.5,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(figures.stages, [str(n) for n in figures.stages], minor=False)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#e3e6ea", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=TEXT_SIZE, labelcolor=MUTED, length=2)


def _above(row: Row) -> float:
    return row.above
