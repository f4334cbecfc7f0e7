"""`rrfp check admission`: the explorer on every combination of the listed pipelines, limits and memory rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from rrfp.commands.command_line import Json, print_json
from rrfp.errors import ConfigError, RrfpError
from rrfp.lab.commands.options import listed, option, progress_bar
from rrfp.laboratory import load
from rrfp.model.placement import Layout
from rrfp.model.tasks import Kind, Mode
from rrfp.tables import Column, print_table

if TYPE_CHECKING:
    from rrfp.lab.explore.cases import ChainCase, Explored, InOrder

#: Up to so many stages the default forces an order, too.
_FEW_STAGES = 2
#: The most forwards (N*C*M) of a case: beyond it, the states of most cases are more than a machine can visit.
MOST_FORWARDS = 48
_IN_ORDER = (
    "What runs in microbatch order; natural: all. By default nothing, and beside that B, and all, with up to 2 stages."
)
_BACKWARD = "Backward by virtual stage."
_MODE = "Training or forward only."
_LIMIT = "Limits; those above M are left out."
_RULE = "staircase, paper, or a rule known to be wrong."
_WHERE = "The virtual stages where it does."
_FULL = "Visit every reachable state, also orders of the same tasks that cannot matter."


def _numbers(name: str, metavar: str, help: str, otherwise: str = "") -> Any:
    """An option that lists whole numbers from 1, or the word ``otherwise``."""

    def check(text: str) -> None:
        if text != otherwise and (not text.isdecimal() or int(text) < 1):
            wanted = f"whole numbers from 1 or {otherwise}" if otherwise else "whole numbers from 1"
            raise ConfigError(f"{name} has {text!r}, must be {wanted}, separated by commas")

    return option(name, metavar, help, check=check)


def _names(name: str, metavar: str, help: str, known: Iterable[str] | str) -> Any:
    """An option that lists ``known`` names, or those of that name among the explorer's cases."""

    def names() -> list[str]:
        found = load(f"rrfp.lab.explore.cases:{known}") if isinstance(known, str) else known
        return [str(each) for each in get_args(found) or found]

    def check(text: str) -> None:
        if text not in names():
            raise ConfigError(f"{name} has {text!r}, must be among: {', '.join(names())}, separated by commas")

    return option(name, metavar, help, check=check, values=names)


def _in_order(name: str) -> InOrder | None:
    if name == "none":
        return None
    return "natural" if name == "natural" else Kind(name)


def admission(
    stages: Annotated[str, _numbers("stages", "N,..", "Numbers of stages.")] = "1,2,3",
    microbatches: Annotated[str, _numbers("microbatches", "M,..", "Numbers of microbatches.")] = "1,2,3",
    chunks: Annotated[str, _numbers("chunks", "C,..", "Numbers of chunks a stage.")] = "1,2",
    placement: Annotated[str, _names("placement", "looped,v", "Placements of chunks.", get_args(Layout))] = "looped,v",
    backward: Annotated[str, _names("backward", "whole,split,mixed", _BACKWARD, "Backward")] = "whole,split",
    mode: Annotated[str, _names("mode", "train,forward", _MODE, Mode)] = "train,forward",
    limit: Annotated[str, _numbers("limit", "K,..,1f1b", _LIMIT, "1f1b")] = "1,2,3,4,1f1b",
    rule: Annotated[str, _names("rule", "NAME,..", _RULE, "RULE_NAMES")] = "staircase",
    in_order: Annotated[
        str | None, _names("in-order", "none,F,B,W,natural", _IN_ORDER, ("none", *Kind, "natural"))
    ] = None,
    where: Annotated[str, _names("where", "all,last,middle", _WHERE, "Where")] = "all",
    full: Annotated[bool, typer.Option("--full", help=_FULL)] = False,
    json: Json = False,
) -> None:
    """Explore small pipelines under a memory rule: no deadlock, and memory in bounds; exit code 1 if not.

    By default pipelines of up to 2 stages run with backwards in microbatch order, too: there the reserve rule matters;
    and with all kinds in that order.
    """
    from rrfp.lab.explore.cases import Backward, Grid, Where, explored

    grid = Grid(
        list(map(int, listed("stages", stages))),
        list(map(int, listed("microbatches", microbatches))),
        list(map(int, listed("chunks", chunks))),
        cast("list[Layout]", listed("placement", placement)),
        cast("list[Backward]", listed("backward", backward)),
        [Mode(name) for name in listed("mode", mode)],
        ["1f1b" if text == "1f1b" else int(text) for text in listed("limit", limit)],
        listed("rule", rule),
        list(map(_in_order, listed("in-order", in_order or "none"))),
        cast("list[Where]", listed("where", where)),
    )
    cases = list(grid)
    if in_order is None:
        few = [number for number in grid.stages if number <= _FEW_STAGES]
        cases += replace(grid, stages=few, in_order=[Kind.B, "natural"])
    _check_sizes(cases)
    done = list(explored(_shown(cases, quiet=json), reduce=False if full else None))
    if not done:
        raise ConfigError("no case is left: limits above M, or an order of a kind that no virtual stage runs")
    bad = [explored_case for explored_case in done if not explored_case.is_safe]
    if json:
        print_json({"ok": not bad, "cases": [_document(result) for result in done]})
    else:
        _print_cases(done)
        states = sum(result.exploration.states for result in done)
        typer.echo(f"{len(done)} cases, {states} states, {len(bad)} cases failed")
    if bad:
        raise RrfpError(f"{len(bad)} of {len(done)} cases fail, the first with the shortest way there: {_worst(bad)}")


