"""`rrfp advise TRACE`: what slows a job down, and what a setting would change."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rrfp.commands.command_line import Command, option
from rrfp.commands.output import Json, print_json
from rrfp.errors import ConfigError, Faults
from rrfp.lab.commands.options import Given, as_parameter, with_options
from rrfp.lab.commands.sweep import progress_bar

if TYPE_CHECKING:
    from rrfp.lab.advice.advice import Wishes

TRACE = "Trace (Chrome JSON) written by save_trace."
_RUN = "The run of this name, such as 'replica 1'; default: the first. A file of all replicas tells a slow rank."
_SKIP = "Training steps to leave out at the beginning; default 2."
_STEPS = "The most steps to replay, the newest; default 10."
_HINT = "The hint of the job, where the trace does not say it."
_STRICT = "The strict schedule of the job, where the trace does not say it."
_LIMIT = "The limit of the job, where the trace does not say it: a number, 1f1b, n, 2n, or bytes such as 8GB."

#: Those that say which steps are replayed.
RECORDED = (
    as_parameter("run", str, option("run", "NAME", _RUN)),
    as_parameter("skip_first", int, option("skip-first", "N", _SKIP, least=0)),
    as_parameter("steps", int, option("steps", "N", _STEPS, least=5)),
)

#: Those, and how the job ran: of all commands that replay a trace.
REPLAYED = (
    *RECORDED,
    as_parameter("hint", str, option("hint", "NAME", _HINT)),
    as_parameter("strict", str, option("strict", "NAME", _STRICT)),
    as_parameter("limit", str, option("limit", "K|1f1b|n|2n", _LIMIT)),
)


def wishes_of(given: Given) -> Wishes:
    """What the options of `REPLAYED` say."""
    from rrfp.hints.registry import named_or_loaded_hint
    from rrfp.lab.advice.advice import Wishes

    values = {name: value for name, value in given.items() if value is not None}
    if "hint" in values:
        values["hint"] = named_or_loaded_hint(values["hint"])
    return Wishes(**values)


class AdviseCommand(Command):
    """A command that starts from one method."""

    def check_together(self, named: Collection[str]) -> None:
        """Refuse what does not go with a strict schedule."""
        with Faults() as faults:
            for name in ("hint", "limit"):
                if "strict" in named and name in named:
                    with faults.kept():
                        raise ConfigError(f"--{name} goes without --strict: a schedule is the order of all tasks")


@with_options(*REPLAYED, behind="trace")
def advise(
    given: Given,
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help=TRACE)],
    json: Json = False,
) -> None:
    """Show what slows recorded steps down, and what settings would change: the engine replays them."""
    from rrfp.lab.advice.advice import advise_file

    with progress_bar() as ran:
        advice = advise_file(str(trace), wishes_of(given), ran)
    if json:
        print_json(advice.to_json())
    else:
        typer.echo(str(advice))
