"""Timelines as a picture: several runs below each other on one time axis, a row a stage, a box a task.

The figure is as wide as its boxes need for their microbatch numbers to be read at 100% zoom. Only this module uses
matplotlib (extra ``plot``), without pyplot: the caller's backend and open figures stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rrfp.core.tasks import Kind
from rrfp.core.usage import WaitCause
from rrfp.errors import ConfigError
from rrfp.trace.breakdown import CAUSE_LABELS, idle_waits
from rrfp.trace.picture_file import save_picture
from rrfp.trace.spans import StepTrace, TaskSpan, WaitSpan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Colour = tuple[float, float, float]


def _hex(text: str) -> Colour:
    return int(text[1:3], 16) / 255, int(text[3:5], 16) / 255, int(text[5:7], 16) / 255


#: Distinct for all common colour blindnesses and in grey: dark, light, middle.
KIND_COLOURS = {Kind.F: _hex("#2f6db5"), Kind.B: _hex("#f5b041"), Kind.W: _hex("#4fa58c")}
KIND_LABELS = {Kind.F: "forward", Kind.B: "backward", Kind.W: "weight gradient"}
WAIT_COLOURS = {
    WaitCause.INPUT: _hex("#e9ebef"),
    WaitCause.MEMORY: _hex("#f3cfd6"),
    WaitCause.ORDER: _hex("#ddd3ee"),
    WaitCause.DRAINED: _hex("#f7f8fa"),
}
DARK, LIGHT, MUTED = "#1b1f24", "#ffffff", "#5b6470"

DPI = 144
#: Points: the number in a box, other text, and the title of a run.
NUMBER_SIZE, TEXT_SIZE, TITLE_SIZE = 6.5, 8.0, 9.0
#: Inches: a stage's row, a run's title above its rows, the left and the other margins, axis and legend at the bottom.
ROW, HEAD, SIDE, EDGE, FOOT = 0.29, 0.36, 0.66, 0.18, 0.56
#: Inches of the time axis: wide enough for the boxes within these limits.
NARROWEST, WIDEST = 9.0, 18.0
#: Part of the row's height that a box fills.
FILL = 0.86
#: A digit's width and height, and the padding around a number, as parts of its font size.
DIGIT, DIGIT_HEIGHT, PADDING = 0.64, 0.73, 0.12


def require_matplotlib(picture: str = "a timeline") -> None:
    """Raise without matplotlib; called before the work whose result is to be drawn.

    Raises:
        ConfigError: if matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError(f"{picture} needs matplotlib: pip install 'rrfp[plot]'")


def plot_timelines(rows: Sequence[tuple[str, StepTrace]], path: str | os.PathLike[str]) -> None:
    """Draw runs below each other and write a PNG, SVG or PDF, replacing an old file; see `draw_timelines`.

    Raises:
        ConfigError: if matplotlib is not installed, the suffix is none of these, or the file cannot be written.
        ValueError: if there is no run, or one without tasks.
    """
    save_picture(path, lambda: draw_timelines(rows))


def draw_timelines(rows: Sequence[tuple[str, StepTrace]]) -> Figure:
    """Draw runs below each other on one time axis, 0 being the start of each run's step.

    Args:
        rows: title and merged trace of every run, at least one; a title is followed by the run's makespan.

    Returns:
        A figure with its own canvas, unknown to pyplot.

    Raises:
        ConfigError: if matplotlib is not installed.
        ValueError: if there is no run, or one without tasks.
    """
    if not rows or not all(trace.tasks for _, trace in rows):
        raise ValueError("a timeline needs at least one run, and every run at least one task")
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = _Picture.of(rows).draw()
    FigureCanvasAgg(figure)  # becomes the figure's canvas
    return figure