def _check_sizes(cases: Iterable[ChainCase]) -> None:
    for case in cases:
        if (forwards := case.stages * case.chunks * case.microbatches) > MOST_FORWARDS:
            sizes = f"stages {case.stages}, chunks {case.chunks}, microbatches {case.microbatches}"
            raise ConfigError(
                f"{sizes} have {forwards} forwards (the product), must be at most {MOST_FORWARDS}: the number of "
                "states grows exponentially"
            )


def _shown(cases: list[ChainCase], *, quiet: bool) -> Iterator[ChainCase]:
    with progress_bar(len(cases), quiet=quiet) as advance:
        for case in cases:
            advance(0, str(case))
            yield case
            advance(1, str(case))


def _worst(bad: list[Explored[ChainCase]]) -> str:
    """The deadlock with the shortest trace, or the first bound exceeded."""
    stuck = [result for result in bad if result.exploration.deadlocks]
    if not stuck:
        return f"{bad[0].case}: {bad[0].broken[0]}"
    first = min(stuck, key=lambda result: len(result.exploration.deadlocks[0].trace))
    return f"{first.case}: " + "; ".join(line.strip() for line in str(first.exploration.deadlocks[0]).splitlines())


def _document(result: Explored[ChainCase]) -> dict[str, Any]:
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


def _print_cases(done: list[Explored[ChainCase]]) -> None:
    """A row for each rule, C, kind of step and forced kind; peaks are maxima."""
    groups: dict[tuple[str, ...], list[Explored[ChainCase]]] = {}
    for result in done:
        case = result.case
        step = "forward" if case.mode is Mode.FORWARD else case.backward
        groups.setdefault((case.rule, str(case.chunks), step, str(case.in_order or "-")), []).append(result)
    rows: list[tuple[str, ...]] = []
    for results in groups.values():
        searches = [result.exploration for result in results]
        peaks = (
            max(max(held) for held in (getattr(search, peak) for search in searches))
            for peak in ("peak_held", "peak_received", "peak_buffered")
        )
        counts = len(results), sum(search.states for search in searches)
        seconds = f"{sum(result.seconds for result in results):.1f}"
        rows.append(
            (*map(str, counts), seconds, str(sum(len(search.deadlocks) for search in searches)), *map(str, peaks))
        )
    keys = zip(("rule", "C", "step", "order"), zip(*groups, strict=True), strict=True)
    heads = ("cases", "states", "s", "stuck", "D", "received", "buffered")
    columns = zip(heads, zip(*rows, strict=True), strict=True)
    print_table([Column(head, cells, "left") for head, cells in keys], [Column(head, cells) for head, cells in columns])
