"""What `rrfp plan` gains, how well it predicts layers that were moved, and what an order of microbatches would gain.

    python benchmarks/plan/run.py [--stages 4,8] [--profiles llm,...] [--json]       # simulated; about five minutes
    python benchmarks/plan/run.py --processes [--stages 4] [--profiles head,...]     # about three minutes, quiet
    python benchmarks/plan/run.py --orders [--stages 4,8] [--draws 2] [--jobs J]     # simulated; half an hour

**Simulated**: for each of the nine profiles (four layers a plain stage, an output layer, jitter J1, whole backward) ten
steps of the even cut under the defaults are recorded and planned, within the bytes that the fullest stage held. The
plan, the defaults, torch's 1F1B on the even cut and its ZBV on the even V then run on twenty other steps. Sixteen
stages (`--stages 16`) are 64 layers; the search's seconds are of one core.

**Processes**: a process a stage under torchrun runs stages that sleep as long as the layers take, as if accelerators
computed, with messages of a megabyte over shm. The even cut is recorded and planned; then the best plan of each cut and
placement runs.

**Orders**: `benchmarks/plan/orders.py` says what they are.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.plan.gains import Gain, gain
from benchmarks.plan.layered import Model
from benchmarks.plan.orders import EVALUATIONS, FIRST, KNOWLEDGE, Case, print_orders, searched
from benchmarks.shared.figures import table_of
from benchmarks.shared.load import OtherLoad
from benchmarks.shared.options import parsed, parser_of
from benchmarks.shared.workers import run_workers
from rrfp.costs import PROFILES
from rrfp.hints.registry import DEFAULT_HINT
from rrfp.lab.advice.advice import Adviser, Wishes
from rrfp.lab.advice.recorded import read_recording
from rrfp.lab.advice.replays import Replayer
from rrfp.lab.planning.layers import read_layers
from rrfp.lab.planning.plan import Basis, Request, plans_of
from rrfp.lab.planning.report import Plans
from rrfp.lab.sweep.pool import run_all, usable_cores
from rrfp.lab.traces.chrome_reader import read_chrome
from rrfp.pipeline.plan_file import PLAN, Plan

#: Profiles that run in processes, and rows of a plan that do.
MEASURED, MEASURED_ROWS = ("head", "mllm", "zipf"), 4


@dataclass(frozen=True, slots=True)
class Prediction:
    """One job in processes, in seconds of the mean step.

    Attributes:
        profile: of the model.
        stages: N.
        rank: its row in the plan's table; 0 as recorded.
        layout: placement and layers.
        settings: of the pipeline.
        predicted: from the trace of the job as recorded.
        replayed: from the job's own trace; where only this is right, tasks or messages took another time.
        measured: by the job.
        core_wait: the part of its tasks' time for which a stage of the job waited for a core.
    """

    profile: str
    stages: int
    rank: int
    layout: str
    settings: str
    predicted: float
    replayed: float
    measured: float
    core_wait: float

    @property
    def error(self) -> float:
        """Of the prediction, as a part of what was measured."""
        return self.predicted / self.measured - 1


def predictions(model: Model, steps: int, rows: int, progress: Progress, **effort: Any) -> Iterator[Prediction]:
    """Record, plan, and run what was planned."""
    task = progress.add_task(f"{model.profile}, PP {model.stages}", total=None)
    layout = model.even()
    recorded = Plan(model.stages, 1, "looped", DEFAULT_HINT, "n", False, layout.cuts, model.layers)
    script = Path(__file__).with_name("worker.py")
    with tempfile.TemporaryDirectory() as folder:
        layers = Path(folder) / "layers.json"

        def measured(plans: Sequence[Plan]) -> list[tuple[float, Adviser]]:
            plain = json.dumps([{PLAN: plan.to_plain()} for plan in plans])
            seconds = []
            for line in run_workers(script, model.stages, model.to_json(), plain, str(steps), folder):
                seconds.append(line["seconds"])
                progress.advance(task)
            means = [fmean(seconds[n : n + steps]) for n in range(0, len(seconds), steps)]
            return [(mean, _adviser(model, Path(folder) / f"{n}.json", steps)) for n, mean in enumerate(means)]

        [(now, adviser)] = measured([recorded])
        model.write_layers(layers, layout, steps)
        request = Request(slow=model.slow, **effort)
        plans = plans_of(Basis.recorded(adviser), read_layers(layers), request, lambda: progress.advance(task))
        jobs = [(0, f"even: {plans.now.layers}", plans.now.settings, plans.predicted, now, adviser)]
        chosen = _chosen(plans, rows)
        for (number, _), taken in zip(chosen, measured([plan for _, plan in chosen]), strict=True):
            row = plans.rows[number]
            jobs.append((number + 1, f"{row.placement}: {row.layers}", row.settings, row.seconds, *taken))
    for rank, where, settings, predicted, seconds, own in jobs:
        replayed, waited = float(own.base.seconds.mean()), own.recording.core_wait() or 0.0
        job = model.profile, model.stages, rank, where, settings
        yield Prediction(*job, predicted, replayed, seconds, waited)


def _adviser(model: Model, path: Path, steps: int) -> Adviser:
    [run] = read_chrome(path)
    recording = read_recording(model.profile, run, skip_first=0, most=steps)
    # Not by adviser_of, which refuses a trace whose ranks shared cores: the table says how much they did.
    return Adviser(model.profile, recording, [], Wishes(), Replayer(recording.steps, lambda: None))


def _chosen(plans: Plans, most: int) -> list[tuple[int, Plan]]:
    """The best row of each layout and split."""
    found: dict[Any, tuple[int, Plan]] = {}
    for number, row in enumerate(plans.rows):
        if row.plan is not None:
            found.setdefault((row.plan.where, row.plan.cuts, row.plan.split), (number, row.plan))
    return [*found.values()][:most]


def print_gains(gains: Sequence[Gain]) -> None:
    """For people."""
    heads = "model", "said", "saved", "over 1F1B", "over ZBV", "search, s", "plan"
    table = table_of("percent of the step that the plan saves", *heads)
    for one in gains:
        figures = (f"{100 * each:.1f}" for each in (one.predicted, one.saved, one.over_1f1b, one.over_zbv))
        table.add_row(f"{one.profile}, PP {one.stages}", *figures, f"{one.seconds:.0f}", one.plan)
    Console(width=max(Console().width, 160)).print(table)


def print_predictions(found: Sequence[Prediction]) -> None:
    """For people."""
    heads = "job", "row", "predicted", "measured", "error %", "own trace %", "core wait %", "settings"
    table = table_of("mean step, ms; own trace: error of the replay of the job's own trace", *heads)
    for one in found:
        times = (f"{1e3 * each:.1f}" for each in (one.predicted, one.measured))
        name = f"{one.profile}, PP {one.stages}, {one.layout}"
        off = (f"{100 * each:+.1f}" for each in (one.error, one.replayed / one.measured - 1))
        settings = one.settings.replace(", split False", "")
        table.add_row(name, str(one.rank), *times, *off, f"{100 * one.core_wait:.0f}", settings)
    Console(width=max(Console().width, 160)).print(table)
    for name, errors in (
        ("as recorded", [abs(one.error) for one in found if not one.rank]),
        ("with the layers elsewhere", [abs(one.error) for one in found if one.rank]),
    ):
        if errors:
            print(f"{name}: error {median(errors):.1%} in the median, {max(errors):.1%} at worst")
    waited = max(one.core_wait for one in found)
    print(f"threads waited for a core up to {waited:.0%} of the time of their tasks; rrfp plan refuses above 10%")
    for profile, stages in dict.fromkeys((one.profile, one.stages) for one in found):
        rows = [one for one in found if (one.profile, one.stages) == (profile, stages) and one.rank]
        if rows:
            behind = rows[0].measured / min(one.measured for one in rows) - 1
            print(f"{profile}, PP {stages}: the best-ranked plan is {behind:.1%} behind the measured best")


def main() -> None:
    """Measure and print."""
    parser = parser_of("What rrfp plan gains, and how well it predicts.")
    parser.add_argument("--processes", action="store_true", help="predictions beside jobs, in place of gains")
    parser.add_argument("--profiles", default="", help="some of them, between commas")
    parser.add_argument("--orders", action="store_true", help="orders of microbatches, in place of gains")
    parser.add_argument("--stages", default="", help="numbers of stages, between commas; with --processes 4")
    parser.add_argument("--steps", type=int, default=8, help="measured steps a job, at least 5")
    parser.add_argument("--draws", type=int, default=2, help="steps whose orders are searched, each of its own")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="processes that search orders")
    arguments = parsed(parser, "steps", "draws", "jobs")
    default = MEASURED if arguments.processes else tuple(PROFILES)
    profiles = tuple(filter(None, arguments.profiles.split(","))) or default
    if unknown := {*profiles} - {*PROFILES}:
        parser.error(f"--profiles is {min(unknown)}, must be among: {', '.join(PROFILES)}")
    if arguments.steps < 5:
        parser.error(f"--steps is {arguments.steps}, must be at least 5")
    sizes = [int(text) for text in (arguments.stages or ("4" if arguments.processes else "4,8")).split(",")]
    if arguments.quick:
        profiles, sizes = profiles[:1], [2]
    load, quick = OtherLoad(), arguments.quick
    document: dict[str, Any] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        if arguments.processes:
            models = [Model(profile, size, 3 * size) for size in sizes for profile in profiles]
            steps, rows, effort = arguments.steps, MEASURED_ROWS, dict[str, Any]()
            if quick:
                models, steps, rows, effort = [Model(profiles[0], 2, 4)], 5, 1, {"tasks": 5000}
            found = [one for each in models for one in predictions(each, steps, rows, progress, **effort)]
            document["predictions"] = [asdict(one) for one in found]
        elif arguments.orders:
            draws, evaluations = (1, FIRST) if quick else (arguments.draws, EVALUATIONS)
            cases = [
                Case(profile, size, draw, knowledge, evaluations)
                for size, profile, draw, knowledge in product(sizes, profiles, range(draws), KNOWLEDGE)
            ]
            orders = [*progress.track(run_all(searched, cases, jobs=arguments.jobs), len(cases))]
            document["orders"] = [asdict(one) for one in orders]
        else:
            models = [Model(profile, size, 3 * size) for size in sizes for profile in profiles]
            task, effort = progress.add_task("steps", total=None), {"tasks": 5000} if quick else {}
            gains = [gain(each, 2 if quick else 20, lambda: progress.advance(task), **effort) for each in models]
            document["gains"] = [asdict(one) for one in gains]
    if arguments.json:
        print(json.dumps({**document, "other_load": load.share()}))
        return
    if arguments.processes:
        print_predictions(found)
    elif arguments.orders:
        print_orders(orders)
    else:
        print_gains(gains)
    print(load.sentence())


if __name__ == "__main__":
    main()
