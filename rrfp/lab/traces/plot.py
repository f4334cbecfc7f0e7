"""Timelines as a picture: several runs below each other on one time axis, a row a stage, a box a task.

`rrfp.lab.traces.timeline` draws them; here are the entrance, and what every picture of rrfp needs to be written.
matplotlib (extra ``plot``) is used without pyplot: the caller's backend and open figures stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from rrfp.errors import ConfigError
from rrfp.lab.traces.picture_file import save_picture
from rrfp.lab.traces.window import WHOLE, TimeWindow
from rrfp.trace.spans import StepTrace

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def require_matplotlib(picture: str = "a timeline") -> None:
    """Raise without matplotlib; called before the work whose result is to be drawn."""
    if find_spec("matplotlib") is None:
        raise ConfigError(f"{picture} needs matplotlib: pip install 'rrfp[plot]'")


def plot_timelines(
    rows: Sequence[tuple[str, StepTrace]],
    path: str | os.PathLike[str],
    window: TimeWindow = WHOLE,
    names: Sequence[str] = (),
) -> None:
    """Draw runs below each other and write a PNG, SVG or PDF, replacing an old file; see `draw_timelines`."""
    save_picture(path, lambda: draw_timelines(rows, window, names))


def draw_timelines(
    rows: Sequence[tuple[str, StepTrace]], window: TimeWindow = WHOLE, names: Sequence[str] = ()
) -> Figure:
    """Draw runs below each other on one time axis, 0 being the start of each run's step.

    Where most boxes are too thin for the numbers of their microbatches, none has one, and a panel below each run shows
    the share of the stages that compute or wait.

    Args:
        rows: title and merged trace of every run, at least one; a title is followed by the run's makespan.
        window: the part of the steps to show.
        names: of the virtual stages of all runs, such as ``vision.0``; their parts have colours of their own then.
    """
    if not rows or not all(trace.tasks for _, trace in rows):
        raise ValueError("a timeline needs at least one run, and every run at least one task")
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from rrfp.lab.traces.timeline import Timelines

    figure = Timelines.of(rows, window, names).draw()
    FigureCanvasAgg(figure)  # becomes the figure's canvas
    return figure
