"""What all pictures share: their files, whose suffix decides the format; colours, hatches and sizes.

Tasks are plain and idle times light, three of the four with a hatch of their own, so that a picture without colours
still tells everything apart. matplotlib (extra ``plot``) is used without pyplot: the caller's backend and open figures
stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

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
    """Draw a picture, once its format is allowed, and write it over an old file."""
    name = picture_format(path)
    figure = draw()
    try:
        figure.savefig(path, format=name, dpi=figure.dpi)
    except OSError as error:
        raise ConfigError(f"{os.fspath(path)}: cannot be written ({error.strerror or error})") from None


Colour = tuple[float, float, float]


def rgb(text: str) -> Colour:
    """The colour that ``#rrggbb`` names."""
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
DARK, LIGHT, MUTED, FRAME = "#1b1f24", "#ffffff", "#5b6470", "#b8bec8"

DPI = 144
#: Points: the number in a box, other text, and the title of a run.
NUMBER_SIZE, TEXT_SIZE, TITLE_SIZE = 6.5, 8.0, 9.0

#: How much white the deepest chunk's colours have.
_PALEST = 0.5


def kind_colour(kind: Kind, chunk: int, chunks: int) -> Colour:
    """The colour of a task: its kind's, paler for deeper chunks."""
    pale = _PALEST * chunk / max(1, chunks - 1)
    red, green, blue = (part + (1 - part) * pale for part in KIND_COLOURS[kind])
    return red, green, blue


def contrast(colour: Colour) -> str:
    """Black or white, whichever reads better on a colour."""
    # Relative luminance of WCAG, without its gamma's foot.
    red, green, blue = (part**2.2 for part in colour)
    return LIGHT if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.3 else DARK