@dataclass(frozen=True, slots=True)
class _Picture:
    """The runs and the common scale."""

    rows: Sequence[tuple[str, StepTrace]]
    num_stages: list[int]
    #: Seconds of the longest run.
    span: float
    #: Inches of the time axis.
    width: float
    #: Depth of each virtual stage among those of its stage, 0..1; all 0 without chunks.
    depth: dict[tuple[int, int], float]
    #: For each run, when its stages were idle.
    waits: list[list[WaitSpan]]

    @classmethod
    def of(cls, rows: Sequence[tuple[str, StepTrace]]) -> _Picture:
        span = max(trace.end - trace.start for _, trace in rows) or 1.0
        chunks: dict[int, set[int]] = {}
        for _, trace in rows:
            for box in trace.tasks:
                chunks.setdefault(box.stage, set()).add(box.task.virtual_stage)
        depth = {
            (stage, v): r / max(1, len(held) - 1) for stage, held in chunks.items() for r, v in enumerate(sorted(held))
        }
        num_stages = [1 + max(box.stage for box in trace.tasks) for _, trace in rows]
        waits = [
            [wait for stage in range(n) for wait in idle_waits(trace, stage)]
            for n, (_, trace) in zip(num_stages, rows, strict=True)
        ]
        return cls(rows, num_stages, span, _width(rows, span), depth, waits)

    def draw(self) -> Figure:
        from matplotlib.figure import Figure

        height = sum(HEAD + ROW * n for n in self.num_stages) + FOOT
        total = SIDE + self.width + EDGE
        figure = Figure(figsize=(total, height), dpi=DPI, facecolor="white")
        top = height
        for index, n in enumerate(self.num_stages):
            top -= HEAD + ROW * n
            box = (SIDE / total, top / height, self.width / total, ROW * n / height)
            axes = figure.add_axes(box)
            self._draw_run(axes, index)
            _style_time(axes, self.span, is_last=index == len(self.rows) - 1)
        self._draw_legend(figure)
        return figure

    def _draw_run(self, axes: Axes, index: int) -> None:
        from matplotlib.collections import PolyCollection

        (title, trace), num_stages, waits = self.rows[index], self.num_stages[index], self.waits[index]
        boxes = [(w.stage, w.start, w.end) for w in waits] + [(t.stage, t.start, t.end) for t in trace.tasks]
        colours = [WAIT_COLOURS[w.cause] for w in waits] + [self._colour(t) for t in trace.tasks]
        edges = ["none"] * len(waits) + ["white"] * len(trace.tasks)
        shapes = [_rectangle(stage, start - trace.start, end - trace.start) for stage, start, end in boxes]
        axes.add_collection(PolyCollection(shapes, facecolors=colours, edgecolors=edges, linewidths=0.5))
        for task in trace.tasks:
            self._draw_number(axes, task, trace.start)
        makespan = trace.end - trace.start
        axes.axvline(makespan, color=DARK, linewidth=0.9, clip_on=False)
        axes.set_ylim(num_stages - 0.5, -0.5)
        axes.set_yticks(range(num_stages), [f"stage {i}" for i in range(num_stages)], fontsize=TEXT_SIZE, color=DARK)
        above: dict[str, Any] = {"textcoords": "offset points", "va": "bottom", "fontsize": TITLE_SIZE}
        head = axes.annotate(title, (0, 1), (0, 3), xycoords="axes fraction", weight="bold", color=DARK, **above)
        scale, unit = _unit(self.span)
        text = f"makespan {makespan * scale:.4g} {unit}"
        axes.annotate(text, (1, 0), (10, 0), xycoords=head, color=MUTED, **above)

    def _colour(self, box: TaskSpan) -> Colour:
        """The kind's colour, paler for deeper chunks."""
        pale = 0.45 * self.depth[box.stage, box.task.virtual_stage]
        red, green, blue = (part + (1 - part) * pale for part in KIND_COLOURS[box.task.kind])
        return red, green, blue

    def _draw_number(self, axes: Axes, box: TaskSpan, origin: float) -> None:
        """The microbatch, upright if the box has room, else turned, else not at all."""
        text = str(box.task.microbatch)
        points = (box.end - box.start) / self.span * self.width * 72
        upright = points >= _needed(text)
        if not upright and points < (DIGIT_HEIGHT + PADDING) * NUMBER_SIZE:
            return
        middle = (box.start + box.end) / 2 - origin
        colour = _contrast(self._colour(box))
        rotation = 0 if upright else 90
        centred: dict[str, Any] = {"ha": "center", "va": "center_baseline" if upright else "center"}
        axes.text(middle, box.stage, text, fontsize=NUMBER_SIZE, color=colour, rotation=rotation, **centred)

    def _draw_legend(self, figure: Figure) -> None:
        """Below the time axis: the meaning of the colours, and the axis' label."""
        from matplotlib.patches import Patch

        kinds = {box.task.kind for _, trace in self.rows for box in trace.tasks}
        patches = [Patch(facecolor=KIND_COLOURS[kind], label=KIND_LABELS[kind]) for kind in Kind if kind in kinds]
        causes = {wait.cause for waits in self.waits for wait in waits}
        for cause in [cause for cause in WaitCause if cause in causes]:
            label = f"idle: {CAUSE_LABELS[cause]}"
            patches.append(Patch(facecolor=WAIT_COLOURS[cause], edgecolor="#b8bec8", linewidth=0.5, label=label))
        total, height = figure.get_size_inches()
        figure.legend(
            handles=patches,
            loc="lower left",
            bbox_to_anchor=(SIDE / total, EDGE / height),
            ncols=len(patches),
            frameon=False,
            fontsize=TEXT_SIZE,
            borderaxespad=0,
            borderpad=0,
            handlelength=1.4,
            columnspacing=1.6,
        )
        style: dict[str, Any] = {"ha": "right", "va": "bottom", "fontsize": TEXT_SIZE, "color": MUTED}
        figure.text(1 - EDGE / total, EDGE / height, f"time in the step ({_unit(self.span)[1]})", **style)


def _width(rows: Sequence[tuple[str, StepTrace]], span: float) -> float:
    """Inches of the time axis: wide enough for the numbers of nine boxes in ten, within the limits."""
    needed = sorted(
        _needed(str(box.task.microbatch)) / 72 * span / (box.end - box.start)
        for _, trace in rows
        for box in trace.tasks
        if box.end > box.start
    )
    return min(max(needed[len(needed) * 9 // 10], NARROWEST), WIDEST) if needed else NARROWEST


def _needed(text: str) -> float:
    """Points that a number needs."""
    return (DIGIT * len(text) + PADDING) * NUMBER_SIZE


def _rectangle(stage: int, start: float, end: float) -> list[tuple[float, float]]:
    top, bottom = stage - FILL / 2, stage + FILL / 2
    return [(start, top), (end, top), (end, bottom), (start, bottom)]


def _contrast(colour: Colour) -> str:
    """Black or white, whichever reads better on a colour (relative luminance of WCAG, without its gamma's foot)."""
    red, green, blue = (part**2.2 for part in colour)
    return LIGHT if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.3 else DARK


def _unit(span: float) -> tuple[float, str]:
    return (1.0, "s") if span >= 10 else (1e3, "ms")


def _style_time(axes: Axes, span: float, *, is_last: bool) -> None:
    """The common time axis; only the last run shows its numbers."""
    scale, _ = _unit(span)
    axes.set_xlim(0, span)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.tick_params(axis="x", labelsize=TEXT_SIZE, labelcolor=MUTED, labelbottom=is_last)
    axes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds * scale:g}")
    axes.grid(axis="x", color="#d5d9e0", linewidth=0.5)
    axes.set_axisbelow(True)
