"""`rrfp simulate`: one method on one cost file, or on one graph of a model, beside the lower bound."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rrfp.commands.command_line import option
from rrfp.commands.output import Json, check_output, print_json
from rrfp.errors import ConfigError, Faults
from rrfp.lab.commands import graph_options
from rrfp.lab.commands import method_options as options
from rrfp.lab.commands.method_options import OUTPUT, WORKLOAD, MethodCommand
from rrfp.lab.commands.timeline_options import From, TimelineFile, To, checked_window

if TYPE_CHECKING:
    from rrfp.lab.sweep.workloads import CostFile

_COSTS = "Cost file (JSON): times of all tasks and messages; `rrfp sweep --save-costs` writes those of profiles."
_SAVE = "Write the cost file of the profile."


class SimulateCommand(MethodCommand):
    """One method, on one workload."""

    def check_together(self, named: Collection[str]) -> None:
        """See `MethodCommand`."""
        with Faults() as faults:
            with faults.kept():
                graph_options.check_source(named)
            with faults.kept():
                super().check_together(named)
            if "hint" in named and "strict" in named:
                with faults.kept():
                    raise ConfigError("--hint and --strict exclude each other: rrfp sweep compares methods")


def _check_costs(text: str) -> None:
    from rrfp.lab.sweep.workloads import CostFile

    CostFile(costs_file=text)


def simulate(
    costs: Annotated[str | None, option("costs", "FILE", _COSTS, WORKLOAD, check=_check_costs, is_list=False)] = None,
    sizes: options.Sizes = None,
    tp: Annotated[int | None, option("tp", "T", options.TP_HELP, WORKLOAD, least=1)] = None,
    profile: graph_options.Profile = None,
    graph: graph_options.GraphOption = None,
    stages: graph_options.Stages = None,
    microbatches: graph_options.Microbatches = None,
    images: graph_options.Images = None,
    sounds: graph_options.Sounds = None,
    skip: graph_options.Skip = None,
    split: graph_options.Split = None,
    latency: graph_options.Latency = None,
    seed: graph_options.Seed = None,
    hint: options.HintName = None,
    strict: options.Strict = None,
    limit: options.LimitText = None,
    admission: options.Admission = None,
    order: options.Order = None,
    sends: options.Sends = None,
    coordination: options.CoordinationName = None,
    timeline: TimelineFile = None,
    from_ms: From = None,
    to_ms: To = None,
    trace: Annotated[Path | None, option("trace", "FILE.json", "Write a trace for Perfetto.", OUTPUT)] = None,
    save_costs: Annotated[Path | None, option("save-costs", "FILE.json", _SAVE, OUTPUT)] = None,
    json: Json = False,
) -> None:
    """Simulate one training step: one method on one cost file or graph, beside the lower bound.

    `rrfp sweep` runs lists of workloads, methods and seeds.
    """
    from rrfp.costs import write_costs
    from rrfp.lab.commands.run_report import check_size, show_groups, show_run, write_pictures
    from rrfp.lab.simulation import Simulation
    from rrfp.lab.sweep.experiment import Experiment
    from rrfp.lab.sweep.workloads import with_sizes

    texts: options.Texts = {"hint": hint, "strict": strict, "limit": limit, "admission": admission}
    texts = {**texts, "order": order, "sends": sends, "coordination": coordination}
    named = {"graph": graph, "stages": stages, "microbatches": microbatches, "images": images, "sounds": sounds}
    named = {**named, "skip": skip, "split": split, "latency": latency, "seed": seed}
    with Faults() as faults:
        with faults.kept():
            method = options.one_method(texts)
        with faults.kept():
            workload = graph_options.workload_of(named) if costs is None else _cost_file(costs, sizes, tp)
            if timeline is not None:
                check_size(workload.costs())
        with faults.kept():
            window = checked_window(timeline, from_ms, to_ms)
        for path in (trace, save_costs):
            if path is not None:
                with faults.kept():
                    check_output(path, *([] if costs is None else [costs]))
    experiment = Experiment(workload, method)
    options.warn_of_serial_chunks([experiment])
    if save_costs is not None:
        write_costs(save_costs, with_sizes(workload))
    run = experiment.simulate()
    title = f"{method.name} (strict)" if method.kind == "strict" else method.name
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


def _cost_file(costs: str, sizes: str | None, tp: int | None) -> CostFile:
    from rrfp.lab.sweep.workloads import CostFile

    return CostFile(costs_file=costs, sizes_from=sizes, tp=tp)
