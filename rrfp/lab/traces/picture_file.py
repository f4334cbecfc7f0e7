"""The file of a picture: its suffix decides the format."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rrfp.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")


def picture_format(path: str | os.PathLike[str]) -> str:
    """The format of a picture with this path: ``"png"``, ``"svg"`` or ``"pdf"``."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        allowed = ", ".join(SUFFIXES)
        raise ConfigError(f"{os.fspath(path)}: the suffix of a picture is {suffix!r}, must be one of: {allowed}")
    return suffix.removeprefix(".")


def save_picture(path: str | os.PathLike[str], draw: Callable[[], Figure]) -> None:
    """Draw a picture and write it in the format of its suffix, replacing an old file.

    Args:
        path: of the file.
        draw: draws the picture; called once the format is known to be allowed.
    """
    name = picture_format(path)
    figure = draw()
    try:
        figure.savefig(path, format=name, dpi=figure.dpi)
    except OSError as error:
        raise ConfigError(f"{os.fspath(path)}: cannot be written ({error.strerror or error})") from None
