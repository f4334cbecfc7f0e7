"""The progress of a run at the terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from rrfp.callbacks.base import Callback, RunAborted, RunBegun, RunEnded, StageFigures, Stall, StepEnded
from rrfp.callbacks.step_metrics import Tokens, checked_tokens, metrics
from rrfp.core.usage import Peaks
from rrfp.errors import ConfigError
from rrfp.plain import or_none, whole
from rrfp.tables import Column, fitted, mebibytes

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.table import Table

#: Seconds between two pictures: the eye needs no more, and drawing one takes milliseconds of Python.
_PAUSE_S = 0.5

#: Rows of the table. Of more ranks it has a row a stage, of more stages the first, and in the last row their number.
_MOST_ROWS = 16

#: Steps over which the time that is left is estimated.
_REMEMBERED = 50

#: Parts of the step's time that are left out where they are 0.
_OPTIONAL = ("TP order", "choice", "other")


class Progress(Callback):
    """Shows the run at the terminal: steps, loss, time, speed, and a row for each rank; on rank 0 only.

    Without a terminal it shows nothing. The table has the parts of the last step's time, in percent, the MiB sent, and
    the most chunk tasks and MiB that each rank held, with their limits. Of more than 16 ranks it has a row for each
    stage, with the rank that held the most bytes. What the program prints goes above.

    Args:
        steps: the number of training steps of the whole run, earlier runs of it included; None: not known.
        tokens: as in `JsonLines`; without it the speed is in microbatches a second, over all replicas.
        console: where to; the standard error stream by default.

    Raises:
        ConfigError: for an impossible ``steps``, ``tokens`` or ``console``.
    """

    def __init__(self, steps: int | None = None, *, tokens: Tokens = None, console: Console | None = None) -> None:
        self._steps: int | None = or_none(whole, "steps", steps, 1)
        self._tokens = checked_tokens(tokens)
        if console is not None and not hasattr(console, "is_terminal"):
            raise ConfigError(f"console is of type {type(console).__name__}, must be a rich.console.Console, or None")
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

        parts: list[Table] = []
        if self._last is not None:
            parts = [self._line(self._last), *(_tables(self._last.stages, width) if self._last.stages else ())]
        return Group(*parts, *([Text(self._note, style="yellow")] if self._note else []))

    def _line(self, event: StepEnded) -> Table:
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
        figures += self._speed(event)
        if self._steps is not None:
            figures.append(f"{_clock(self._left(self._steps - done))} left")
        line = Table.grid(padding=(0, 2, 0, 0))
        bar = [] if self._steps is None else [ProgressBar(self._steps, min(done, self._steps), width=20)]
        line.add_row(*bar, Text("  ".join(figures), style="bold"))
        return line

    def _speed(self, event: StepEnded) -> list[str]:
        if event.seconds <= 0:
            return []
        if self._tokens is None:
            rate = event.microbatches * event.replicas / event.seconds
            return [f"{rate:,.0f} microbatches/s" if rate >= 100 else f"{rate:.3g} microbatches/s"]
        return [f"{metrics(event, self._tokens)['tokens_per_second']:,.0f} tokens/s"]

    def _left(self, steps: int) -> float:
        """Seconds until ``steps`` more have ended, at the rate of the newest."""
        intervals = len(self._times) - 1
        return max(steps, 0) * (self._times[-1] - self._times[0]) / intervals if intervals > 0 else 0.0


def _tables(stages: tuple[StageFigures, ...], width: int) -> list[Table]:
    """A row for each rank, or for each stage where they are many; as many columns as fit."""
    ranks = [sorted(stage.peaks_by_rank) for stage in stages]
    if sum(map(len, ranks)) > _MOST_ROWS:
        ranks = [[_fullest(stage)] for stage in stages[:_MOST_ROWS]]
    rows = [(stage, rank) for stage, own in zip(stages, ranks, strict=False) for rank in own]
    #: The figures of a whole stage stand in the row of its first rank.
    firsts = [rank == own[0] for own in ranks for rank in own]

    def of_stages(text: Callable[[StageFigures], str]) -> list[str]:
        return [text(stage) if is_first else "" for (stage, _), is_first in zip(rows, firsts, strict=True)]

    def of_ranks(text: Callable[[StageFigures, Peaks], str]) -> list[str]:
        return [text(stage, stage.peaks_by_rank[rank]) for stage, rank in rows]

    names = of_stages(lambda stage: str(stage.stage))
    if len(stages) > len(ranks):
        names[-1] += f" of {len(stages)}"
    keys = [Column("stage", names, justify="left"), Column("rank", [str(rank) for _, rank in rows])]
    columns = [
        Column(f"{name} %", of_stages(partial(_percent, name)))
        for name in stages[0].breakdown.parts
        if name not in _OPTIONAL or any(each.breakdown.parts[name] > 0.005 * each.breakdown.step for each, _ in rows)
    ]
    columns += [
        Column("sent MiB", of_stages(lambda stage: mebibytes(stage.sent_bytes))),
        Column("held", of_ranks(lambda stage, peaks: _limited(str(peaks.held), stage.slots, str))),
        Column("MiB", of_ranks(lambda s, peaks: _limited(mebibytes(peaks.num_bytes), s.byte_limit, mebibytes))),
    ]
    return fitted(keys, columns, width)


def _fullest(stage: StageFigures) -> int:
    """The rank that held the most bytes, or else chunk tasks."""
    by_rank = stage.peaks_by_rank
    return max(by_rank, key=lambda rank: (by_rank[rank].num_bytes, by_rank[rank].held))


def _percent(part: str, stage: StageFigures) -> str:
    return f"{100 * stage.breakdown.share(stage.breakdown.parts[part]):.0f}"


def _limited(value: str, limit: int | None, text: Callable[[int], str]) -> str:
    return value if limit is None else f"{value}/{text(limit)}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
