"""`rrfp advise TRACE`: what slows a job down, and what a setting would change."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from rrfp.commands.command_line import Command, at_least
from rrfp.commands.output import Json, print_json
from rrfp.errors import ConfigError, Faults
from rrfp.lab.commands.sweep import progress_bar

RUN = "The run of this name, such as 'replica 1'; default: the first. A file of all replicas tells a slow rank."
SKIP = "Training steps to leave out at the beginning; default 2."
STEPS = "The most steps to replay, the newest; default 10."
HINT = "The hint of the job, where the trace does not say it."
STRICT = "The strict schedule of the job, where the trace does not say it."
LIMIT = "The limit of the job, where the trace does not say it: a number, 1f1b, n, 2n, or bytes such as 8GB."


class AdviseCommand(Command):
    """A command that starts from one method."""

    def check_together(self, named: Collection[str]) -> None:
        """Refuse what does not go with a strict schedule."""
        with Faults() as faults:
            for name in ("hint", "limit"):
                if "strict" in named and name in named:
                    with faults.kept():
                        raise ConfigError(f"--{name} goes without --strict: a schedule is the order of all tasks")


def advise(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Trace (Chrome JSON) written by save_trace.")],
    run: Annotated[str | None, typer.Option("--run", metavar="NAME", help=RUN)] = None,
    skip_first: Annotated[
        int | None, typer.Option("--skip-first", metavar="N", help=SKIP, callback=at_least("skip-first", 0))
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", help=STEPS, callback=at_least("steps", 5))
    ] = None,
    hint: Annotated[str | None, typer.Option("--hint", metavar="NAME", help=HINT)] = None,
    strict: Annotated[str | None, typer.Option("--strict", metavar="NAME", help=STRICT)] = None,
    limit: Annotated[str | None, typer.Option("--limit", metavar="K|1f1b|n|2n", help=LIMIT)] = None,
    json: Json = False,
) -> None:
    """Show what slows recorded steps down, and what settings would change: the engine replays them."""
    from rrfp.hints.registry import HintSpec, named_or_loaded_hint
    from rrfp.lab.advice.advice import Wishes, advise_file

    named: HintSpec | None = None if hint is None else named_or_loaded_hint(hint)
    given: dict[str, Any] = {"run": run, "skip_first": skip_first, "steps": steps, "strict": strict, "limit": limit}
    wishes = Wishes(hint=named, **{name: value for name, value in given.items() if value is not None})
    with progress_bar() as ran:
        advice = advise_file(str(trace), wishes, ran)
    if json:
        print_json(advice.to_json())
    else:
        typer.echo(str(advice))
