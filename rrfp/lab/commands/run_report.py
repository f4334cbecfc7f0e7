"""The report of one run: a table, a timeline, a trace. Large steps are shown in part, and say so."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rrfp.lab.commands.timeline_options import check_tasks
from rrfp.tables import Column, print_table, terminal

if TYPE_CHECKING:
    from rrfp.costs.table import CostTable
    from rrfp.lab.cluster.simulation import TensorParallelSimulation
    from rrfp.lab.simulation import Simulation
    from rrfp.lab.traces.timeline import TimeWindow

#: A table of more stages than the first shows only as many of the outermost ones, at each end, as the second.
MOST_ROWS, END_ROWS = 32, 8


def check_size(costs: CostTable) -> None:
    """Refuse the timeline of a step with more tasks than it can show, before the step is run."""
    check_tasks(costs.num_tasks, "take fewer stages or microbatches, or --trace FILE.json for Perfetto")


def write_pictures(
    title: str, simulation: Simulation, timeline: Path | None, window: TimeWindow, trace: Path | None
) -> None:
    """Draw the timeline and write the trace, where they are wanted."""
    graph = simulation.costs.graph
    if timeline is not None:
        from rrfp.lab.traces.timeline import plot_timelines

        names = () if graph is None else graph.names
        plot_timelines([(title, simulation.result.trace())], timeline, window, names)
    if trace is not None:
        from rrfp.trace.chrome import write_chrome
        from rrfp.trace.spans import skips

        costs = simulation.costs
        step = replace(simulation.result.trace(), skipped=skips(costs.skipped), sizes=costs.sizes)
        write_chrome(trace, [step], name=title, graph=graph)


def show_run(title: str, simulation: Simulation) -> None:
    """Print the table and the makespan beside its lower bound."""
    console = terminal()
    console.print(f"{title}: {_size(simulation.costs)}", soft_wrap=True)
    _print_stages(simulation)
    makespan, bound = f"{simulation.makespan:.6g} s", f"{simulation.lower_bound:.6g} s"
    console.print(f"makespan {makespan}, lower bound {bound}, ratio {simulation.ratio:.4f}", soft_wrap=True)


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
    if costs.graph is not None:
        chunks = f", a graph of {costs.num_virtual_stages} virtual stages"
    split = ", split backward" if costs.split else ""
    return f"{costs.stages} stages{chunks}, {costs.microbatches} microbatches{split}"


def _print_stages(simulation: Simulation) -> None:
    """A row a stage, and one for all of them."""
    costs, busy, peaks = simulation.costs, simulation.result.busy, simulation.peaks
    decimals = _decimals(busy)
    rows: list[tuple[str, ...]] = []
    for stage in _shown(costs.stages):
        if stage is None:
            rows.append((f"... {costs.stages - 2 * END_ROWS} more", *[""] * 5))
            continue
        # Like the peak, in chunk tasks.
        limit = "-" if simulation.limits is None else str(simulation.limits[stage] * costs.chunks_of(stage))
        held, received = str(peaks[stage].held), str(peaks[stage].received)
        rows.append((str(stage), f"{busy[stage]:.{decimals}f}", _share(busy[stage], simulation), held, received, limit))
    sections = [len(rows) - 1] if costs.stages > 1 else []
    if costs.stages > 1:
        mean = sum(busy) / costs.stages
        held, received = (f"max {most}" for most in (max(p.held for p in peaks), max(p.received for p in peaks)))
        rows.append(("mean", f"{mean:.{decimals}f}", _share(mean, simulation), held, received, ""))
    cells = list(zip(*rows, strict=True))
    heads = ("busy (s)", "busy", "peak held", "received peak", "limit")
    columns = [Column(head, each) for head, each in zip(heads, cells[1:], strict=True)]
    print_table([Column("stage", cells[0], "left")], columns, sections)


def _decimals(seconds: Sequence[float]) -> int:
    """As many for all times as the longest one needs for five digits."""
    longest = max(seconds)
    return max(0, 4 - math.floor(math.log10(longest))) if longest > 0 else 1


def _shown(stages: int) -> Iterable[int | None]:
    """The stages that have a row; None where some are left out."""
    if stages <= MOST_ROWS:
        return range(stages)
    return [*range(END_ROWS), None, *range(stages - END_ROWS, stages)]


def _share(busy: float, simulation: Simulation) -> str:
    return f"{busy / simulation.makespan if simulation.makespan else 0.0:.1%}"
