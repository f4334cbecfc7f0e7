"""`rrfp plan [TRACE]`: which cut, placement, limit, hint and split would make the steps shortest."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from rrfp.atomic_files import write_atomically
from rrfp.commands.command_line import Json, print_json
from rrfp.errors import ConfigError
from rrfp.lab.commands.options import (
    RECORDED,
    REPLAYED,
    TRACE,
    Given,
    at_least,
    check_output,
    listed,
    progress_bar,
    wishes_of,
    with_options,
)
from rrfp.plain import whole

_TRACE = f"{TRACE} Without one: what --layers has, where nothing has run yet."
_LAYERS = "What each layer takes, by save_layers of a measured rrfp.split: then cut and placement are searched."
_OUT = "Write the best plan to this file, for rrfp.Pipeline, rrfp.local and rrfp.split (plan=)."
_MEMORY = "The most bytes that microbatches may hold on a stage, such as 8GB; default: limits up to 2n."
_MICROBATCHES = (
    "Numbers of microbatches to try, between commas; default: the trace's, without one 4 a stage. Times are for as "
    "many as that, or as the first one."
)
_RECOMPUTED = (
    "A trace of the same job with more stages that recompute: then plans may have some of them do so. Needs TRACE and "
    "--memory."
)
_SLOW = "A stage whose rank is slow: a layer that leaves it takes less. May be repeated; needs --layers."
_TASKS = "About the most tasks to simulate; then the search ends. Default 2000000, a minute or two."


@with_options(*REPLAYED, behind="tasks")
def plan(
    given: Given,
    trace: Annotated[Path | None, typer.Argument(metavar="[TRACE]", help=_TRACE)] = None,
    layers: Annotated[Path | None, typer.Option("--layers", metavar="FILE", help=_LAYERS)] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help=_OUT)] = None,
    memory: Annotated[str | None, typer.Option("--memory", metavar="SIZE", help=_MEMORY)] = None,
    microbatches: Annotated[str | None, typer.Option("--microbatches", metavar="M", help=_MICROBATCHES)] = None,
    recomputed: Annotated[Path | None, typer.Option("--recomputed", metavar="FILE", help=_RECOMPUTED)] = None,
    slow_rank: Annotated[list[int] | None, typer.Option("--slow-rank", metavar="STAGE", help=_SLOW)] = None,
    tasks: Annotated[
        int | None, typer.Option("--tasks", metavar="N", help=_TASKS, callback=at_least("tasks", 1))
    ] = None,
    json: Json = False,
) -> None:
    """Search the cut, placement, limit, hint and split under which steps are shortest."""
    try:
        from rrfp.lab.planning.plan import Request, plan_file

        if trace is None:
            for each in RECORDED:
                if given[each.name] is not None:
                    raise ConfigError(f"--{each.name.replace('_', '-')} goes with TRACE: it is of recorded steps")
        if out is not None:
            check_output(out, *(path for path in (trace, layers, recomputed) if path is not None))
        effort = {} if tasks is None else {"tasks": tasks}
        request = Request(layers, memory, _counts(microbatches), tuple(slow_rank or ()), recomputed, **effort)
        with progress_bar() as ran:
            plans = plan_file(None if trace is None else str(trace), request, wishes_of(given), ran)
    except KeyboardInterrupt:
        typer.echo("no plan was found yet", err=True)
        raise
    document = plans.to_json()
    if out is not None and plans.best is not None:
        write_atomically(out, dumps(document, indent=1, allow_nan=False) + "\n")
    if json:
        print_json(document)
    else:
        typer.echo(str(plans))
        if out is not None and plans.best is not None:
            typer.echo(f"\nwrote plan 1 to {out}")
    if plans.is_interrupted:
        raise KeyboardInterrupt
    if out is not None and plans.best is None:
        typer.echo(f"{out} is not written: no plan was found", err=True)
        raise typer.Exit(1)


def _counts(text: str | None) -> tuple[int, ...]:
    values = [] if text is None else listed("microbatches", text)
    return tuple(whole("microbatches", int(value) if value.isdecimal() else value, 1) for value in values)
