"""The report of one run: a table, a timeline, a trace. Large steps are shown in part, and say so."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rrfp.commands.output import check_folder
from rrfp.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from rrfp.costs.table import CostTable
    from rrfp.sim.cluster.simulation import TensorParallelSimulation
    from rrfp.sim.simulation import Simulation

#: A table of more stages than the first shows only as many of the outermost ones, at each end, as the second.
MOST_ROWS, END_ROWS = 32, 8
#: Boxes that a timeline can hold: beyond it takes minutes to draw and is too small to read.
MOST_BOXES = 20_000


def check_timeline(path: Path, costs: CostTable) -> None:
    """Refuse a timeline that could not be drawn or read, before the step is run.

    Raises:
        ConfigError: if there is nothing to draw with, or the step has more tasks than a timeline
            shows.
    """
    from rrfp.trace.plot import require_matplotlib

    require_matplotlib()
    check_folder(path)
    tasks = costs.num_virtual_stages * costs.microbatches * (3 if costs.split else 2)
    if tasks > MOST_BOXES:
        raise ConfigError(
            f"a timeline shows at most {MOST_BOXES} tasks, this step has {tasks}: take fewer stages or microbatches,"
            " or --trace FILE.json for Perfetto"
        )


def write_pictures(title: str, simulation: Simulation, timeline: Path | None, trace: Path | None) -> None:
    """Draw the timeline and write the trace, where they are wanted.

    Raises:
        ConfigError: if a file cannot be written.
    """
    if timeline is not None:
        from rrfp.trace.plot import plot_timelines

        plot_timelines([(title, simulation.result.trace())], timeline)
    if trace is not None:
        from rrfp.trace.chrome import write_chrome

        write_chrome(trace, [simulation.result.trace()], name=title)


def show_run(title: str, simulation: Simulation) -> None:
    """Print the table and the makespan beside its lower bound."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    console.print(f"{title}: {_size(simulation.costs)}", soft_wrap=True)
    console.print(_table(simulation))
    makespan, bound = f"{simulation.makespan:.6g} s", f"{simulation.lower_bound:.6g} s"
    console.print(f"makespan {makespan}, lower bound {bound}, ratio {simulation.ratio:.4f}")


def show_groups(run: TensorParallelSimulation) -> None:
    """Print what the ranks of a group cost each other, in one line."""
    result, way = run.result, type(run.coordination).__name__.lower()
    ranks = "1 rank" if result.ranks == 1 else f"{result.ranks} ranks"
    typer.echo(
        f"{ranks} a stage, {way}: coordination {result.coordination_share:.2%} of the step, "
        f"{result.failed_rounds_per_task:.3g} failed rounds a task, {result.messages_per_task:.3g} messages a task"
    )


def _size(costs: CostTable) -> str:
    """How large a step is, in a few words."""
    chunks = "" if costs.chunks == 1 else f" x {costs.chunks} chunks ({costs.placement})"
    split = ", split backward" if costs.split else ""
    return f"{costs.stages} stages{chunks}, {costs.microbatches} microbatches{split}"


def _table(simulation: Simulation) -> Table:
    """A row a stage, and one for all of them."""
    from rich.table import Table

    costs = simulation.costs
    table = Table()
    table.add_column("stage")
    for column in ("busy (s)", "busy", "peak held", "received peak", "limit"):
        table.add_column(column, justify="right")
    busy, peaks = simulation.result.busy, simulation.peaks
    for stage in _shown(costs.stages):
        if stage is None:
            hidden = costs.stages - 2 * END_ROWS
            table.add_row(f"... {hidden} more", *[""] * 5)
            continue
        # Like the peak, in chunk tasks.
        limit = "-" if simulation.limits is None else str(simulation.limits[stage] * costs.chunks)
        held, received = str(peaks[stage].held), str(peaks[stage].received)
        table.add_row(str(stage), f"{busy[stage]:.6g}", _share(busy[stage], simulation), held, received, limit)
    if costs.stages > 1:
        mean = sum(busy) / costs.stages
        held, received = (f"max {most}" for most in (max(p.held for p in peaks), max(p.received for p in peaks)))
        table.add_section()
        table.add_row("mean", f"{mean:.6g}", _share(mean, simulation), held, received, "")
    return table


def _shown(stages: int) -> Iterable[int | None]:
    """The stages that have a row; None where some are left out."""
    if stages <= MOST_ROWS:
        return range(stages)
    return [*range(END_ROWS), None, *range(stages - END_ROWS, stages)]


def _share(busy: float, simulation: Simulation) -> str:
    return f"{busy / simulation.makespan if simulation.makespan else 0.0:.1%}"
