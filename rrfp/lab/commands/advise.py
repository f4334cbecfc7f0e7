"""`rrfp advise TRACE`: what slows a job down, and what a setting would change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rrfp.commands.command_line import Json, print_json
from rrfp.lab.commands.options import REPLAYED, TRACE, Given, progress_bar, wishes_of, with_options


@with_options(*REPLAYED, behind="trace")
def advise(
    given: Given, trace: Annotated[Path, typer.Argument(metavar="TRACE", help=TRACE)], json: Json = False
) -> None:
    """Show what slows recorded steps down, and what settings would change: the engine replays them."""
    from rrfp.lab.advice.advice import advise_file

    with progress_bar() as ran:
        advice = advise_file(str(trace), wishes_of(given), ran)
    if json:
        print_json(advice.to_json())
    else:
        typer.echo(str(advice))
