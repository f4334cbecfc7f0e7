"""`rrfp top`: a live table of the stages of a job that runs on this host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain, repeat
from typing import TYPE_CHECKING, Annotated

import typer

from rrfp.commands.output import Json, print_json
from rrfp.errors import ConfigError, RrfpError

if TYPE_CHECKING:
    from rrfp.commands.top_rows import TopRow
    from rrfp.runtime.stall.status import JobStatus
    from rrfp.runtime.status_socket.job import Job
    from rrfp.runtime.status_socket.report import JobReport

    #: Shows a job at one moment.
    Show = Callable[[JobReport, list[TopRow]], None]

#: A job is asked no more often.
LEAST_INTERVAL_S = 0.1


def _checked_interval(value: float) -> float:
    if not LEAST_INTERVAL_S <= value < float("inf"):
        raise ConfigError(f"--interval is {value:g}, must be a number of seconds >= {LEAST_INTERVAL_S:g}")
    return value


def top(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB", help="The id of one of its processes, or a status socket; needed if several run."
        ),
    ] = None,
    interval: Annotated[
        float,
        typer.Option(metavar="S", help="Seconds between two looks. Default 1.", callback=_checked_interval),
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,
    json: Json = False,
) -> None:
    """Watch the stages of a job that runs on this host: what each runs, or waits for, and holds."""
    from rrfp.runtime.status_socket.job import find_job

    chosen = find_job(job)
    try:
        with _display(json=json, is_live=not once) as show:
            ending = _watch(chosen, show, None if once else interval)
    except KeyboardInterrupt:  # the usual end of a look
        return
    if ending:
        typer.echo(f"rrfp top: {ending}", err=json)


def _watch(job: Job, show: Show, interval: float | None) -> str:
    """Show the job until it ends, or once without ``interval``; returns how it ended."""
    from rrfp.commands.top_rows import rows
    from rrfp.runtime.status_socket.job import JobEnded, SilentJobError

    before: JobStatus | None = None
    is_silent = False
    while True:
        began = time.monotonic()
        try:
            report = job.read()
        except JobEnded:
            return "the job has ended"
        except SilentJobError as error:
            if before is None:
                raise
            if not is_silent:
                typer.echo(f"rrfp top: {error}", err=True)
            is_silent = True
        else:
            is_silent = False
            if report.survey is None:
                raise RrfpError(f"the job cannot be looked at any more: {report.failure}")
            show(report, rows(report.survey, before))
            before = report.survey
        if interval is None:
            return ""
        time.sleep(max(0.0, began + interval - time.monotonic()))


@contextmanager
def _display(*, json: bool, is_live: bool) -> Iterator[Show]:
    """In here the function that it yields shows each look: as JSON, in place on a terminal, or below the one before."""
    if json:
        yield _print_json
        return
    from rich.live import Live

    from rrfp.commands.top_table import table_of
    from rrfp.tables import terminal

    console = terminal()
    if not (is_live and console.is_terminal):
        gaps = chain([()], repeat(("",)))
        yield lambda report, table: console.print(*next(gaps), table_of(report, table, console.width), sep="\n")
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda report, table: live.update(table_of(report, table, console.width), refresh=True)


def _print_json(report: JobReport, table: list[TopRow]) -> None:
    print_json({"pid": report.pid, "pipeline": report.pipeline, "at": time.time(), "ranks": [*map(asdict, table)]})
