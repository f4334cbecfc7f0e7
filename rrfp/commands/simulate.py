"""`rrfp simulate`: one method on one cost file, beside the lower bound."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rrfp.commands.naming import named_or_loaded_hint
from rrfp.commands.output import Json, print_json
from rrfp.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from rrfp.sim.simulation import Simulation

_HINT = "Dispatch by this hint: a name of `rrfp hints`, or module:attribute."
_STRICT = "Run this schedule to the letter: a name that `rrfp hints` lists as a schedule."
_LIMIT = "Microbatches a stage may hold: a number, 1f1b (N - i on stage i) or 2n. With --hint only; default 2n."


def simulate(
    costs: Annotated[Path, typer.Option("--costs", metavar="FILE", help="Cost file (JSON).")],
    hint: Annotated[str | None, typer.Option("--hint", metavar="NAME", help=_HINT)] = None,
    strict: Annotated[str | None, typer.Option("--strict", metavar="NAME", help=_STRICT)] = None,
    limit: Annotated[str | None, typer.Option("--limit", metavar="K|1f1b|2n", help=_LIMIT)] = None,
    timeline: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the step's timeline.")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write a trace for Perfetto.")] = None,
    json: Json = False,
) -> None:
    """Simulate one training step from a cost file, and compare it with the lower bound."""
    from rrfp.costs.files import read_costs
    from rrfp.sim.simulation import simulate as run

    if (hint is None) == (strict is None):
        raise ConfigError("exactly one of --hint NAME and --strict NAME is needed (names: rrfp hints)")
    if strict is not None and limit is not None:
        raise ConfigError("--limit goes with --hint; a strict schedule holds what its order holds")
    policy = None if hint is None else named_or_loaded_hint(hint)
    simulation = run(read_costs(costs), hint=policy, strict=strict, limit=limit)
    title = f"{strict} (strict)" if hint is None else hint
    if timeline is not None:
        from rrfp.trace.plot import plot_timelines

        plot_timelines([(title, simulation.result.trace())], timeline)
    if trace is not None:
        from rrfp.trace.chrome import write_chrome

        write_chrome(trace, [simulation.result.trace()], name=title)
    if json:
        print_json(simulation.to_json())
    else:
        _show(title, simulation)


def _show(title: str, simulation: Simulation) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    console.print(_table(title, simulation))
    makespan, bound = f"{simulation.makespan:.6g} s", f"{simulation.lower_bound:.6g} s"
    console.print(f"makespan {makespan}, lower bound {bound}, ratio {simulation.ratio:.4f}")


def _table(title: str, simulation: Simulation) -> Table:
    """A row a stage."""
    from rich.table import Table

    costs = simulation.costs
    chunks = "" if costs.chunks == 1 else f" x {costs.chunks} chunks ({costs.placement})"
    split = ", split backward" if costs.split else ""
    shape = f"{costs.stages} stages{chunks}, {costs.microbatches} microbatches{split}"
    table = Table(title=f"{title}: {shape}", title_justify="left")
    table.add_column("stage")
    for column in ("busy (s)", "busy", "peak held", "received peak", "limit"):
        table.add_column(column, justify="right")
    for stage, (busy, peaks) in enumerate(zip(simulation.result.busy, simulation.peaks, strict=True)):
        share = busy / simulation.makespan if simulation.makespan else 0.0
        # Like the peak, in chunk tasks.
        limit = "-" if simulation.limits is None else str(simulation.limits[stage] * costs.chunks)
        table.add_row(str(stage), f"{busy:.6g}", f"{share:.1%}", str(peaks.held), str(peaks.received), limit)
    return table
