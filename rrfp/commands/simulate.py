"""`rrfp simulate`: one method on one cost file, beside the lower bound."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rrfp.commands import method_options as options
from rrfp.commands.method_options import OUTPUT, WORKLOAD, option
from rrfp.commands.output import Json, check_folder, print_json

_COSTS = "Cost file (JSON): times of all tasks and messages; `rrfp sweep --save-costs` writes those of profiles."


def simulate(
    costs: Annotated[Path, option("costs", "FILE", _COSTS, WORKLOAD)],
    sizes: options.Sizes = None,
    tp: Annotated[int | None, option("tp", "T", options.TP_HELP, WORKLOAD, 1)] = None,
    hint: options.HintName = None,
    strict: options.Strict = None,
    limit: options.LimitText = None,
    admission: options.Admission = None,
    sends: options.Sends = None,
    coordination: options.CoordinationName = None,
    timeline: Annotated[Path | None, option("timeline", "FILE.png", "Draw the step's timeline.", OUTPUT)] = None,
    trace: Annotated[Path | None, option("trace", "FILE.json", "Write a trace for Perfetto.", OUTPUT)] = None,
    json: Json = False,
) -> None:
    """Simulate one training step: one method on one cost file, beside the lower bound.

    `rrfp sweep` runs lists of workloads, methods and seeds.
    """
    from rrfp.commands.run_report import check_timeline, show_groups, show_run, write_pictures
    from rrfp.sim.simulation import Simulation
    from rrfp.sim.sweep.experiment import CostFile, Experiment

    texts: options.Texts = {"hint": hint, "strict": strict, "limit": limit, "admission": admission}
    texts = {**texts, "sends": sends, "coordination": coordination, "tp": tp, "sizes": sizes}
    method = options.one_method(texts)
    experiment = Experiment(CostFile(costs_file=str(costs), sizes_from=sizes, tp=tp), method)
    if timeline is not None:
        check_timeline(timeline, experiment.workload.costs())
    if trace is not None:
        check_folder(trace)
    options.warn_of_serial_chunks([experiment])
    run = experiment.simulate()
    title = f"{method.name} (strict)" if method.kind == "strict" else method.name
    simulation = run if isinstance(run, Simulation) else run.simulation
    write_pictures(title, simulation, timeline, trace)
    if json:
        print_json(run.to_json())
        return
    show_run(title, simulation)
    if not isinstance(run, Simulation):
        show_groups(run)
