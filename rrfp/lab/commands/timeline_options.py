"""The options of a timeline: its file, and the part of the step that it shows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rrfp.commands.output import check_output
from rrfp.errors import ConfigError, Faults

if TYPE_CHECKING:
    from rrfp.lab.traces.timeline import TimeWindow

#: Tasks that a timeline can hold: beyond it takes minutes to draw and is too small to read.
MOST_BOXES = 20_000

_PANEL = "Output"
_TIMELINE = "Draw the step's timeline; the suffix decides the format."
TimelineFile = Annotated[
    Path | None,
    typer.Option("--timeline", metavar="FILE.png|svg|pdf", help=_TIMELINE, rich_help_panel=_PANEL),
]
_FROM = "Draw the timeline from this time of the step on, in milliseconds."
From = Annotated[float | None, typer.Option("--from", metavar="MS", help=_FROM, rich_help_panel=_PANEL)]
_TO = "Draw the timeline up to this time of the step, in milliseconds."
To = Annotated[float | None, typer.Option("--to", metavar="MS", help=_TO, rich_help_panel=_PANEL)]


def checked_window(path: Path | None, start_ms: float | None, end_ms: float | None) -> TimeWindow:
    """The window of a timeline, refused before the work that it shows."""
    from rrfp.lab.traces.timeline import TimeWindow

    for name, value in (("from", start_ms), ("to", end_ms)):
        if path is None and value is not None:
            raise ConfigError(f"--{name} goes with --timeline FILE")
    if path is not None:
        check_picture(path, "a timeline")
    return TimeWindow.of_milliseconds(start_ms, end_ms)


def check_tasks(tasks: int, instead: str) -> None:
    """Refuse a timeline of too many tasks."""
    if tasks > MOST_BOXES:
        raise ConfigError(f"a timeline shows at most {MOST_BOXES} tasks, this step has {tasks}: {instead}")


def check_picture(path: Path, picture: str) -> None:
    """Refuse a picture that could not be written, before anything runs."""
    from rrfp.lab.traces.pictures import picture_format, require_matplotlib

    with Faults() as faults:
        with faults.kept():
            require_matplotlib(picture)
        with faults.kept():
            picture_format(path)
        with faults.kept():
            check_output(path)
