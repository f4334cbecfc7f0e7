"""The progress of a run at the terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from rrfp.callbacks.base import Callback
from rrfp.callbacks.events import RunAborted, RunBegun, RunEnded, StageFigures, Stall, StepEnded
from rrfp.callbacks.step_metrics import Tokens, checked_tokens, metrics
from rrfp.plain import or_none, whole
from rrfp.tables import Column, fitted
from rrfp.trace.breakdown import Breakdown

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.table import Table

#: Seconds between two pictures: the eye needs no more, and drawing one takes milliseconds of Python.
_PAUSE_S = 0.5

#: Rows of the table: the first stages of a longer pipeline, whose last row says how many there are.
_MOST_STAGES = 16

#: Steps over which the time that is left is estimated.
_REMEMBERED = 50

#: Heading and value of the table's parts of the step's time; the optional ones are left out where they are 0.
_PARTS: tuple[tuple[str, Callable[[Breakdown], float], bool], ...] = (
    ("compute", lambda parts: parts.compute, False),
    ("input", lambda parts: parts.input, False),
    ("memory", lambda parts: parts.memory, False),
    ("TP order", lambda parts: parts.order, True),
    ("choice", lambda parts: parts.choice, True),
    ("nothing left", lambda parts: parts.drained, False),
    ("other", lambda parts: parts.other, True),
)


class Progress(Callback):
    """Shows the run at the terminal: steps, loss, time, and a row for each stage; on rank 0 only.

    Without a terminal it shows nothing. The table has the parts of the last step's time, in percent, the most chunk
    tasks and MiB held, with their limits, and the MiB sent. What the program prints goes above.

    Args:
        steps: the number of training steps of the whole run, earlier runs of it included; None: not known.
        tokens: as in `JsonLines`.
        console: where to; the standard error stream by default.

    Raises:
        ConfigError: for an impossible ``steps`` or ``tokens``.
    """

    def __init__(self, steps: int | None = None, *, tokens: Tokens = None, console: Console | None = None) -> None:
        self._steps: int | None = or_none(whole, "steps", steps, 1)
        self._tokens = checked_tokens(tokens)
        self._console = console
        self._live: Live | None = None
        self._shown_at = 0.0
        self._last: StepEnded | None = None
        self._held_out: float | None = None
        self._note = ""
        #: When the newest steps ended.
        self._times: deque[float] = deque(maxlen=_REMEMBERED)

    def run_begun(self, event: RunBegun) -> None:
        """See `Callback`."""
        from rich.console import Console
        from rich.live import Live

        console = Console(stderr=True) if self._console is None else self._console
        if event.topology.rank == 0 and console.is_terminal:
            self._last, self._held_out, self._note = None, None, f"{event.method}: the first step runs"
            self._times.clear()
            self._times.append(event.time)
            self._live = Live(console=console, auto_refresh=False)
            self._live.start()
            console.show_cursor(True)  # a rank that is killed could not show it again
            self._show()

    def step_ended(self, event: StepEnded) -> None:
        """See `Callback`."""
        self._last, self._note = event, ""
        self._times.append(event.time)
        if time.monotonic() - self._shown_at >= _PAUSE_S:
            self._show()

    def evaluation_ended(self, event: StepEnded) -> None:
        """See `Callback`."""
        self._held_out = event.loss
        self._show()

    def stall(self, event: Stall) -> None:
        """See `Callback`."""
        self._note = f"stall: {event.text.partition(chr(10))[0]}"
        self._show()

    def aborted(self, event: RunAborted) -> None:
        """See `Callback`."""
        self._note = f"aborted by {str(event.origin).partition(chr(10))[0]}"
        self._show()

    def run_ended(self, event: RunEnded) -> None:
        """See `Callback`."""
        if self._live is not None:
            self._live.update(self._view(self._live.console.width))
            self._live.stop()  # draws it, and ends its last line
            self._live = None

    def _show(self) -> None:
        """Draw everything, the cursor on a line of its own."""
        # Other processes print to the terminal as well.
        if self._live is not None:
            from rich.console import Group

            self._shown_at = time.monotonic()
            self._live.update(Group(self._view(self._live.console.width), ""), refresh=True)

    def _view(self, width: int) -> Group:
        """Everything that is shown, ``width`` characters wide."""
        from rich.console import Group
        from rich.text import Text

        parts = [] if self._last is None else [self._line(self._last), *_tables(self._last.stages, width)]
        return Group(*parts, *([Text(self._note, style="yellow")] if self._note else []))

    def _line(self, event: StepEnded) -> Table:
        """The whole step, in one line."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        done = event.completed
        figures = [f"step {done}" if self._steps is None else f"step {done}/{self._steps}"]
        if event.loss is not None:
            figures.append(f"loss {event.loss:.4g}")
        if self._held_out is not None:
            figures.append(f"held-out {self._held_out:.4g}")
        figures.append(f"{event.seconds * 1e3:.0f} ms")
        speed = metrics(event, self._tokens)["tokens_per_second"]
        if isinstance(speed, float):
            figures.append(f"{speed:,.0f} tokens/s")
        if self._steps is not None:
            figures.append(f"{_clock(self._left(self._steps - done))} left")
        line = Table.grid(padding=(0, 2, 0, 0))
        bar = [] if self._steps is None else [ProgressBar(self._steps, min(done, self._steps), width=20)]
        line.add_row(*bar, Text("  ".join(figures), style="bold"))
        return line

    def _left(self, steps: int) -> float:
        """Seconds until ``steps`` more have ended, at the rate of the newest."""
        intervals = len(self._times) - 1
        return max(steps, 0) * (self._times[-1] - self._times[0]) / intervals if intervals > 0 else 0.0


def _tables(stages: tuple[StageFigures, ...], width: int) -> list[Table]:
    """A row for each stage, as many columns as fit."""
    shown = stages[:_MOST_STAGES]
    names = [str(stage.stage) for stage in shown]
    columns = [
        Column(f"{head} %", [f"{100 * stage.breakdown.share(value(stage.breakdown)):.0f}" for stage in shown])
        for head, value, is_optional in _PARTS
        if not is_optional or any(value(stage.breakdown) > 0.005 * stage.breakdown.step for stage in shown)
    ]
    columns.append(Column("held", [_limited(str(s.peaks.held), s.slots, str) for s in shown]))
    columns.append(Column("MiB", [_limited(_mebibytes(s.peaks.num_bytes), s.byte_limit, _mebibytes) for s in shown]))
    columns.append(Column("sent MiB", [_mebibytes(stage.sent_bytes) for stage in shown]))
    if len(stages) > len(shown):
        names[-1] += f" of {len(stages)}"
    return fitted([Column("stage", names, justify="left")], columns, width)


def _limited(value: str, limit: int | None, text: Callable[[int], str]) -> str:
    return value if limit is None else f"{value}/{text(limit)}"


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
