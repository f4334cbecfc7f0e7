"""What all pictures share: their files, whose suffix decides the format; colours, hatches and sizes.

Tasks are plain and idle times light, three of the four with a hatch of their own, so that a picture without colours
still tells everything apart. matplotlib (extra ``plot``) is used without pyplot: the caller's backend and open figures
stay as they are.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rrfp.atomic_files import write_atomically
from rrfp.core.usage import WaitCause
from rrfp.errors import ConfigError
from rrfp.model.tasks import KINDS, Kind

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")


def require_matplotlib(picture: str = "a timeline") -> None:
    """Refuse to draw without matplotlib, before the work to be drawn."""
    if find_spec("matplotlib") is None:
        raise ConfigError(f"{picture} needs matplotlib: pip install 'rrfp[plot]'")


def picture_format(path: str | os.PathLike[str]) -> str:
    """The format of a picture with this path: ``"png"``, ``"svg"`` or ``"pdf"``."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        allowed = ", ".join(SUFFIXES)
        raise ConfigError(f"{os.fspath(path)}: the suffix of a picture is {suffix!r}, must be one of: {allowed}")
    return suffix.removeprefix(".")


def save_picture(path: str | os.PathLike[str], draw: Callable[[], Figure]) -> None:
    """Draw a picture, once its format is allowed, and replace an old file by it."""
    name = picture_format(path)
    figure, picture = draw(), io.BytesIO()
    figure.savefig(picture, format=name, dpi=figure.dpi)
    write_atomically(path, picture.getvalue())


Colour = tuple[float, float, float]


def rgb(text: str) -> Colour:
    return int(text[1:3], 16) / 255, int(text[3:5], 16) / 255, int(text[5:7], 16) / 255


def css(colour: Colour) -> str:
    """As pages name it: ``#rrggbb``."""
    return "#" + "".join(f"{round(255 * part):02x}" for part in colour)


@dataclass(frozen=True, slots=True)
class IdleLook:
    """How time without a task looks."""

    #: The ground.
    face: Colour
    #: Matplotlib's pattern; None for a plain ground.
    hatch: str | None
    #: The pattern's colour.
    ink: Colour


KIND_COLOURS = {kind: rgb(row.colour) for kind, row in KINDS.items()}
IDLE_LOOKS = {
    WaitCause.INPUT: IdleLook(rgb("#dfe3e9"), None, rgb("#dfe3e9")),
    WaitCause.MEMORY: IdleLook(rgb("#f9dde2"), "//////", rgb("#c2506b")),
    WaitCause.ORDER: IdleLook(rgb("#e6def3"), "xxxxxx", rgb("#7a5cb0")),
    WaitCause.CHOICE: IdleLook(rgb("#fdf1d6"), "\\\\\\\\", rgb("#c98a1b")),
    WaitCause.DRAINED: IdleLook(rgb("#ffffff"), "....", rgb("#a3abb7")),
}

#: A method's colour and shape: distinct for all common colour blindnesses (Okabe and Ito's palette, black last), and
#: each is recognised without its colour as well.
METHOD_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a7d00", "#000000")
METHOD_SHAPES = ("o", "s", "^", "D", "v", "P", "X", "*")
#: Methods that look alike in every picture, in the order of the colours; others have what these leave.
COMMON_METHODS = (
    "slot-aware-pyramid, limit 2n",
    "bf, limit 2n",
    "slot-aware-pyramid, limit 1f1b",
    "strict 1f1b, blocking sends",
    "slot-aware-pyramid, limit n",
    "strict 1f1b",
    "bf, limit 1f1b",
    "slot-aware-pyramid, limit auto",
)

DARK, LIGHT, MUTED, FRAME = "#1b1f24", "#ffffff", "#5b6470", "#b8bec8"

DPI = 144
#: Points: the number in a box, other text, and the title of a run.
NUMBER_SIZE, TEXT_SIZE, TITLE_SIZE = 6.5, 8.0, 9.0

#: How much white the deepest chunk's colours have.
_PALEST = 0.5


def method_looks(names: Iterable[str]) -> Mapping[str, Mapping[str, Any]]:
    """Matplotlib's arguments for the line of each method; fixed orders are dashed, blocking sends dotted."""
    names = tuple(names)
    places = {name: COMMON_METHODS.index(name) for name in names if name in COMMON_METHODS}
    free = (place for place in count() if place not in places.values())
    return {name: _method_look(name, places[name] if name in places else next(free)) for name in names}


def _method_look(name: str, place: int) -> Mapping[str, Any]:
    is_hollow, index = divmod(place, len(METHOD_COLOURS))
    colour, line = METHOD_COLOURS[index], "-"
    if name.startswith("strict "):
        line = ":" if name.endswith("blocking sends") else "--"
    face = "white" if is_hollow else colour
    return {"color": colour, "marker": METHOD_SHAPES[index], "markerfacecolor": face, "linestyle": line}


def kind_colour(kind: Kind, chunk: int, chunks: int) -> Colour:
    pale = _PALEST * chunk / max(1, chunks - 1)
    red, green, blue = (part + (1 - part) * pale for part in KIND_COLOURS[kind])
    return red, green, blue


def contrast(colour: Colour) -> str:
    """Black or white, whichever reads better on a colour."""
    # Relative luminance of WCAG, without its gamma's foot.
    red, green, blue = (part**2.2 for part in colour)
    return LIGHT if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.3 else DARK
