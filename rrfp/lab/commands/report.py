"""`rrfp report TRACE`: recorded steps as a page to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rrfp.commands.command_line import Json, print_json
from rrfp.errors import Faults
from rrfp.lab.commands.options import at_least, check_output, progress_bar

_TRACES = "One trace (Chrome JSON) written by rrfp, or two to compare."
_OUT = "The page to write."
_RUN = "The run of this name, such as 'replica 1'; default: the first of each file."
_STEPS = "The most steps to show, the newest; default 10."
_ADVICE = "Whether the page has what rrfp advise says; by default unless that takes long."

_MOST = 2


def report(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help=_TRACES)],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE.html", help=_OUT)] = Path("report.html"),
    run: Annotated[str | None, typer.Option("--run", metavar="NAME", help=_RUN)] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", help=_STEPS, callback=at_least("steps", 1))
    ] = None,
    advice: Annotated[bool | None, typer.Option("--advice/--no-advice", help=_ADVICE)] = None,
    json: Json = False,
) -> None:
    """Write a page that shows recorded steps: timelines, idle time, memory, messages and advice, without a network."""
    from rrfp.lab.report.data import ReportOptions
    from rrfp.lab.report.page import require_library, write_report

    with Faults() as faults:
        if len(traces) > _MOST:
            faults.keep(f"TRACE is given {len(traces)} times, must be given once, or twice to compare")
        with faults.kept():
            check_output(out, *traces)
        with faults.kept():
            require_library()
    options = ReportOptions(run=run, advice=advice) if steps is None else ReportOptions(run, steps, advice)
    with progress_bar() as replayed:
        write_report([str(trace) for trace in traces], out, options, replayed)
    if json:
        print_json({"written": str(out), "bytes": out.stat().st_size})
    else:
        typer.echo(f"written to {out}: open it in a browser")
