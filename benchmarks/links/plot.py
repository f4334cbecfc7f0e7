"""One slow link as a picture; only this file of the benchmark draws.

Two panels over the delay of link 6-7, whole backwards, simulated: what a step takes, and the microbatches that all
stages hold. The bound is that of any order of whole backwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.links.simulated import LINKS, METHODS, table
from rrfp.hints.registry import DEFAULT_HINT
from rrfp.lab.simulation import simulate
from rrfp.lab.traces.pictures import (
    DARK,
    MUTED,
    TEXT_SIZE,
    TITLE_SIZE,
    method_looks,
    require_matplotlib,
    save_picture,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINK = "6-7"
#: Milliseconds each way.
_DELAYS = range(0, 61, 5)
#: By name: the label, and the size of its marks; the curves of "2n" and "auto" coincide.
_LABELS: Mapping[str, tuple[str, int]] = {
    "1F1B": ("strict 1f1b", 4),
    "whole, n": (f"{DEFAULT_HINT}, limit n", 4),
    "whole, 2n": (f"{DEFAULT_HINT}, limit 2n", 9),
    "whole, auto": (f"{DEFAULT_HINT}, limit auto", 5),
}


def plot(path: Path) -> None:
    """Draw into the file at ``path``."""
    require_matplotlib()
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(9.7, 3.6), facecolor="white")
    time, memory = picture.subplots(1, 2)
    looks = method_looks(label for label, _ in _LABELS.values())
    for method, (label, size) in _LABELS.items():
        _, options = METHODS[method]
        found = [simulate(table(LINKS[_LINK], delay, split=False), **options) for delay in _DELAYS]  # type: ignore[arg-type]
        style = {**looks[label], "label": label, "markersize": size, "linewidth": 1.2}
        time.plot(_DELAYS, [1e3 * each.makespan for each in found], **style)
        memory.plot(_DELAYS, [sum(peaks.held for peaks in each.peaks) for each in found], **style)
    undisturbed = 1e3 * simulate(table((), 0.0, split=False), hint="bf", limit="2n").makespan
    bound = [undisturbed + 2 * delay for delay in _DELAYS]
    time.plot(_DELAYS, bound, label="bound", color=MUTED, linestyle="-", linewidth=1)
    _dress(time, "milliseconds a step")
    _dress(memory, "microbatches held, sum over 8 stages")
    handles, labels = time.get_legend_handles_labels()
    picture.legend(handles, labels, loc="lower center", ncols=len(labels), fontsize=TEXT_SIZE, frameon=False)
    picture.tight_layout(rect=(0, 0.08, 1, 1))
    save_picture(path, lambda: picture)


def _dress(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=TITLE_SIZE, loc="left", color=DARK)
    axes.set_xlabel(f"link {_LINK} takes so many milliseconds each way", fontsize=TEXT_SIZE, color=MUTED)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=TEXT_SIZE, colors=MUTED)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
