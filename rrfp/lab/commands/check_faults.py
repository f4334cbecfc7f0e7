"""`rrfp check faults`: seeded runs of small pipelines with faults, one in detail or many in a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rrfp.commands.command_line import Json, known_hints, print_json
from rrfp.errors import Faults, RrfpError
from rrfp.lab.commands.options import option, progress_bar
from rrfp.lab.sweep.experiment import HINT_FORMS
from rrfp.tables import Column, print_table

if TYPE_CHECKING:
    from rrfp.hints.registry import HintSpec
    from rrfp.lab.faults.campaign import Campaign

_SEED = "The run to make; with --runs the first one."
_RUNS = "Make this many runs, and summarise how they ended."
_HINT = f"Use this hint in every run: {HINT_FORMS}. Default: one drawn from the seed."


def _check_hint(text: str) -> None:
    from rrfp.hints.registry import named_or_loaded_hint

    named_or_loaded_hint(text)


def faults(
    seed: Annotated[int, typer.Option("--seed", metavar="S", help=_SEED)] = 0,
    runs: Annotated[int | None, option("runs", "N", _RUNS)] = None,
    hint: Annotated[str | None, option("hint", "NAME", _HINT, check=_check_hint, values=known_hints)] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Print everything that happens in the run.")] = False,
    json: Json = False,
) -> None:
    """Simulate faults: each run must end well or with one error that names its cause; exit code 1 if one does not."""
    from rrfp.hints.registry import named_or_loaded_hint

    with Faults() as wrong:
        if runs is not None and runs < 1:
            wrong.keep(f"runs is {runs}, must be at least 1")
        if runs is not None and trace:
            wrong.keep("--trace goes with one run: leave --runs out")
    spec = None if hint is None else named_or_loaded_hint(hint)
    suffix = "" if hint is None else f" --hint {hint}"
    if runs is None:
        failed = _run_one(seed, spec, suffix, trace=trace, json=json)
    else:
        failed = _run_many(seed, runs, spec, suffix, json=json)
    if failed:
        raise RrfpError(failed)


def _run_one(seed: int, hint: HintSpec | None, suffix: str, *, trace: bool, json: bool) -> str:
    """Make one run and print it; returns its failure, if any."""
    from rrfp.lab.faults.campaign import run_seed

    events: list[str] = []
    run = run_seed(seed, hint, trace=events.append if trace else None)
    lines = run.scenario.describe()
    if json:
        document: dict[str, Any] = {"seed": seed, "scenario": lines, "ending": run.ending, "text": run.text}
        document |= {"ok": not run.problems, "problems": list(run.problems)}
        print_json(document | {"trace": events} if trace else document)
    else:
        for line in [f"seed {seed}", *lines, *events, f"ending: {run.ending}", *([run.text] if run.text else [])]:
            typer.echo(line)
    return _failure(seed, run.problems[0], suffix) if run.problems else ""


def _run_many(first: int, runs: int, hint: HintSpec | None, suffix: str, *, json: bool) -> str:
    """Make many runs and print a summary; returns the first failure, if any."""
    from rrfp.lab.faults.campaign import run_campaign

    campaign = run_campaign(_shown(range(first, first + runs), quiet=json), hint)
    failures = [_failure(seed, problem, suffix) for seed, problem in campaign.failed]
    if json:
        print_json({"first": first, "runs": runs, "ok": not failures, "endings": campaign.endings, "failed": failures})
    else:
        _print_endings(campaign)
        typer.echo(f"{runs} runs from seed {first} on, {len(failures)} failed")
    return failures[0] if failures else ""


def _failure(seed: int, problem: str, suffix: str) -> str:
    from rrfp.lab.faults.campaign import replay_command

    return f"seed {seed} failed: {problem}; replay it with: {replay_command(seed)}{suffix} --trace"


def _shown(seeds: range, *, quiet: bool) -> Iterator[int]:
    with progress_bar(len(seeds), quiet=quiet) as advance:
        for seed in seeds:
            yield seed
            advance()


def _print_endings(campaign: Campaign) -> None:
    from rrfp.lab.faults.checker import Ending

    rows = sorted(campaign.endings.items())
    columns = [
        Column(ending, [str(endings[ending]) if ending in endings else "" for _, endings in rows]) for ending in Ending
    ]
    typer.echo("how runs with one fault ended")
    print_table([Column("fault", [kind for kind, _ in rows], "left")], columns)
