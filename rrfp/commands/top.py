"""`rrfp top`: a live table of the stages of a job that runs on this host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, repeat
from typing import TYPE_CHECKING, Annotated

import typer

from rrfp.commands.command_line import Json, print_json
from rrfp.errors import ConfigError, RrfpError
from rrfp.tables import Column, fitted, mebibytes, terminal

if TYPE_CHECKING:
    from rich.console import Group

    from rrfp.runtime.stall.status import JobStatus, RankAnswer, RankStatus
    from rrfp.runtime.status_socket import JobReport, RunningJob

    Show = Callable[[JobReport, list["TopRow"]], None]

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
    from rrfp.runtime.status_socket import find_job

    chosen = find_job(job)
    try:
        with _display(json=json, is_live=not once) as show:
            ending = _watch(chosen, show, None if once else interval)
    except KeyboardInterrupt:  # the usual end of a look
        return
    if ending:
        typer.echo(f"rrfp top: {ending}", err=json)


def _watch(job: RunningJob, show: Show, interval: float | None) -> str:
    """Show the job until it ends, or once; returns how it ended."""
    from rrfp.runtime.status_socket import JobEnded, SilentJobError

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
    """Yields what shows a look: as JSON, in place, or below."""
    if json:
        yield _print_json
        return
    from rich.live import Live

    console = terminal()
    if not (is_live and console.is_terminal):
        gaps = chain([()], repeat(("",)))
        yield lambda report, table: console.print(*next(gaps), table_of(report, table, console.width), sep="\n")
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda report, table: live.update(table_of(report, table, console.width), refresh=True)


def _print_json(report: JobReport, table: list[TopRow]) -> None:
    print_json({"pid": report.pid, "pipeline": report.pipeline, "at": time.time(), "ranks": [*map(asdict, table)]})


@dataclass(frozen=True, slots=True)
class TopRow:
    """One rank; what is not known is None or empty."""

    rank: int
    stage: int
    name: str
    #: ``running``, ``starting`` (a task), ``waiting``, ``ending`` (the step), ``between steps``, or why it gave no
    #: answer.
    state: str
    #: How long it has been running or waiting.
    seconds: float | None = None
    #: The number of its step, or of its last one: training steps before it.
    step: int | None = None
    #: Of the step that it is in: ``train`` or ``forward``.
    mode: str | None = None
    #: The task, or other work, on its lane.
    running: str | None = None
    #: Why its lane is idle inside a step: ``input``, ``memory``, ``order``, ``choice`` or ``drained``.
    cause: str | None = None
    #: The first of ``awaits``, or the call of all ranks that it is in.
    waits_for: str = ""
    #: Tasks that have not started, each with the reason, the lowest microbatch first.
    awaits: tuple[str, ...] = ()
    #: What happened so far to the first task that has not started: inputs that came, and when.
    story: str = ""
    #: Tasks of the step that were started.
    enqueued: int | None = None
    tasks: int | None = None
    #: Microbatches in work, in chunk tasks.
    held: int | None = None
    limit: int | None = None
    #: The memory of these.
    held_bytes: int | None = None
    limit_bytes: int | None = None
    ready: int | None = None
    #: Outputs of other stages that have arrived and whose task has not started.
    received: int | None = None
    received_bytes: int | None = None
    #: Since the last row.
    tasks_per_s: float | None = None
    #: Since the last row.
    steps_per_s: float | None = None
    process: str = ""
    #: The Python stack of its lane, where it has been running something for `stall_after` seconds.
    stack: str = ""


def rows(survey: JobStatus, before: JobStatus | None) -> list[TopRow]:
    """A row for each rank; rates count from ``before``."""
    earlier: Sequence[RankAnswer | None] = () if before is None else before.answers
    if len(earlier) != len(survey.answers):
        earlier = [None] * len(survey.answers)
    return [_row(now, then) for now, then in zip(survey.answers, earlier, strict=True)]


def _row(answer: RankAnswer, earlier: RankAnswer | None) -> TopRow:
    status, then = answer.status, None if earlier is None else earlier.status
    if status is None:
        return TopRow(answer.rank, answer.stage, answer.name, answer.absent)
    state, seconds, waits_for = _doing(status)
    now = status.current
    holding = None if now is None else now.holding
    return TopRow(
        answer.rank,
        answer.stage,
        answer.name,
        state,
        seconds,
        step=status.training_step if status.step is not None or status.steps_ended else None,
        mode=None if now is None else now.mode,
        running=status.running,
        cause=status.waits_for or None,
        waits_for=waits_for,
        awaits=status.awaits,
        story=status.story,
        enqueued=None if now is None else now.enqueued,
        tasks=None if now is None else now.tasks,
        held=None if holding is None else holding.held,
        limit=None if now is None else now.slots,
        held_bytes=None if holding is None else holding.num_bytes,
        limit_bytes=None if now is None else now.limit_bytes,
        ready=None if now is None else now.ready,
        received=None if holding is None else holding.received,
        received_bytes=None if holding is None else holding.received_bytes,
        tasks_per_s=None if then is None else _rate(then.completed, status.completed, status.at - then.at),
        steps_per_s=None if then is None else _rate(then.steps_ended, status.steps_ended, status.at - then.at),
        process=status.process,
        stack=status.stack,
    )


def _doing(status: RankStatus) -> tuple[str, float | None, str]:
    """The state, for how long, and what it waits for."""
    if status.running is not None:
        return "running", status.running_s, ""
    if status.gathering:
        return "waiting", None, f"all ranks in {status.gathering}"
    if status.step is None or status.has_returned:
        return "between steps", None, ""
    if status.can_run:
        return "starting", None, ""
    if status.awaits:
        return "waiting", status.waits_s if status.waits_for else None, status.awaits[0]
    return "ending", None, "the reports of all ranks"


def _rate(before: int, now: int, seconds: float) -> float | None:
    """None where that is no time, or the counters are another process's."""
    return (now - before) / seconds if seconds > 0 and now >= before else None


#: Characters of a cell that says what a rank waits for; `--json` has it all.
_MOST_CHARACTERS = 48


def headline(report: JobReport, table: Sequence[TopRow]) -> str:
    """The job, its step, and the asked rank's rate."""
    survey = report.survey
    row = None if survey is None else table[survey.asker]
    step = "" if row is None or row.step is None else f", step {row.step}"
    rate = "" if row is None or row.steps_per_s is None else f", {row.steps_per_s:.3g} steps/s"
    return f"{report.pipeline}; process {report.pid}{step}{rate}"


def table_of(report: JobReport, table: Sequence[TopRow], width: int) -> Group:
    """The headline and a line for each rank, ``width`` characters wide."""
    from rich.console import Group
    from rich.text import Text

    key = "stage" if all(row.name == f"stage {row.stage}" for row in table) else "rank"
    keys = [_column(key, table, lambda row: row.name.removeprefix("stage "), is_text=True)]
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
    return mebibytes(held) if limit is None else f"{mebibytes(held)}/{mebibytes(limit)}"


def _number(count: int | None) -> str:
    return "" if count is None else str(count)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds < 1 else f"{seconds:.1f} s"
