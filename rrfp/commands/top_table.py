"""The table of `rrfp top`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rrfp.commands.top_rows import TopRow
from rrfp.runtime.status_socket.report import JobReport
from rrfp.tables import Column, fitted

if TYPE_CHECKING:
    from rich.console import Group

#: Characters of a cell that says what a rank waits for; `--json` has it all.
_MOST_CHARACTERS = 48


def headline(report: JobReport, table: Sequence[TopRow]) -> str:
    """The job, its step, and the rate of the rank that was asked."""
    survey = report.survey
    row = None if survey is None else table[survey.asker]
    step = "" if row is None or row.step is None else f", step {row.step}"
    rate = "" if row is None or row.steps_per_s is None else f", {row.steps_per_s:.3g} steps/s"
    return f"{report.pipeline}; process {report.pid}{step}{rate}"


def table_of(report: JobReport, table: Sequence[TopRow], width: int) -> Group:
    """The headline and a line for each rank, ``width`` characters wide."""
    from rich.console import Group
    from rich.text import Text

    keys = [_column("stage" if _one_rank_a_stage(table) else "rank", table, lambda row: _short(row.name), is_text=True)]
    columns = [
        _column("step", table, _step),
        _column("tasks", table, lambda row: _part(row.enqueued, row.tasks)),
        _column("doing", table, lambda row: row.running or row.state, is_text=True),
        _column("for", table, lambda row: "" if row.seconds is None else _seconds(row.seconds)),
        _column("waits for", table, _waits_for, is_text=True),
        _column("held", table, lambda row: _part(row.held, row.limit)),
        _column("MiB held", table, lambda row: _mebibytes(row.held_bytes, row.limit_bytes)),
        _column("ready", table, lambda row: _number(row.ready)),
        _column("received", table, lambda row: _number(row.received)),
        _column("tasks/s", table, lambda row: "" if row.tasks_per_s is None else f"{row.tasks_per_s:.1f}"),
    ]
    head = Text(headline(report, table), overflow="ellipsis", no_wrap=True)
    return Group(head, *fitted(keys, columns, width))


def _column(head: str, table: Sequence[TopRow], cell: Callable[[TopRow], str], *, is_text: bool = False) -> Column:
    return Column(head, [cell(row) for row in table], "left" if is_text else "right")


def _one_rank_a_stage(table: Sequence[TopRow]) -> bool:
    return all(row.name == f"stage {row.stage}" for row in table)


def _short(name: str) -> str:
    return name.removeprefix("stage ")


def _step(row: TopRow) -> str:
    if row.step is None:
        return ""
    return f"{row.step} (eval)" if row.mode == "forward" else str(row.step)


def _waits_for(row: TopRow) -> str:
    text = f"{row.cause}: {row.waits_for}" if row.cause == "memory" else row.waits_for
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"


def _part(part: int | None, whole: int | None) -> str:
    if part is None:
        return ""
    return str(part) if whole is None else f"{part}/{whole}"


def _mebibytes(held: int | None, limit: int | None) -> str:
    if held is None:
        return ""
    return f"{held / 2**20:.1f}" if limit is None else f"{held / 2**20:.1f}/{limit / 2**20:.1f}"


def _number(count: int | None) -> str:
    return "" if count is None else str(count)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds < 1 else f"{seconds:.1f} s"
