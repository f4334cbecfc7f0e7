"""`rrfp simulate`: methods on a cost file or on named workloads, beside the lower bound; one run or many."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rrfp.commands import simulate_options as options
from rrfp.commands.output import Json, print_json
from rrfp.commands.simulate_tp import Groups, check_cells, groups_of, shown, simulate_seeds
from rrfp.errors import ConfigError

if TYPE_CHECKING:
    from rrfp.costs.table import CostTable
    from rrfp.sim.cluster.simulation import TensorParallelSimulation
    from rrfp.sim.simulation import Simulation
    from rrfp.sim.sweep.experiment import Cell, Method


def simulate(
    costs: options.Costs = None,
    profile: options.Profile = None,
    stages: options.Stages = None,
    microbatches: options.Microbatches = None,
    chunks: options.Chunks = None,
    placement: options.Placement = None,
    split: options.Split = None,
    jitter: options.Jitter = None,
    latency: options.Latency = None,
    seed: options.Seed = None,
    sizes: options.Sizes = None,
    hint: options.HintName = None,
    strict: options.Strict = None,
    limit: options.LimitText = None,
    admission: options.Admission = None,
    sends: options.Sends = None,
    tp: options.Tp = None,
    coordination: options.CoordinationName = None,
    seeds: options.Seeds = None,
    csv: options.Csv = None,
    png: options.Png = None,
    jobs: options.Jobs = None,
    timeline: options.Timeline = None,
    trace: options.Trace = None,
    json: Json = False,
) -> None:
    """Simulate training steps, and compare them with the lower bound.

    The workload is a cost file, or a profile. With a profile every option of workload and method takes several values
    with commas between them (--stages 4,8,16 --hint bf,fb --strict 1f1b --seeds 5): all combinations run.
    --tp simulates groups of ranks.
    """
    methods = {"hint": hint, "strict": strict, "limit": limit, "admission": admission, "sends": sends}
    workload: options.Texts = {"profile": profile, "stages": stages, "microbatches": microbatches, "chunks": chunks}
    workload = {**workload, "placement": placement, "split": split, "jitter": jitter, "latency": latency}
    workload = {**workload, "seed": seed, "seeds": seeds}
    options.check_source(costs, {**workload, "csv": csv, "png": png, "jobs": jobs})
    groups, one = groups_of(tp, coordination, methods), _One(timeline, trace, json)
    if costs is not None:
        _simulate_file(costs, methods, sizes, groups, one)
    elif sizes is not None:
        raise ConfigError("--sizes goes with --costs; a profile tells hints its own")
    else:
        cells = options.cells_of(workload, methods)
        _warn_of_serial_chunks(any(_is_serial(cell.method, cell.workload.chunks) for cell in cells))
        if groups is not None:
            check_cells(cells, {"csv": csv, "png": png})
        if len(cells) == 1:
            _simulate_cell(cells[0], groups, csv, png, one)
        elif timeline is not None or trace is not None:
            option = "timeline" if timeline is not None else "trace"
            raise ConfigError(f"--{option} shows one run, these are {len(cells)}: give one value for every option")
        elif groups is not None:
            title = f"{_title(cells[0].method)}, {_workload(cells[0])}"
            simulate_seeds(groups, cells, title, jobs=jobs, json=json)
        else:
            _simulate_cells(cells, jobs, csv, png, json=json)


@dataclass(frozen=True, slots=True)
class _One:
    """What is wanted of a single run."""

    timeline: Path | None
    trace: Path | None
    json: bool

    def check(self, costs: CostTable) -> None:
        """Refuse what could not be shown, before the run."""
        from rrfp.commands.simulate_show import check_folder, check_timeline

        if self.timeline is not None:
            check_timeline(self.timeline, costs)
        if self.trace is not None:
            check_folder(self.trace)

    def show(self, title: str, run: Simulation | TensorParallelSimulation) -> None:
        """Write the pictures, then print the stable JSON or the table."""
        from rrfp.commands.simulate_show import show_run, write_pictures
        from rrfp.sim.simulation import Simulation

        simulation = run if isinstance(run, Simulation) else run.simulation
        write_pictures(title, simulation, self.timeline, self.trace)
        if self.json:
            print_json(run.to_json())
            return
        show_run(title, simulation)
        if not isinstance(run, Simulation):
            typer.echo(shown(run))


def _simulate_file(path: Path, methods: options.Texts, sizes: str | None, groups: Groups | None, wanted: _One) -> None:
    from rrfp.costs.files import read_costs

    method = options.one_method(methods)
    if sizes is not None and method.kind == "strict":
        raise ConfigError("--sizes goes with --hint; a strict schedule knows its order")
    costs = read_costs(path)
    wanted.check(costs)
    told_sizes = options.sizes_for(costs, sizes)
    _warn_of_serial_chunks(_is_serial(method, costs.chunks))
    if groups is None:
        wanted.show(_title(method), method.simulate(costs, told_sizes))
    else:
        wanted.show(_title(method), groups.simulate(costs, method, told_sizes, None, 0))


def _simulate_cell(cell: Cell, groups: Groups | None, csv: Path | None, png: Path | None, wanted: _One) -> None:
    from rrfp.commands.simulate_sweep import check_picture
    from rrfp.sim.sweep.plot import plot_sweep
    from rrfp.sim.sweep.runs import Row, RowFile

    wanted.check(cell.workload.costs())
    title = f"{_title(cell.method)}, {_workload(cell)}, seed {cell.workload.seed}"
    if groups is not None:
        wanted.show(title, groups.simulate_cell(cell))
        return
    if png is not None:
        check_picture(png, [cell])
    with nullcontext() if csv is None else RowFile(csv) as file:
        simulation = cell.simulate()
        row = Row.of(cell, simulation)
        if file is not None:
            file.add(row)
    if png is not None:
        plot_sweep([row], png)
    wanted.show(title, simulation)


def _simulate_cells(cells: list[Cell], jobs: int | None, csv: Path | None, png: Path | None, *, json: bool) -> None:
    from rrfp.commands.simulate_sweep import check_picture, run_sweep, show_sweep
    from rrfp.sim.sweep.plot import plot_sweep

    if png is not None:
        check_picture(png, cells)
    result = run_sweep(cells, jobs=jobs, csv=csv)
    if png is not None:
        plot_sweep(result.rows, png)
    show_sweep(result, json=json)


def _is_serial(method: Method, chunks: int) -> bool:
    return chunks > 1 and method.limit == "1f1b"


def _warn_of_serial_chunks(is_needed: bool) -> None:
    if is_needed:
        typer.echo(
            "warning: with several chunks --limit 1f1b leaves the last stage one microbatch for all of them: they run "
            "one after the other; n holds what 1F1B holds on its first stage (rrfp.Pipeline refuses 1f1b here)",
            err=True,
        )


def _title(method: Method) -> str:
    return f"{method.name} (strict)" if method.kind == "strict" else method.name


def _workload(cell: Cell) -> str:
    """What the table's own head does not say of a workload, but for its seed."""
    workload = cell.workload
    return f"{workload.profile} {workload.jitter}, latency {workload.latency}"
