"""Timelines as a picture: several runs below each other on one time axis, a row a stage, a box a task.

Boxes carry the number of their microbatch. Where most would be too thin for one, the figure has the dense form: thin
rows without numbers, and below each run the share of its stages that compute or wait.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rrfp.core.usage import WaitCause
from rrfp.errors import ConfigError
from rrfp.lab.traces.pictures import (
    DARK,
    DPI,
    FRAME,
    IDLE_LOOKS,
    KIND_COLOURS,
    MUTED,
    NUMBER_SIZE,
    TEXT_SIZE,
    TITLE_SIZE,
    contrast,
    kind_colour,
    require_matplotlib,
    save_picture,
)
from rrfp.model.tasks import KINDS, Kind
from rrfp.trace.breakdown import CAUSE_LABELS, blank_seconds, idle_waits
from rrfp.trace.spans import StepTrace, TaskSpan, WaitSpan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """From ``start`` to ``end``, seconds of the step; None is its end."""

    start: float = 0.0
    end: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start) and self.start >= 0):
            raise ConfigError(f"from is {_text(self.start)}, must be 0 ms or more")
        if self.end is not None and not (math.isfinite(self.end) and self.end > self.start):
            raise ConfigError(f"to is {_text(self.end)}, must be more than from ({_text(self.start)})")

    @classmethod
    def of_milliseconds(cls, start: float | None, end: float | None) -> TimeWindow:
        return cls(0.0 if start is None else start / 1e3, None if end is None else end / 1e3)

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.end is None

    def within(self, span: float) -> tuple[float, float]:
        """Start and end of the part of a step of ``span`` seconds."""
        if self.start > 0 and self.start >= span:
            raise ConfigError(f"from is {_text(self.start)}, must be less than the step's {_text(span)}")
        return self.start, span if self.end is None else min(self.end, span)


WHOLE = TimeWindow()


def _text(seconds: float) -> str:
    return f"{seconds * 1e3:.6g} ms"


#: What the breakdown calls time that is left blank.
OTHER_LABEL = "other: the runtime"

#: Inches of an entry beside its text, of a character, and of the axis' label beside the legend.
_ENTRY, _CHARACTER, _LABEL = 0.5, 0.068, 1.6


def virtual_stages(traces: Iterable[StepTrace]) -> dict[int, list[int]]:
    """By stage those whose tasks it ran, ascending."""
    held: dict[int, set[int]] = defaultdict(set)
    for trace in traces:
        for span in trace.tasks:
            held[span.stage].add(span.task.virtual_stage)
    return {stage: sorted(own) for stage, own in held.items()}


def part_of(name: str) -> str:
    """The part that a virtual stage's name begins with: ``vision`` of ``vision.0``."""
    return name.partition(".")[0]


def legend_lines(entries: Sequence[tuple[Any, str]], width: float) -> int:
    """Lines that the legend needs in a picture ``width`` inches wide."""
    return max(1, math.ceil(sum(_ENTRY + _CHARACTER * len(label) for _, label in entries) / (width - _LABEL)))


def draw_legend(figure: Figure, entries: Sequence[tuple[Any, str]], chunks: int, lines: int) -> None:
    """Put the legend at the lower left."""
    from matplotlib.legend_handler import HandlerTuple

    total, height = figure.get_size_inches()
    handles, labels = zip(*entries, strict=True)
    figure.legend(
        handles,
        labels,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.15)},
        loc="lower left",
        bbox_to_anchor=(SIDE / total, EDGE / height),
        ncols=math.ceil(len(entries) / lines),
        frameon=False,
        fontsize=TEXT_SIZE,
        borderaxespad=0,
        borderpad=0,
        handlelength=1.6 * max(1.0, 0.8 * chunks),
        columnspacing=1.6,
        labelspacing=0.35,
    )


State = Kind | WaitCause


