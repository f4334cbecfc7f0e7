"""The hints benchmark as a picture; only this file of it draws.

Two panels: the memory of 1F1B, and twice as many microbatches on every stage. A row a method, so that no method hides
another: its points are the numbers of stages, from left to right the percent above the bound.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.hints.figures import Figure, Figures
from benchmarks.hints.runs import ALIASES, LIMITS, STRICT, Row
from rrfp.lab.traces.pictures import DARK, MUTED, TEXT_SIZE, TITLE_SIZE, require_matplotlib, save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Colour and shape of each number of stages: darker and of another shape as they grow.
_STYLES = (("#9ecae1", "o"), ("#6baed6", "s"), ("#3182bd", "^"), ("#08519c", "D"), ("#1b1f24", "P"))
#: The workload that is drawn.
PROFILE = "mllm"
_MEMORY = {"1f1b": "N - i on stage i", "N": "N", "2N": "2N"}


def plot(figures: Figures, path: Path) -> None:
    """A panel a limit, a row a method: percent above the bound, mean over jitter levels; of mllm where it ran."""
    require_matplotlib()
    from matplotlib.figure import Figure as Picture

    profile = PROFILE if PROFILE in figures.profiles else figures.profiles[0]
    limits = (LIMITS[0], LIMITS[-1])
    ran = {row.method for limit in limits for row in figures.rows if row.limit == limit}
    methods = [method for method in (*figures.strict, *figures.hints) if method in ran]
    picture = Picture(figsize=(9.7, 1.35 + 0.3 * len(methods)), facecolor="white")
    grid = picture.subplots(1, len(limits), sharex=True, sharey=True, squeeze=False)[0]
    for axes, limit in zip(grid, limits, strict=True):
        _panel(axes, figures, profile, limit, methods)
        axes.set_xlabel("percent above the bound", fontsize=TEXT_SIZE, color=MUTED)
    handles, labels = grid[-1].get_legend_handles_labels()
    picture.legend(handles, labels, loc="lower center", ncols=len(labels), fontsize=TEXT_SIZE, frameon=False)
    picture.tight_layout(rect=(0, 0.28 / picture.get_figheight(), 1, 1))
    save_picture(path, lambda: picture)


def _panel(axes: Axes, figures: Figures, profile: str, limit: str, methods: list[str]) -> None:
    axes.set_title(f"{profile}, memory {_MEMORY[limit]}", fontsize=TITLE_SIZE, loc="left", color=DARK)
    for number, n in enumerate(figures.stages):
        colour, shape = _STYLES[number % len(_STYLES)]
        cells = {
            row: cell
            for row, method in enumerate(methods)
            if (cell := Figure.of(figures.select(profile, method, limit, stages=n), _above)) is not None
        }
        axes.errorbar(
            [cell.mean for cell in cells.values()],
            list(cells),
            xerr=[cell.spread for cell in cells.values()],
            linestyle="none",
            label=f"{n} stages",
            color=colour,
            marker=shape,
            markersize=5,
            elinewidth=0.7,
            capsize=1.5,
        )
    axes.set_yticks(range(len(methods)), [_name(method) for method in methods])
    axes.set_ylim(len(methods) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.grid(color="#e3e6ea", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=TEXT_SIZE, labelcolor=MUTED, length=2)


def _name(method: str) -> str:
    return f"strict {method}" if method in STRICT else ALIASES.get(method, method)


def _above(row: Row) -> float:
    return row.above
