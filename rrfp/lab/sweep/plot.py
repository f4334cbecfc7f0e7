"""A sweep as a picture: one small panel for each workload, a line a method, speed above and the memory it took below.

Speed is bought with memory, so no panel shows one without the other. All panels have the same scales. Points are means
over seeds, whiskers reach from the least to the largest. Only here and in `rrfp.lab.traces.timeline` is matplotlib used
(extra ``plot``), without pyplot.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rrfp.errors import ConfigError
from rrfp.lab.sweep.runs import SweepRow, text_of
from rrfp.lab.sweep.summary import MethodSummary, Spread, changing, in_common, label, named, summarise
from rrfp.lab.traces.pictures import (
    DARK,
    DPI,
    MUTED,
    TEXT_SIZE,
    TITLE_SIZE,
    method_looks,
    require_matplotlib,
    save_picture,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Box = tuple[float, float, float, float]

#: The most that a reader can distinguish, and that fits a picture.
MOST_METHODS, MOST_WORKLOADS = 16, 240

#: What may be the horizontal axis, the best first.
ACROSS = ("stages", "microbatches", "tp", "chunks", "jitter", "latency", "placement", "profile", "split", "costs")

#: Inches: a panel's width and the height of its two parts, the seam between these, the gap between columns.
WIDTH, SPEED, MEMORY, SEAM, GAP = 3.1, 2.0, 0.9, 0.08, 0.22
#: Inches: margins, the axis below a panel, a line of text, a line of the legend.
LEFT, RIGHT, EDGE, AXIS, LINE, LEGEND_LINE = 0.82, 0.2, 0.16, 0.42, 0.2, 0.167
#: Panels beside each other, inches of a method's entry in the legend, and characters of text in an inch.
MOST_COLUMNS, ENTRY, CHARACTERS = 4, 2.1, 15
#: How far apart methods are drawn, at most, and all together, in units of the horizontal axis.
APART, SPREAD_OUT = 0.025, 0.12


def check_size(methods: int, workloads: int) -> None:
    """Refuse an unreadable picture before the sweep runs."""
    for what, count, most in (("methods", methods, MOST_METHODS), ("workloads", workloads, MOST_WORKLOADS)):
        if count > most:
            raise ConfigError(
                f"a plot shows at most {most} {what}, this sweep has {count}: take fewer, or only the CSV"
            )


def plot_sweep(rows: Sequence[SweepRow], path: str | os.PathLike[str]) -> None:
    save_picture(path, lambda: draw_sweep(rows))


def draw_sweep(rows: Sequence[SweepRow]) -> Figure:
    # The first of `ACROSS` that varies is the horizontal axis, every combination of the others a panel. Speed is the
    # speed-up over the first strict method where every workload has one, else makespan over lower bound.
    if not rows:
        raise ValueError("a plot needs at least one row")
    require_matplotlib("a plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = _Picture.of(rows).draw()
    FigureCanvasAgg(figure)  # becomes the figure's canvas
    return figure


#: What one combination of workload values shows: its title, and the methods.
_Panel = tuple[str, list[MethodSummary]]


@dataclass(frozen=True, slots=True)
class _Picture:
    rows: Sequence[SweepRow]
    panels: list[_Panel]
    columns: int
    #: Column of the horizontal axis, and its values.
    across: str
    ticks: list[Any]
    #: By label, how its line looks.
    methods: Mapping[str, Mapping[str, Any]]
    #: What speed-ups are over; None where there are none.
    over: str | None

    @classmethod
    def of(cls, rows: Sequence[SweepRow]) -> _Picture:
        groups = summarise(rows)
        methods = method_looks(dict.fromkeys(group.label for group in groups))
        check_size(len(methods), len({tuple(group.workload.values()) for group in groups}))
        columns = changing(rows)
        across = next((column for column in ACROSS if column in columns), ACROSS[0])
        others = [column for column in columns if column != across]
        panels: dict[tuple[Any, ...], _Panel] = {}
        for group in groups:
            key = tuple(group.workload[column] for column in others)
            title = ", ".join(named(column, value) for column, value in zip(others, key, strict=True))
            panels.setdefault(key, (title, []))[1].append(group)
        last = len({key[-1] for key in panels}) if len(others) > 1 else len(panels)
        baselines = {label(group.baseline[0]) if group.baseline else None for group in groups}
        over = next(iter(baselines)) if len(baselines) == 1 else None
        ticks = list(dict.fromkeys(getattr(row, across) for row in rows))
        return cls(rows, list(panels.values()), min(last, MOST_COLUMNS), across, ticks, methods, over)

    def draw(self) -> Figure:
        from matplotlib.figure import Figure

        layout = _Layout.of(self)
        figure = Figure(figsize=(layout.width, layout.height), dpi=DPI, facecolor="white")
        speeds: list[Axes] = []
        memories: list[Axes] = []
        for index, panel in enumerate(self.panels):
            speed, memory = layout.boxes(index)
            speeds.append(figure.add_axes(speed, sharey=speeds[0] if speeds else None))
            memories.append(figure.add_axes(memory, sharey=memories[0] if memories else None, sharex=speeds[-1]))
            self._draw_panel(panel, speeds[-1], memories[-1], is_first=index % self.columns == 0)
        memories[0].set_ylim(0, 1.15 * max(row.peak_max for row in self.rows))
        where: dict[str, Any] = {"x": LEFT / layout.width, "y": 1 - EDGE / layout.height, "va": "top"}
        figure.text(s=layout.head, fontsize=TITLE_SIZE, weight="bold", color=DARK, **where)
        figure.legend(
            handles=[self._handle(name) for name in self.methods],
            loc="lower left",
            bbox_to_anchor=(LEFT / layout.width, EDGE / layout.height),
            ncols=layout.entries,
            frameon=False,
            fontsize=TEXT_SIZE,
            borderaxespad=0,
            borderpad=0,
            labelcolor=DARK,
        )
        return figure

    def _draw_panel(self, panel: _Panel, speed: Axes, memory: Axes, *, is_first: bool) -> None:
        from matplotlib.ticker import MaxNLocator

        title, every = panel
        for place, name in enumerate(self.methods):
            groups = [group for group in every if group.label == name]
            self._draw_method(speed, name, place, groups, [self._speed(group) for group in groups])
            self._draw_method(memory, name, place, groups, [group.spread("peak_max") for group in groups])
        speed.axhline(1, color=MUTED, linewidth=0.8, zorder=0)
        speed.set_title(_wrapped(title, WIDTH), fontsize=TEXT_SIZE, color=DARK, loc="left", pad=4)
        memory.set_xlim(-0.5, len(self.ticks) - 0.5)
        memory.set_xticks(range(len(self.ticks)), [text_of(tick) for tick in self.ticks])
        memory.set_xlabel(self.across, fontsize=TEXT_SIZE, color=MUTED)
        what = "makespan / lower bound" if self.over is None else f"speed-up over\n{self.over}"
        for axes, text, ticks in ((speed, what, 6), (memory, "peak held", 3)):
            axes.yaxis.set_major_locator(MaxNLocator(ticks, integer=axes is memory))
            _style(axes, text if is_first else "", has_numbers=is_first)
        speed.tick_params(labelbottom=False)

    def _draw_method(
        self, axes: Axes, name: str, place: int, groups: list[MethodSummary], spreads: list[Spread]
    ) -> None:
        if not groups:
            return
        step = min(APART, SPREAD_OUT / len(self.methods))
        shift = (place - (len(self.methods) - 1) / 2) * step
        x = [self.ticks.index(group.workload[self.across]) + shift for group in groups]
        mean = [spread.mean for spread in spreads]
        low = [max(0.0, spread.mean - spread.min) for spread in spreads]
        high = [max(0.0, spread.max - spread.mean) for spread in spreads]
        axes.errorbar(x, mean, yerr=[low, high], elinewidth=0.8, **self._look(name))

    def _speed(self, group: MethodSummary) -> Spread:
        speed_up = None if self.over is None else group.speed_up
        return group.spread("ratio") if speed_up is None else speed_up

    def _look(self, name: str) -> dict[str, Any]:
        return {**self.methods[name], "markersize": 4.4, "linewidth": 1.1}

    def _handle(self, name: str) -> Any:
        from matplotlib.lines import Line2D

        return Line2D([], [], label=name, **self._look(name))


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where everything is, in inches."""

    width: float
    height: float
    #: From the top to the first panel, from a panel's top to that of the panel below.
    top: float
    pitch: float
    columns: int
    #: Methods in a line of the legend.
    entries: int
    head: str

    @classmethod
    def of(cls, picture: _Picture) -> _Layout:
        columns, panels = picture.columns, picture.panels
        lines = -(-len(panels) // columns)
        plots = columns * WIDTH + (columns - 1) * GAP
        entries = max(1, min(len(picture.methods), int(plots // ENTRY)))
        head = _wrapped(in_common(picture.rows), 0.85 * plots)  # it is larger than other text
        title = LINE * max(len(_wrapped(title, WIDTH).splitlines()) for title, _ in panels)
        top = EDGE + LINE * (1 + head.count("\n")) + title + 0.1
        pitch = SPEED + SEAM + MEMORY + AXIS + title
        legend = LEGEND_LINE * -(-len(picture.methods) // entries)
        height = top + lines * pitch - title + legend + EDGE
        return cls(LEFT + plots + RIGHT, height, top, pitch, columns, entries, head)

    def boxes(self, index: int) -> tuple[Box, Box]:
        """Both parts of a panel: left, bottom, width and height, relative."""
        line, column = divmod(index, self.columns)
        left, bottom = LEFT + column * (WIDTH + GAP), self.height - self.top - line * self.pitch - SPEED
        return self._box(left, bottom, SPEED), self._box(left, bottom - SEAM - MEMORY, MEMORY)

    def _box(self, left: float, bottom: float, height: float) -> Box:
        return left / self.width, bottom / self.height, WIDTH / self.width, height / self.height


def _wrapped(text: str, inches: float) -> str:
    return "\n".join(textwrap.wrap(text, int(inches * CHARACTERS)))


def _style(axes: Axes, text: str, *, has_numbers: bool) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b8bec8")
    axes.tick_params(length=0, labelsize=TEXT_SIZE, labelcolor=MUTED, labelleft=has_numbers)
    axes.grid(axis="y", color="#e3e6eb", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.set_ylabel(text, fontsize=TEXT_SIZE, color=MUTED)
