"""`rrfp check admission`: the explorer on every combination of the listed pipelines, limits and memory rules."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from rrfp.commands.output import Json, print_json
from rrfp.core.placement import Layout
from rrfp.core.tasks import Kind, Mode
from rrfp.errors import ConfigError, RrfpError

if TYPE_CHECKING:
    from rich.table import Table

    from rrfp.sim.explore.cases import Case, Explored

#: Up to so many stages the default forces an order, too.
_FEW_STAGES = 2
_IN_ORDER = "What runs in microbatch order. By default nothing, and beside that B with up to 2 stages."
_FULL = "Visit every reachable state, also orders of the same tasks that cannot matter."


def _list(name: str, metavar: str, help: str) -> Any:
    return typer.Option(f"--{name}", metavar=metavar, help=help)


def admission(
    stages: Annotated[str, _list("stages", "N,..", "Numbers of stages.")] = "1,2,3",
    microbatches: Annotated[str, _list("microbatches", "M,..", "Numbers of microbatches.")] = "1,2,3",
    chunks: Annotated[str, _list("chunks", "C,..", "Numbers of chunks a stage.")] = "1,2",
    placement: Annotated[str, _list("placement", "looped,v", "Placements of chunks.")] = "looped,v",
    backward: Annotated[str, _list("backward", "whole,split,mixed", "Backward by virtual stage.")] = "whole,split",
    mode: Annotated[str, _list("mode", "train,forward", "Training or forward only.")] = "train,forward",
    limit: Annotated[str, _list("limit", "K,..,1f1b", "Limits; those above M are left out.")] = "1,2,3,4,1f1b",
    rule: Annotated[str, _list("rule", "NAME,..", "staircase, paper, or a rule known to be wrong.")] = "staircase",
    in_order: Annotated[str | None, _list("in-order", "none,F,B,W", _IN_ORDER)] = None,
    where: Annotated[str, _list("where", "all,last,middle", "The virtual stages where it does.")] = "all",
    full: Annotated[bool, typer.Option("--full", help=_FULL)] = False,
    json: Json = False,
) -> None:
    """Explore small pipelines under a memory rule: no deadlock, and memory in bounds; exit code 1 if not.

    By default pipelines of up to 2 stages run with backwards in microbatch order, too: there the reserve rule matters.
    """
    from rrfp.sim.explore.cases import RULES, Backward, Grid, Where, explored

    grid = Grid(
        _numbers("stages", stages),
        _numbers("microbatches", microbatches),
        _numbers("chunks", chunks),
        cast("list[Layout]", _names("placement", placement, get_args(Layout))),
        cast("list[Backward]", _names("backward", backward, get_args(Backward))),
        [Mode(name) for name in _names("mode", mode, list(Mode))],
        ["1f1b" if text == "1f1b" else _number("limit", text, " or 1f1b") for text in limit.split(",")],
        _names("rule", rule, list(RULES)),
        [None if name == "none" else Kind(name) for name in _names("in-order", in_order or "none", ["none", *Kind])],
        cast("list[Where]", _names("where", where, get_args(Where))),
    )
    cases = list(grid)
    if in_order is None:
        few = [number for number in grid.stages if number <= _FEW_STAGES]
        cases += replace(grid, stages=few, in_order=[Kind.B])
    done = list(explored(_shown(cases, quiet=json), reduce=False if full else None))
    if not done:
        raise ConfigError("no case is left: limits above M, or an order of a kind that no virtual stage runs")
    bad = [explored_case for explored_case in done if not explored_case.is_safe]
    if json:
        print_json({"ok": not bad, "cases": [_document(result) for result in done]})
    else:
        _print(_table(done))
        states = sum(result.exploration.states for result in done)
        typer.echo(f"{len(done)} cases, {states} states, {len(bad)} cases failed")
    if bad:
        raise RrfpError(f"{len(bad)} of {len(done)} cases fail, the first with the shortest way there: {_worst(bad)}")


def _numbers(field: str, text: str) -> list[int]:
    return [_number(field, number) for number in text.split(",")]


def _number(field: str, text: str, otherwise: str = "") -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{field} has {text!r}, must be whole numbers from 1{otherwise}, separated by commas")
    return int(text)


def _names(field: str, text: str, allowed: Iterable[str]) -> list[str]:
    names, known = text.split(","), [str(name) for name in allowed]
    for name in names:
        if name not in known:
            raise ConfigError(f"{field} has {name!r}, must be of: {', '.join(known)}, separated by commas")
    return names


def _shown(cases: list[Case], *, quiet: bool) -> Iterable[Case]:
    """The cases, with a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(cases, "cases", console=console, transient=True, disable=quiet or not sys.stderr.isatty())


def _worst(bad: list[Explored]) -> str:
    """The deadlock with the shortest trace, or else the first bound that was exceeded."""
    stuck = [result for result in bad if result.exploration.deadlocks]
    if not stuck:
        return f"{bad[0].case}: {bad[0].broken[0]}"
    first = min(stuck, key=lambda result: len(result.exploration.deadlocks[0].trace))
    return f"{first.case}: " + "; ".join(line.strip() for line in str(first.exploration.deadlocks[0]).splitlines())


def _document(result: Explored) -> dict[str, Any]:
    search = result.exploration
    return {
        "case": str(result.case),
        "ok": result.is_safe,
        "states": search.states,
        "transitions": search.transitions,
        "seconds": result.seconds,
        "deadlocks": len(search.deadlocks),
        "deadlock": [str(task) for task in search.deadlocks[0].trace] if search.deadlocks else None,
        "peak_held": search.peak_held,
        "peak_received": search.peak_received,
        "peak_buffered": search.peak_buffered,
        "broken": result.broken,
    }


def _table(done: list[Explored]) -> Table:
    """A row for each rule, C, kind of step and forced kind; the peaks are the largest of its cases and stages."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for column in ("rule", "C", "step", "order"):
        table.add_column(column, no_wrap=True)
    for column in ("cases", "states", "s", "stuck", "D", "received", "buffered"):
        table.add_column(column, justify="right", no_wrap=True)
    rows: dict[tuple[str, ...], list[Explored]] = {}
    for result in done:
        case = result.case
        step = "forward" if case.mode is Mode.FORWARD else case.backward
        rows.setdefault((case.rule, str(case.chunks), step, str(case.in_order or "-")), []).append(result)
    for key, results in rows.items():
        searches = [result.exploration for result in results]
        table.add_row(
            *key,
            str(len(results)),
            str(sum(search.states for search in searches)),
            f"{sum(result.seconds for result in results):.1f}",
            str(sum(len(search.deadlocks) for search in searches)),
            str(max(max(search.peak_held) for search in searches)),
            str(max(max(search.peak_received) for search in searches)),
            str(max(max(search.peak_buffered) for search in searches)),
        )
    return table


def _print(table: Table) -> None:
    from rich.console import Console

    Console(highlight=False, markup=False).print(table)
