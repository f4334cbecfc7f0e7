"""How well `rrfp advise` predicts a job, and the same job with another setting. Takes about three minutes.

    python benchmarks/advise/run.py [--stages 4] [--steps N] [--demo] [--quick] [--json]

Processes under torchrun, one a stage, run stages that sleep as long as a cost table says, as if accelerators computed,
and send messages of a megabyte over shm. Each step has a table of its own. The trace of the first job predicts all:
itself, other limits, another hint, a split backward, and twice as many microbatches a step.

`--demo`: `rrfp demo` in place of these jobs, whose stages train a GPT and then wait until the table's time is over. The
trace of its row bf predicts that row, another hint, a strict schedule, and rows whose backward is split.

predicted: the mean step by the engine. Of split, weight gradients are taken to be half of backward, as they are here;
the advice says a third to a half. Of twice as many microbatches, a step of two recorded ones.
measured: the mean step of the job with that setting, on the same tables.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

from rich.console import Console
from rich.progress import Progress

from benchmarks.advise.settings import DEMO, JOBS, PROFILES, Job, Settings
from benchmarks.shared.figures import table_of
from benchmarks.shared.load import OtherLoad
from benchmarks.shared.options import parsed, parser_of
from benchmarks.shared.workers import environment_with, run_workers
from rrfp.lab.advice.causes import split_backward
from rrfp.lab.advice.recorded import Recorded, read_recording
from rrfp.lab.advice.replays import Method, Replayer, joined
from rrfp.lab.traces.chrome_reader import read_chrome


@dataclass(frozen=True, slots=True)
class Figures:
    """One job on the tables of one profile, in seconds. See the head of this file."""

    profile: str
    job: str
    predicted: float
    measured: float
    #: The part of its tasks' time for which a stage of the recorded job waited for a core.
    core_wait: float

    @property
    def error(self) -> float:
        """Of the prediction, as a part of what was measured."""
        return self.predicted / self.measured - 1


def measure(settings: Settings, progress: Progress) -> list[Figures]:
    """Run every job, and predict each from the first one's trace."""
    steps = progress.add_task(settings.profile, total=sum(settings.steps // job.joins for job in JOBS))
    seconds: dict[str, list[float]] = defaultdict(list)
    script = Path(__file__).with_name("worker.py")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "trace.json")
        for line in run_workers(script, settings.stages, settings.to_json(), path):
            seconds[line["job"]].append(line["seconds"])
            progress.advance(steps)
        [run] = read_chrome(path)
    recording = read_recording(settings.profile, run, skip_first=0, most=settings.steps)
    waited = recording.core_wait() or 0.0
    return [
        Figures(settings.profile, job.name, predict(recording, job), mean(seconds[job.name]), waited) for job in JOBS
    ]


def measure_demo(stages: int, microbatches: int, steps: int) -> list[Figures]:
    """Run the demo, and predict its rows from the trace of one."""
    with tempfile.TemporaryDirectory() as folder:
        counts = {"stages": stages, "microbatches": microbatches, "steps": steps}
        arguments = [f"--{name}={count}" for name, count in counts.items()]
        command = [sys.executable, "-m", "rrfp", "demo", f"--out={folder}", *arguments]
        subprocess.run(command, env=environment_with({}), stdout=subprocess.DEVNULL, check=True)
        recordings = {}
        for name in DEMO:
            [run] = read_chrome(Path(folder) / f"trace-{name}.json")
            recordings[name] = read_recording(name, run, skip_first=0, most=steps)
    first, *_ = recordings.values()
    waited = first.core_wait() or 0.0
    return [
        Figures("demo", job.name, predict(first, job), mean(step.seconds for step in recordings[name].steps), waited)
        for name, job in DEMO.items()
    ]


def predict(recording: Recorded, job: Job) -> float:
    """The mean step of the job on the recorded tasks and messages."""
    traced = recording.run.job
    assert traced is not None
    steps = [*recording.steps]
    if job.joins == 2:
        steps = [joined(*pair) for pair in zip(steps[::2], steps[1::2], strict=True)]
    if job.split:
        steps = split_backward(steps, 1 / 2)
    hint, limit = (None, None) if job.strict is not None else (job.hint, job.limit)
    method = Method(hint, limit, job.strict, takes_offers=traced.takes_offers)
    return float(Replayer(steps, lambda: None)(method).seconds.mean())


def print_table(shape: str, figures: Sequence[Figures]) -> None:
    """For people."""
    table = table_of(f"{shape}; ms", "tables, job", "predicted", "measured", "error %")
    for one in figures:
        name, times = f"{one.profile}: {one.job}", (f"{1e3 * each:.1f}" for each in (one.predicted, one.measured))
        table.add_row(name, *times, f"{100 * one.error:+.1f}")
    Console(width=max(Console().width, 100)).print(table)
    same = [abs(one.error) for one in figures if one.job == JOBS[0].name]
    changed = [abs(one.error) for one in figures if one.job != JOBS[0].name]
    for name, errors in (("as recorded", same), ("with another setting", changed)):
        print(f"{name}: error {median(errors):.1%} in the median, {max(errors):.1%} at worst")
    waited = max(one.core_wait for one in figures)
    print(f"threads waited for a core up to {waited:.0%} of the time of their tasks; rrfp advise refuses above 10%")


def main() -> None:
    """Measure and print."""
    parser = parser_of("The predictions of rrfp advise beside the jobs.")
    parser.add_argument("--steps", type=int, default=Settings().steps, help="measured steps a job, even, at least 6")
    parser.add_argument("--stages", type=int, default=Settings().stages, help="processes, at least 2")
    parser.add_argument("--demo", action="store_true", help="rows of rrfp demo, in place of jobs that only sleep")
    arguments = parsed(parser, "steps")
    if arguments.steps < 6 or arguments.steps % 2:
        parser.error(f"--steps is {arguments.steps}, must be an even number of at least 6")
    if arguments.stages < 2:
        parser.error(f"--stages is {arguments.stages}, must be at least 2")
    stages, microbatches, steps = arguments.stages, 3 * arguments.stages, arguments.steps
    settings = [Settings(profile, stages, microbatches, steps=steps) for profile in PROFILES]
    if arguments.quick:
        stages, microbatches, steps = 2, 3, 6
        settings = [Settings(PROFILES[0], stages, microbatches, warm_up=1, steps=steps)]
    load = OtherLoad()
    if arguments.demo:
        settings, figures = [], measure_demo(stages, microbatches, steps)
    else:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            figures = [one for each in settings for one in measure(each, progress)]
    if arguments.json:
        document = {"settings": [asdict(each) for each in settings], "figures": [asdict(one) for one in figures]}
        print(json.dumps({**document, "other_load": load.share()}))
    else:
        print_table(f"{stages} stages, {microbatches} microbatches, {steps} steps a job", figures)
        print(load.sentence())


if __name__ == "__main__":
    main()