def shares(
    trace: StepTrace, waits: Iterable[WaitSpan], stages: int, start: float, end: float, bins: int
) -> dict[State, list[float]]:
    """The part of the stages in each state, by equal intervals."""
    width = (end - start) / bins
    seconds: dict[State, list[float]] = defaultdict(lambda: [0.0] * bins)
    tasks: list[tuple[State, TaskSpan | WaitSpan]] = [(span.task.kind, span) for span in trace.tasks]
    for state, span in [*tasks, *((wait.cause, wait) for wait in waits)]:
        low, high = max(span.start - trace.start, start), min(span.end - trace.start, end)
        if high <= low:
            continue
        for index in range(int((low - start) / width), min(bins - 1, int((high - start) / width)) + 1):
            begin = start + index * width
            seconds[state][index] += max(0.0, min(high, begin + width) - max(low, begin))
    return {state: [part / (width * stages) for part in parts] for state, parts in seconds.items()}


#: Inches: a run's title above its rows, the left, the right and the other margins, the axis at the bottom, a line of
#: the legend.
HEAD, SIDE, RIGHT, EDGE, AXIS, LINE = 0.36, 0.66, 0.72, 0.18, 0.22, 0.17
#: Inches: a row with numbers, a dense row of a run with few stages and with many, the panel of shares and its gap.
ROW, DENSE_ROW, THIN_ROW, SHARES, GAP = 0.36, 0.24, 0.11, 1.1, 0.12
#: Inches of a picture: 1,400 pixels, which a page shows whole.
WIDTH = 1400 / DPI
#: The most stages that have rows of DENSE_ROW.
FEW_STAGES = 24
#: Part of the row's height that a box fills.
FILL = 0.86
#: A digit's width and height, and the padding around a number, as parts of its font size.
DIGIT, DIGIT_HEIGHT, PADDING = 0.64, 0.88, 0.12
#: With fewer boxes a picture never has the dense form; and it has it where a smaller share of them has a number.
FEW_BOXES, NUMBERED = 100, 0.5
#: The least part of a stage's time that, left blank, has an entry in the legend.
BLANK = 0.03
#: Intervals of the panel of shares.
BINS = 180


@dataclass(frozen=True, slots=True)
class TimelineRun:
    """One run: what is drawn of it."""

    title: str
    trace: StepTrace
    #: The recorded stages; each has a row.
    stages: list[int]
    waits: list[WaitSpan]

    @classmethod
    def of(cls, title: str, trace: StepTrace) -> TimelineRun:
        stages = sorted({span.stage for span in trace.tasks} | {span.stage for span in trace.waits})
        return cls(title, trace, stages, [wait for stage in stages for wait in idle_waits(trace, stage)])

    @property
    def makespan(self) -> float:
        return self.trace.end - self.trace.start


