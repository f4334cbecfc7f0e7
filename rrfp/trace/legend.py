"""The legend of timelines: a patch for every colour and hatch that a picture shows."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rrfp.core.tasks import Kind
from rrfp.core.usage import WaitCause
from rrfp.trace.breakdown import CAUSE_LABELS
from rrfp.trace.looks import FRAME, IDLE_LOOKS, KIND_LABELS, TEXT_SIZE, kind_colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: A kind of task in a chunk.
Tint = tuple[Kind, int]

#: What the breakdown calls time that is left blank.
OTHER_LABEL = "other: the runtime"

#: Inches of an entry beside its text, of a character, and of the axis' label beside the legend.
_ENTRY, _CHARACTER, _LABEL = 0.5, 0.068, 1.6


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a picture shows: kinds by chunk, the causes of idle times, and whether a visible part is blank.

    Of graphs, ``parts`` are the names of the parts, which stand for the chunks.
    """

    tints: Collection[Tint]
    causes: Collection[WaitCause]
    has_blank: bool
    parts: Sequence[str] = ()


def part_of(name: str) -> str:
    """The part that a virtual stage's name begins with: ``vision`` of ``vision.0``."""
    return name.partition(".")[0]


def legend_lines(drawn: Drawn, width: float) -> int:
    """Lines that the legend needs beside the axis' label, in a picture that is ``width`` inches wide."""
    labels = [*_kinds(drawn).values(), *map(_cause_label, drawn.causes), *[OTHER_LABEL] * drawn.has_blank]
    return max(1, math.ceil(sum(_ENTRY + _CHARACTER * len(label) for label in labels) / (width - _LABEL)))


def draw_legend(figure: Figure, drawn: Drawn, chunks: int, corner: tuple[float, float], lines: int) -> None:
    """Put the legend at ``corner``, inches from the left and from below.

    A kind has one entry, with a patch for each of its chunks.
    """
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    entries: list[tuple[Any, str]] = []
    for kind, label in _kinds(drawn).items():
        colours = [kind_colour(kind, chunk, chunks) for chunk in _chunks(drawn.tints, kind)]
        entries.append((tuple(Patch(facecolor=colour) for colour in colours), label))
    for cause in [cause for cause in WaitCause if cause in drawn.causes]:
        look = IDLE_LOOKS[cause]
        # The frame has the hatch's ink: matplotlib draws both in one colour.
        edge = FRAME if look.hatch is None else look.ink
        patch = Patch(facecolor=look.face, edgecolor=edge, hatch=look.hatch, linewidth=0.5)
        entries.append((patch, _cause_label(cause)))
    if drawn.has_blank:
        entries.append((Patch(facecolor="white", edgecolor=FRAME, linewidth=0.5), OTHER_LABEL))
    total, height = figure.get_size_inches()
    handles, labels = zip(*entries, strict=True)
    figure.legend(
        handles,
        labels,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.15)},
        loc="lower left",
        bbox_to_anchor=(corner[0] / total, corner[1] / height),
        ncols=math.ceil(len(entries) / lines),
        frameon=False,
        fontsize=TEXT_SIZE,
        borderaxespad=0,
        borderpad=0,
        handlelength=1.6 * max(1.0, 0.8 * chunks),
        columnspacing=1.6,
        labelspacing=0.35,
    )


def _kinds(drawn: Drawn) -> dict[Kind, str]:
    """The label of every kind that is drawn, with its parts, or the numbers of its chunks where a kind has several."""
    tints = drawn.tints
    several = len({chunk for _, chunk in tints}) > 1
    labels = {}
    for kind in [kind for kind in Kind if _chunks(tints, kind)]:
        numbers = _chunks(tints, kind)
        if drawn.parts:
            labels[kind] = f"{KIND_LABELS[kind]}: {', '.join(drawn.parts[number] for number in numbers)}"
            continue
        chunks = ", ".join(map(str, numbers)) if len(numbers) < 4 else f"{numbers[0]} to {numbers[-1]}"
        labels[kind] = f"{KIND_LABELS[kind]}, chunk {chunks}" if several else KIND_LABELS[kind]
    return labels


def _chunks(tints: Collection[Tint], kind: Kind) -> list[int]:
    return sorted(chunk for other, chunk in tints if other is kind)


def _cause_label(cause: WaitCause) -> str:
    return f"idle: {CAUSE_LABELS[cause]}"
