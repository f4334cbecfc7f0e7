"""How well the simulator predicts a job from its own trace. Takes about a minute and a half.

    python benchmarks/trace_to_costs/run.py [--steps N] [--quick] [--json]

Four processes under torchrun train the same modules over shm, with one method after the other. The first method's trace
is saved, made into a cost file, and simulated with every method: what a user does to choose a hint and a limit.

workload: paced, tasks are stretched to a cost table (mllm, jitter J1; every step has one of its own), as an accelerator
would leave the CPU idle. cpu, tasks take what they take, on cores that the ranks share.
measured: the median time of a step.
typical: the makespan on the costs of the recorded step whose time is the median (`rrfp costs TRACE --out FILE`), over
measured; 1 is a true prediction.
each step: the median makespan over the costs of each recorded step by itself (`--step N`), over measured.
averaged: the makespan on the median of each task over all steps (`--step median`), over measured.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import Progress

from benchmarks.shared.figures import table_of
from benchmarks.shared.load import OtherLoad
from benchmarks.shared.options import parsed, parser_of
from benchmarks.shared.workers import run_workers
from benchmarks.trace_to_costs.settings import METHODS, WORKLOADS, Settings
from rrfp.lab.simulation import simulate
from rrfp.lab.traces.chrome_reader import read_chrome
from rrfp.lab.traces.measured_costs import measured_costs


@dataclass(frozen=True, slots=True)
class Figures:
    """One method in one workload, in seconds. See the head of this file."""

    workload: str
    method: str
    measured: float
    typical: float
    each_step: float
    averaged: float


def measure(settings: Settings, progress: Progress) -> list[Figures]:
    """Train with every method, and predict each from the first one's trace."""
    steps = progress.add_task(settings.workload, total=len(METHODS) * settings.steps)
    seconds: dict[str, list[float]] = defaultdict(list)
    script = Path(__file__).with_name("worker.py")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "trace.json")
        for line in run_workers(script, settings.stages, settings.to_json(), path):
            seconds[line["method"]].append(line["seconds"])
            progress.advance(steps)
        [run] = read_chrome(path)
    runs = [("trace", run)]
    typical = measured_costs(runs, skip_first=0).table  # the warm-up steps are not among those that were kept
    averaged = measured_costs(runs, skip_first=0, step="median").table
    tables = [measured_costs(runs, step=trace.step).table for trace in run.steps]
    return [
        Figures(
            settings.workload,
            str(method),
            measured=median(seconds[str(method)]),
            typical=simulate(typical, **method.options).makespan,
            each_step=median(simulate(table, **method.options).makespan for table in tables),
            averaged=simulate(averaged, **method.options).makespan,
        )
        for method in METHODS
    ]


def print_table(settings: Settings, figures: Sequence[Figures]) -> None:
    """For people."""
    shape = f"{settings.stages} stages, {settings.microbatches} microbatches, {settings.steps} steps a method; ms"
    table = table_of(shape, "workload, method", "measured", "typical", "each step", "averaged")
    for one in figures:
        ratios = [f"{way / one.measured:.3f}" for way in (one.typical, one.each_step, one.averaged)]
        table.add_row(f"{one.workload}: {one.method}", f"{one.measured * 1e3:.1f}", *ratios)
    Console(width=max(Console().width, 100)).print(table)


def main() -> None:
    """Measure and print."""
    parser = parser_of("The simulator's prediction from a job's own trace, beside the job.")
    parser.add_argument("--steps", type=int, default=Settings().steps, help="measured steps a method, at least 1")
    arguments = parsed(parser, "steps")
    settings = [Settings(workload, steps=arguments.steps) for workload in WORKLOADS]
    if arguments.quick:
        settings = [Settings(each, stages=2, microbatches=3, rows=16, warm_up=1, steps=2) for each in WORKLOADS]
    load = OtherLoad()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        figures = [one for each in settings for one in measure(each, progress)]
    if arguments.json:
        document = {"settings": [asdict(each) for each in settings], "figures": [asdict(one) for one in figures]}
        print(json.dumps({**document, "other_load": load.share()}))
    else:
        print_table(settings[0], figures)
        print(load.sentence())


if __name__ == "__main__":
    main()
