"""The timeline of one step as an SVG, which a notebook shows below the cell that returns it."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from rrfp.core.usage import WaitCause
from rrfp.lab.traces.pictures import IDLE_LOOKS, contrast, css, kind_colour, rgb
from rrfp.model.tasks import KINDS, Kind
from rrfp.trace.breakdown import CAUSE_LABELS, breakdown, idle_waits
from rrfp.trace.breakdown_table import duration
from rrfp.trace.spans import StepTrace, TaskSpan, merge

#: Units of the drawing: the time axis, the columns beside it, the line of text above, and the legend's below.
WIDTH, LEFT, RIGHT, HEAD, FOOT = 860, 62, 74, 20, 26
#: The height of a row with few stages and with many, and the most stages that count as few.
ROW, THIN_ROW, FEW = 26, 12, 16
#: Boxes below this width are joined with like ones that touch them.
THIN = 1.0
#: The width that a digit takes.
DIGIT = 7.0

#: A box of a row: left, right, fill, the number in it, and what pointing at it says.
Box = tuple[float, float, str, str, str]

_PATTERNS = {
    WaitCause.MEMORY: "M-2 8 L8 -2 M0 14 L14 0 M-2 2 L2 -2",
    WaitCause.CHOICE: "M-2 0 L8 10 M0 -2 L10 8",
    WaitCause.ORDER: "M0 0 L8 8 M0 8 L8 0",
    WaitCause.DRAINED: "M2 2h1 M6 6h1",
}


def pipeline_html(text: str, newest: Sequence[StepTrace | None]) -> str:
    """A pipeline: its text, and the newest step that the ranks of this process have all kept."""
    kept = [trace for trace in newest if trace is not None]
    line = f"<code>{html.escape(text)}</code>"
    if not kept or len(kept) < len(newest):
        return line
    # One rank may be a step ahead of another while a step ends.
    oldest = min(trace.step for trace in kept)
    return f"<div>{line}{trace_html(merge(trace for trace in kept if trace.step == oldest))}</div>"


def trace_html(trace: StepTrace) -> str:
    """A step, of one rank or merged."""
    stages = sorted({span.stage for span in trace.tasks} | {wait.stage for wait in trace.waits})
    seconds = trace.end - trace.start
    title = f"step {trace.step}, {duration(seconds)}"
    if not stages or seconds <= 0:
        return f"<p>{title}: nothing was recorded</p>"
    row = ROW if len(stages) <= FEW else THIN_ROW
    bottom = HEAD + row * len(stages)
    size = f"0 0 {LEFT + WIDTH + RIGHT} {bottom + FOOT}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img" aria-label="timeline of {title}" '
        f'style="max-width:{LEFT + WIDTH + RIGHT}px;width:100%" font-family="sans-serif" font-size="11">',
        f"<defs>{''.join(map(_pattern, _PATTERNS))}</defs>",
        _text(LEFT, 13, title, weight="bold"),
    ]
    seen: set[Kind | WaitCause] = set()
    for index, stage in enumerate(stages):
        own = _of_stage(trace, stage)
        seen |= {span.task.kind for span in own.tasks} | {wait.cause for wait in idle_waits(own, stage)}
        parts += _row(own, stage, HEAD + index * row, row, WIDTH / seconds)
    parts += [*_legend(seen, bottom + 17), "</svg>"]
    return "".join(parts)


def _of_stage(trace: StepTrace, stage: int) -> StepTrace:
    tasks = sorted((span for span in trace.tasks if span.stage == stage), key=lambda span: span.start)
    waits = tuple(wait for wait in trace.waits if wait.stage == stage)
    return replace(trace, tasks=tuple(tasks), waits=waits, messages=())


def _row(own: StepTrace, stage: int, top: float, row: float, scale: float) -> Iterator[str]:
    part = breakdown(own, stage)
    if row >= ROW or stage % 2 == 0:
        yield _text(LEFT - 6, top + row / 2 + 4, f"stage {stage}", anchor="end")
        yield _text(LEFT + WIDTH + 6, top + row / 2 + 4, f"{1 - part.compute_share:.0%} idle")
    height = row * 0.86
    for box in (*_joined(_waits(own, stage, scale)), *_joined(_tasks(own, scale))):
        left, right, fill, number, said = box
        shape = (
            f'x="{LEFT + left:.2f}" y="{top + (row - height) / 2:.2f}" width="{right - left:.2f}" height="{height:.2f}"'
        )
        tip = f"<title>{said}</title>" if said else ""
        yield f'<rect {shape} fill="{fill}">{tip}</rect>'
        if number and row >= ROW and right - left > DIGIT * len(number) + 4:
            colour = contrast(rgb(fill))
            yield _text(LEFT + (left + right) / 2, top + row / 2 + 4, number, anchor="middle", fill=colour)


def _tasks(own: StepTrace, scale: float) -> Iterator[Box]:
    chunks = sorted({span.task.virtual_stage for span in own.tasks})
    before: TaskSpan | None = None
    for span in own.tasks:
        colour = kind_colour(span.task.kind, chunks.index(span.task.virtual_stage), len(chunks))
        said = f"{span.task}: {KINDS[span.task.kind].label}, {duration(span.end - span.start)}"
        said += "" if before is None else f", after {before.task}"
        start, end = (span.start - own.start) * scale, (span.end - own.start) * scale
        yield start, end, css(colour), str(span.task.microbatch), said
        before = span


def _waits(own: StepTrace, stage: int, scale: float) -> Iterator[Box]:
    for wait in idle_waits(own, stage):
        start, end = (wait.start - own.start) * scale, (wait.end - own.start) * scale
        said = f"idle: {CAUSE_LABELS[wait.cause]}, {duration(wait.end - wait.start)}"
        yield start, end, _idle_fill(wait.cause), "", said


def _joined(boxes: Iterable[Box]) -> Iterator[Box]:
    """The same, thin ones joined with like ones beside them."""
    last: Box | None = None
    for box in boxes:
        if last is not None:
            left, right, fill, *_ = last
            if fill == box[2] and box[0] - right < THIN and max(right - left, box[1] - box[0]) < THIN:
                last = left, box[1], fill, "", ""
                continue
            yield last
        last = box
    if last is not None:
        yield last


def _legend(seen: set[Kind | WaitCause], y: float) -> Iterator[str]:
    x = float(LEFT)
    kinds = [(css(kind_colour(kind, 0, 1)), KINDS[kind].label) for kind in KINDS if kind in seen]
    idle = [(_idle_fill(cause), f"idle: {CAUSE_LABELS[cause]}") for cause in IDLE_LOOKS if cause in seen]
    for fill, label in (*kinds, *idle):
        shape = f'x="{x:.0f}" y="{y - 9}" width="16" height="10"'
        yield f'<rect {shape} fill="{fill}" stroke="#b8bec8" stroke-width="0.5"/>'
        yield _text(x + 21, y, label)
        x += 40 + 6.2 * len(label)


def _pattern(cause: WaitCause) -> str:
    look = IDLE_LOOKS[cause]
    return (
        f'<pattern id="rrfp-{cause.value}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<rect width="8" height="8" fill="{css(look.face)}"/>'
        f'<path d="{_PATTERNS[cause]}" stroke="{css(look.ink)}" stroke-width="1"/></pattern>'
    )


def _idle_fill(cause: WaitCause) -> str:
    return f"url(#rrfp-{cause.value})" if cause in _PATTERNS else css(IDLE_LOOKS[cause].face)


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal", fill: str = "currentColor"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" fill="{fill}">'
        f"{html.escape(text)}</text>"
    )