@dataclass(frozen=True, slots=True)
class Timelines:
    """The runs, and what they share."""

    runs: list[TimelineRun]
    window: TimeWindow
    #: start, end: seconds after each step's start between which it is shown.
    start: float
    end: float
    #: Inches of the time axis.
    width: float
    #: Whether the boxes have no numbers.
    is_dense: bool
    has_panels: bool
    chunk_of: dict[tuple[int, int], int]
    #: Chunk of each virtual stage on its stage, and how many there are at most; of graphs, its part.
    chunks: int
    parts: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        rows: Sequence[tuple[str, StepTrace]],
        window: TimeWindow,
        names: Sequence[str],
        width: float,
        *,
        panels: bool,
    ) -> Timelines:
        """Decide the form; ``names`` are those of virtual stages, if any."""
        runs = [TimelineRun.of(title, trace) for title, trace in rows]
        start, end = window.within(max(run.makespan for run in runs))
        end = end if end > start else start + 1.0
        held = virtual_stages(run.trace for run in runs)
        chunk_of = {(stage, v): chunk for stage, vs in held.items() for chunk, v in enumerate(vs)}
        shown = [box for run in runs for box in run.trace.tasks if _is_inside(box, run.trace.start, start, end)]
        width -= SIDE + RIGHT
        numbered = sum(_room(box, width / (end - start)) is not None for box in shown)
        is_dense = len(shown) > FEW_BOXES and numbered < NUMBERED * len(shown)
        chunks, parts = max(map(len, held.values())), list(dict.fromkeys(map(part_of, names)))
        if parts:
            chunk_of = {(stage, v): parts.index(part_of(names[v])) for stage, v in chunk_of}
        return cls(
            runs, window, start, end, width, is_dense, is_dense and panels, chunk_of, len(parts) or chunks, parts
        )

    def draw(self) -> Figure:
        from matplotlib.figure import Figure

        entries = self._entries()
        lines = legend_lines(entries, self.width)
        rows = [self._row_height(run) * len(run.stages) for run in self.runs]
        below = SHARES + GAP if self.has_panels else 0.0
        height = sum(HEAD + row + below for row in rows) + AXIS + LINE * lines + EDGE
        total = SIDE + self.width + RIGHT
        figure = Figure(figsize=(total, height), dpi=DPI, facecolor="white")

        def axes(bottom: float, inches: float) -> Axes:
            return figure.add_axes((SIDE / total, bottom / height, self.width / total, inches / height))

        top = height
        for run, row in zip(self.runs, rows, strict=True):
            top -= HEAD + row
            is_last = run is self.runs[-1]
            self._draw_run(boxes := axes(top, row), run)
            self._style_time(boxes, has_numbers=is_last and not self.has_panels)
            if self.has_panels:
                top -= below
                self._draw_shares(panel := axes(top, SHARES), run)
                self._style_time(panel, has_numbers=is_last)
        draw_legend(figure, entries, self.chunks, lines)
        style: dict[str, Any] = {"ha": "right", "va": "bottom", "fontsize": TEXT_SIZE, "color": MUTED}
        figure.text(1 - RIGHT / total, EDGE / height, f"time in the step ({self._unit[1]})", **style)
        return figure

    @property
    def _unit(self) -> tuple[float, str]:
        return (1.0, "s") if self.end >= 10 else (1e3, "ms")

    def _row_height(self, run: TimelineRun) -> float:
        if not self.is_dense:
            return ROW
        return DENSE_ROW if len(run.stages) <= FEW_STAGES else THIN_ROW

    def _entries(self) -> list[tuple[Any, str]]:
        """The legend: kinds, with a patch for each chunk or part, causes, and blank time, as far as they are shown."""
        from matplotlib.patches import Patch

        chunks: dict[Kind, set[int]] = defaultdict(set)
        for run in self.runs:
            for box in run.trace.tasks:
                if self._shows(box, run):
                    chunks[box.task.kind].add(self._chunk(box))
        causes = {wait.cause for run in self.runs for wait in run.waits if self._shows(wait, run)}
        entries: list[tuple[Any, str]] = []
        for kind in [kind for kind in Kind if kind in chunks]:
            patches = tuple(Patch(facecolor=kind_colour(kind, n, self.chunks)) for n in sorted(chunks[kind]))
            entries.append((patches, self._kind_label(kind, sorted(chunks[kind]), len(set.union(*chunks.values())))))
        for cause in [cause for cause in WaitCause if cause in causes]:
            look = IDLE_LOOKS[cause]
            # The frame has the hatch's ink: matplotlib draws both in one colour.
            edge = FRAME if look.hatch is None else look.ink
            patch = Patch(facecolor=look.face, edgecolor=edge, hatch=look.hatch, linewidth=0.5)
            entries.append((patch, f"idle: {CAUSE_LABELS[cause]}"))
        if any(self._is_blank(run, stage) for run in self.runs for stage in run.stages):
            entries.append((Patch(facecolor="white", edgecolor=FRAME, linewidth=0.5), OTHER_LABEL))
        return entries

    def _kind_label(self, kind: Kind, numbers: Sequence[int], count: int) -> str:
        if self.parts:
            return f"{KINDS[kind].label}: {', '.join(self.parts[number] for number in numbers)}"
        chunks = ", ".join(map(str, numbers)) if len(numbers) < 4 else f"{numbers[0]} to {numbers[-1]}"
        return f"{KINDS[kind].label}, chunk {chunks}" if count > 1 else KINDS[kind].label

    def _is_blank(self, run: TimelineRun, stage: int) -> bool:
        """Whether the runtime's own time is a visible part."""
        origin, end = run.trace.start, min(self.end, run.makespan)
        blank = blank_seconds(run.trace, stage, origin + self.start, origin + end)
        return blank > BLANK * (end - self.start) > 0

    def _shows(self, span: TaskSpan | WaitSpan, run: TimelineRun) -> bool:
        return _is_inside(span, run.trace.start, self.start, self.end)

    def _chunk(self, box: TaskSpan) -> int:
        return self.chunk_of[box.stage, box.task.virtual_stage]

    def _draw_run(self, axes: Axes, run: TimelineRun) -> None:
        row_of = {stage: row for row, stage in enumerate(run.stages)}
        tasks = [box for box in run.trace.tasks if self._shows(box, run)]
        for cause, look in IDLE_LOOKS.items():
            waits = [wait for wait in run.waits if wait.cause is cause and self._shows(wait, run)]
            shapes = [self._rectangle(wait, run, row_of[wait.stage]) for wait in waits]
            _add_boxes(axes, shapes, [look.face], look.ink, hatch=look.hatch, linewidths=0)
        shapes = [self._rectangle(box, run, row_of[box.stage]) for box in tasks]
        colours = [kind_colour(box.task.kind, self._chunk(box), self.chunks) for box in tasks]
        # A white edge would cover most of a thin box.
        _add_boxes(axes, shapes, colours, "white", linewidths=0 if self.is_dense else 0.5)
        if not self.is_dense:
            for box, colour in zip(tasks, colours, strict=True):
                self._draw_number(axes, box, run, row_of[box.stage], contrast(colour))
        if self.start <= run.makespan <= self.end:
            axes.axvline(run.makespan, color=DARK, linewidth=0.9, clip_on=False)
        self._label_rows(axes, run)

    def _label_rows(self, axes: Axes, run: TimelineRun) -> None:
        rows = len(run.stages)
        axes.set_ylim(rows - 0.5, -0.5)
        every = 1 if self._row_height(run) > THIN_ROW else 4
        ticks = range(0, rows, every)
        axes.set_yticks(ticks, [f"stage {run.stages[row]}" for row in ticks], fontsize=TEXT_SIZE, color=DARK)
        beside: dict[str, Any] = {"textcoords": "offset points", "va": "center", "annotation_clip": False}
        for row in ticks:
            share = self._idle_share(run, run.stages[row])
            axes.annotate(share, (self.end, row), (6, 0), fontsize=TEXT_SIZE, color=MUTED, **beside)
        above: dict[str, Any] = {"textcoords": "offset points", "va": "bottom", "fontsize": TITLE_SIZE}
        head = axes.annotate(run.title, (0, 1), (0, 3), xycoords="axes fraction", weight="bold", color=DARK, **above)
        scale, unit = self._unit
        text = f"makespan {run.makespan * scale:.4g} {unit}"
        if not self.window.is_whole:
            text += f"; {self.start * scale:.6g} to {self.end * scale:.6g} {unit} shown"
        axes.annotate(text, (1, 0), (10, 0), xycoords=head, color=MUTED, **above)

    def _idle_share(self, run: TimelineRun, stage: int) -> str:
        """The part of the shown time in which the stage runs no task."""
        origin, end = run.trace.start, min(self.end, run.makespan)
        spans = [(box.start - origin, box.end - origin) for box in run.trace.tasks if box.stage == stage]
        busy = sum(max(0.0, min(high, end) - max(low, self.start)) for low, high in spans)
        return f"{max(0.0, 1 - busy / (end - self.start)):.0%} idle" if end > self.start else ""

    def _draw_number(self, axes: Axes, box: TaskSpan, run: TimelineRun, row: int, colour: str) -> None:
        """The microbatch in the box, upright or turned, if there is room."""
        low = max(box.start - run.trace.start, self.start)
        high = min(box.end - run.trace.start, self.end)
        rotation = _room(box, self.width / (self.end - self.start), high - low)
        if rotation is None:
            return
        centred: dict[str, Any] = {"ha": "center", "va": "center" if rotation else "center_baseline"}
        text = str(box.task.microbatch)
        axes.text((low + high) / 2, row, text, fontsize=NUMBER_SIZE, color=colour, rotation=rotation, **centred)

    def _draw_shares(self, axes: Axes, run: TimelineRun) -> None:
        """Tasks by kind, idle times by cause; blank is the runtime's own."""
        end = min(self.end, run.makespan)
        if end <= self.start:
            return
        parts = shares(run.trace, run.waits, len(run.stages), self.start, end, BINS)
        edges = [self.start + (end - self.start) * index / BINS for index in range(BINS + 1)]
        floor = [0.0] * BINS
        for state in (*Kind, *WaitCause):
            if state not in parts:
                continue
            top = [low + part for low, part in zip(floor, parts[state], strict=True)]
            style: dict[str, Any] = {"linewidth": 0, "step": "post"}
            if isinstance(state, Kind):
                style |= {"facecolor": KIND_COLOURS[state]}
            else:
                look = IDLE_LOOKS[state]
                style |= {"facecolor": look.face, "edgecolor": look.ink, "hatch": look.hatch}
            axes.fill_between(edges, [*floor, floor[-1]], [*top, top[-1]], **style)
            floor = top
        axes.set_ylim(0, 1)
        axes.set_yticks([0, 0.5, 1], ["0%", "50%", "100%"], fontsize=TEXT_SIZE, color=MUTED)
        axes.set_ylabel("of the stages", fontsize=TEXT_SIZE, color=MUTED, labelpad=2)

    def _rectangle(self, span: TaskSpan | WaitSpan, run: TimelineRun, row: int) -> list[tuple[float, float]]:
        start, end = span.start - run.trace.start, span.end - run.trace.start
        top, bottom = row - FILL / 2, row + FILL / 2
        return [(start, top), (end, top), (end, bottom), (start, bottom)]

    def _style_time(self, axes: Axes, *, has_numbers: bool) -> None:
        scale, _ = self._unit
        axes.set_xlim(self.start, self.end)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        axes.tick_params(axis="x", labelsize=TEXT_SIZE, labelcolor=MUTED, labelbottom=has_numbers)
        axes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds * scale:g}")
        axes.grid(axis="x", color="#d5d9e0", linewidth=0.5)
        axes.set_axisbelow(True)


