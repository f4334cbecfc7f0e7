"""`rrfp simulate`: one method on one cost file, or on one graph of a model, beside the lower bound.

Large steps are shown in part, and say so.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rrfp.commands.command_line import Json, print_json
from rrfp.errors import ConfigError, Faults
from rrfp.lab.commands import options
from rrfp.lab.commands.options import (
    METHOD,
    OUTPUT,
    WORKLOAD,
    From,
    Given,
    MethodCommand,
    TimelineFile,
    To,
    check_tasks,
    checked_window,
    option,
    options_of,
    with_options,
)
from rrfp.lab.generators import MULTIMODAL
from rrfp.lab.sweep.experiment import RECORD_SPLIT, Experiment, SimulatedMethod
from rrfp.lab.sweep.workloads import CostFile, MultimodalWorkload, with_sizes
from rrfp.tables import Column, print_table, terminal

if TYPE_CHECKING:
    from rrfp.costs.table import CostTable
    from rrfp.lab.cluster.simulation import TensorParallelSimulation
    from rrfp.lab.simulation import Simulation
    from rrfp.lab.traces.timeline import TimeWindow

#: A table of more stages than the first shows only as many of the outermost ones, at each end, as the second.
MOST_ROWS, END_ROWS = 32, 8

_PROFILE = (
    "Instead of a cost file: multimodal, a model whose parts form a graph. rrfp sweep has the profiles of chains."
)


class SimulateCommand(MethodCommand):
    """One method, on one workload."""

    def check_together(self, named: Collection[str]) -> None:
        """Refuse options that go with the other source of a workload; two methods."""
        with Faults() as faults:
            with faults.kept():
                _check_source(named)
            with faults.kept():
                super().check_together(named)
            if "hint" in named and "strict" in named:
                faults.keep("--hint and --strict exclude each other: rrfp sweep compares methods")


def _check_source(named: Collection[str]) -> None:
    with Faults() as faults:
        if ("costs" in named) == ("profile" in named):
            faults.keep("exactly one of --costs FILE and --profile multimodal is needed")
        for name in (*(field.name for field in fields(MultimodalWorkload)), "save_costs"):
            if name in named and "profile" not in named:
                with faults.kept():
                    how = f"; for --costs {RECORD_SPLIT}" if name == "split" else ""
                    raise ConfigError(f"--{name.replace('_', '-')} goes with --profile multimodal{how}")
        for name in ("sizes", "tp"):
            if name in named and "costs" not in named:
                faults.keep(f"--{name} goes with --costs")


def _check_profile(text: str) -> None:
    if text != MULTIMODAL:
        raise ConfigError(f"profile is {text!r}, must be {MULTIMODAL}; rrfp sweep has the profiles of chains")


@with_options(
    *options_of(CostFile, WORKLOAD),
    options.as_parameter(
        *("profile", str),
        option("profile", MULTIMODAL, _PROFILE, WORKLOAD, check=_check_profile, values=lambda: (MULTIMODAL,)),
    ),
    *options_of(MultimodalWorkload, WORKLOAD),
    *options_of(SimulatedMethod, METHOD),
)
def simulate(
    given: Given,
    timeline: TimelineFile = None,
    from_ms: From = None,
    to_ms: To = None,
    trace: Annotated[Path | None, option("trace", "FILE.json", "Write a trace for Perfetto.", OUTPUT)] = None,
    save_costs: Annotated[
        Path | None, option("save-costs", "FILE.json", "Write the cost file of the profile.", OUTPUT)
    ] = None,
    json: Json = False,
) -> None:
    """Simulate one training step: one method on one cost file or graph, beside the lower bound.

    `rrfp sweep` runs lists of workloads, methods and seeds.
    """
    from rrfp.costs import write_costs
    from rrfp.lab.simulation import Simulation

    costs = given["costs"]
    with Faults() as faults:
        with faults.kept():
            method = options.one_method(given)
        with faults.kept():
            workload = _graph(given) if costs is None else options.filled(CostFile, given)
            if timeline is not None:
                tasks, instead = workload.costs().num_tasks, "take fewer stages or microbatches, or --trace FILE.json"
                check_tasks(tasks, f"{instead} for Perfetto")
        with faults.kept():
            window = checked_window(timeline, from_ms, to_ms)
        with faults.kept():
            options.check_outputs(given, trace, save_costs)
    experiment = Experiment(workload, method)
    options.warn_of_serial_chunks([experiment])
    if save_costs is not None:
        write_costs(save_costs, with_sizes(workload))
    run = experiment.simulate()
    title = f"strict {method.name}" if method.kind == "strict" else method.name
    simulation = run if isinstance(run, Simulation) else run.simulation
    write_pictures(title, simulation, timeline, window, trace)
    if json:
        print_json(run.to_json())
        return
    show_run(title, simulation)
    if not isinstance(run, Simulation):
        show_groups(run)
    if (sized := experiment.with_planned_sizes()) is not None:
        sized_run = sized.simulate()
        best = sized_run if isinstance(sized_run, Simulation) else sized_run.simulation
        typer.echo(
            f"{options.without_sizes([experiment])}; --sizes planned, by the file's times: makespan "
            f"{best.makespan:.6g} s, ratio {best.ratio:.4f}"
        )


def _graph(given: Given) -> MultimodalWorkload:
    if given["graph"] == "chain" and given["skip"]:
        raise ConfigError("skip goes with graph branch or colocated: a chain has no way round an encoder")
    return options.filled(MultimodalWorkload, given)


def write_pictures(
    title: str, simulation: Simulation, timeline: Path | None, window: TimeWindow, trace: Path | None
) -> None:
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
    console = terminal()
    console.print(f"{title}: {_size(simulation.costs)}", soft_wrap=True)
    _print_stages(simulation)
    makespan, bound = f"{simulation.makespan:.6g} s", f"{simulation.lower_bound:.6g} s"
    console.print(f"makespan {makespan}, lower bound {bound}, ratio {simulation.ratio:.4f}", soft_wrap=True)


def show_groups(run: TensorParallelSimulation) -> None:
    """Print what coordination of the ranks of a group costs."""
    result, way = run.result, type(run.coordination).__name__.lower()
    ranks = "1 rank" if result.ranks == 1 else f"{result.ranks} ranks"
    typer.echo(
        f"{ranks} a stage, {way}: coordination {result.coordination_share:.2%} of the step, "
        f"{result.failed_rounds_per_task:.3g} failed rounds a task, {result.messages_per_task:.3g} messages a task"
    )


def _size(costs: CostTable) -> str:
    chunks = "" if costs.chunks == 1 else f" x {costs.chunks} chunks ({costs.placement})"
    if costs.graph is not None:
        chunks = f", a graph of {costs.num_virtual_stages} virtual stages"
    split = ", split backward" if costs.split else ""
    return f"{costs.stages} stages{chunks}, {costs.microbatches} microbatches{split}"


def _print_stages(simulation: Simulation) -> None:
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
    """As many for all as the longest one needs for five digits."""
    longest = max(seconds)
    return max(0, 4 - math.floor(math.log10(longest))) if longest > 0 else 1


def _shown(stages: int) -> Iterable[int | None]:
    """The stages that have a row; None where some are left out."""
    if stages <= MOST_ROWS:
        return range(stages)
    return [*range(END_ROWS), None, *range(stages - END_ROWS, stages)]


def _share(busy: float, simulation: Simulation) -> str:
    return f"{busy / simulation.makespan if simulation.makespan else 0.0:.1%}"