def _add_boxes(axes: Axes, shapes: Any, colours: Any, edge: Any, **style: Any) -> None:
    from matplotlib.collections import PolyCollection

    if shapes:
        axes.add_collection(PolyCollection(shapes, facecolors=colours, edgecolors=[edge], **style))


def _is_inside(span: TaskSpan | WaitSpan, origin: float, start: float, end: float) -> bool:
    """Whether any part of the span is shown, its edge included."""
    return span.start - origin <= end and span.end - origin >= start


def _room(box: TaskSpan, inches_a_second: float, seconds: float | None = None) -> int | None:
    """Degrees by which the number must turn to fit; None: it cannot."""
    points = (box.end - box.start if seconds is None else seconds) * inches_a_second * 72
    if points >= _needed(str(box.task.microbatch)):
        return 0
    return 90 if points >= (DIGIT_HEIGHT + PADDING) * NUMBER_SIZE else None


def _needed(text: str) -> float:
    """Points that a number needs."""
    return (DIGIT * len(text) + PADDING) * NUMBER_SIZE


def plot_timelines(
    rows: Sequence[tuple[str, StepTrace]],
    path: str | os.PathLike[str],
    window: TimeWindow = WHOLE,
    names: Sequence[str] = (),
    **form: Any,
) -> None:
    """Draw runs below each other and write a picture over an old file; ``form`` as `draw_timelines` takes it."""
    save_picture(path, lambda: draw_timelines(rows, window, names, **form))


def draw_timelines(
    # Title and merged trace of every run, at least one; a title is followed by the run's makespan.
    rows: Sequence[tuple[str, StepTrace]],
    window: TimeWindow = WHOLE,
    # Of the virtual stages of all runs, such as ``vision.0``; their parts have colours of their own then.
    names: Sequence[str] = (),
    # Inches of the picture, at DPI dots an inch.
    width: float = WIDTH,
    # Whether the dense form has panels.
    panels: bool = True,
) -> Figure:
    """Draw runs below each other on one time axis, 0 being the start of each run's step.

    Where most boxes are too thin for the numbers of their microbatches, none has one, and a panel below each run shows
    the share of the stages that compute or wait.
    """
    if not rows or not all(trace.tasks for _, trace in rows):
        raise ValueError("a timeline needs at least one run, and every run at least one task")
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = Timelines.of(rows, window, names, width, panels=panels).draw()
    FigureCanvasAgg(figure)  # becomes the figure's canvas
    return figure
