"""`rrfp trace FILE...`: where the time of recorded steps went, as tables or as a picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rrfp.commands.command_line import Json, print_json
from rrfp.errors import ConfigError
from rrfp.lab.commands.options import From, TimelineFile, To, check_tasks, checked_window
from rrfp.model.tasks import Task
from rrfp.trace.breakdown import Breakdown, breakdown, mean
from rrfp.trace.held import peak_held
from rrfp.trace.spans import StepTrace

if TYPE_CHECKING:
    from rich.console import Console

    from rrfp.lab.traces.chrome_reader import TracedRun
    from rrfp.lab.traces.timeline import TimeWindow

#: What `--step` has for every step.
ALL = "all"

_TASK = "Tell what happened to this task, and when, in the slowest step or those of --step."
_STEP = "Show this step alone: its number, or all. May be repeated. Without it: the mean over all steps."


def trace(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Traces (Chrome JSON) written by rrfp.")],
    step: Annotated[list[str] | None, typer.Option("--step", metavar="N|all", help=_STEP)] = None,
    task: Annotated[str | None, typer.Option("--task", metavar="F1@2", help=_TASK)] = None,
    timeline: TimelineFile = None,
    from_ms: From = None,
    to_ms: To = None,
    json: Json = False,
) -> None:
    """Show where the time of recorded steps went, by stage: one summary for each run.

    Files of one run's ranks (same name, same steps, no stage in common) make one summary; every other file has its
    own. The timeline shows the step of median length, or those of --step; ranks' files below each other, each from
    the start of its own step.
    """
    from rrfp.lab.traces.chrome_reader import read_chrome

    wanted, window = _wanted(step), checked_window(timeline, from_ms, to_ms)
    told = None if task is None else Task.parse(task)
    runs = [(path, run) for path in dict.fromkeys(files) for run in read_chrome(path)]
    reports = joined([RunReport.of(path, run) for path, run in runs])
    for report in reports:
        report.check(wanted or ())
    if timeline is not None:
        _draw(runs, wanted, timeline, window)
    if told is not None:
        _tell(runs, wanted, told, json=json)
        return
    if json:
        print_json([_document(report, wanted) for report in reports])
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    for report in reports:
        _show(console, report, wanted)


def _tell(runs: Sequence[tuple[Path, TracedRun]], wanted: Sequence[int] | None, task: Task, *, json: bool) -> None:
    from rrfp.lab.traces.task_story import task_story

    stories: list[dict[str, Any]] = []
    for path, run in runs:
        slowest = max(run.steps, key=lambda step: step.end - step.start)
        steps = [slowest] if wanted is None else [step for step in run.steps if not wanted or step.step in wanted]
        for step in steps:
            told = task_story(step, run.num_stages, run.graph, task)
            moments = [{"seconds": seconds, "what": text} for seconds, text in told]
            stories.append({"file": str(path), "run": run.name, "step": step.step, "story": moments})
    if json:
        print_json(stories)
        return
    for each in stories:
        typer.echo(f"{each['file']}: {each['run']}, step {each['step']}, {task}:")
        for moment in each["story"]:
            typer.echo(f"  {moment['seconds'] * 1e3:9.3f} ms  {moment['what']}")


def _wanted(texts: Sequence[str] | None) -> list[int] | None:
    """The steps to show alone; empty for all, None for none."""
    if not texts:
        return None
    numbers = []
    for text in dict.fromkeys(texts):
        if text == ALL:
            return []
        if not (text.isascii() and text.isdigit()):
            raise ConfigError(f"--step is {text!r}, must be the number of a step, or all")
        numbers.append(int(text))
    return numbers


def _draw(runs: Sequence[tuple[Path, TracedRun]], wanted: Sequence[int] | None, path: Path, window: TimeWindow) -> None:
    """Draw the wanted steps of every run, or its step of median length."""
    from rrfp.lab.traces.timeline import plot_timelines

    rows = []
    for file, run in runs:
        by_length = sorted(run.steps, key=lambda step: step.end - step.start)
        by_number = {step.step: step for step in run.steps}
        steps = (
            [by_length[(len(by_length) - 1) // 2]] if wanted is None else [by_number[n] for n in wanted or by_number]
        )
        name = f"{file.name}: {run.name}" if len(runs) > 1 else run.name
        median = " (median length)" if wanted is None and len(run.steps) > 1 else ""
        rows += [(f"{name}, step {step.step}{median}", step) for step in steps]
    empty = [title for title, step in rows if not step.tasks]
    if empty:
        raise ConfigError(f"{empty[0]} has no task, so it has no timeline")
    check_tasks(sum(len(step.tasks) for _, step in rows), "choose fewer steps with --step N")
    graphs = {run.graph and run.graph.names for _, run in runs}
    names = graphs.pop() if len(graphs) == 1 else None  # runs of different models have chunks in common, and no parts
    plot_timelines(rows, path, window, names or ())


def _document(report: RunReport, wanted: Sequence[int] | None) -> dict[str, Any]:
    steps = [report.step(number) for number in wanted] if wanted else report.steps
    return {
        "file": str(report.files[0]),
        "files": [str(path) for path in report.files],
        "run": report.name,
        "slowest_step": report.slowest.step,
        "mean": [stage.to_json() for stage in report.mean],
        "steps": [
            {
                "step": step.step,
                "stages": [stage.to_json() for stage in step.stages],
                "peak_held": [stage.peak_held for stage in step.stages],
                "peak_bytes": bytes_by_stage(step.stages),
            }
            for step in steps
        ],
    }


def _show(console: Console, report: RunReport, wanted: Sequence[int] | None) -> None:
    from rrfp.trace.breakdown_table import duration

    first, *others = map(str, report.files)
    files = f"{first} and {len(others)} more (ranks of one run)" if others else first
    if wanted is None:
        slowest = report.slowest
        steps = f"step {slowest.step}, {duration(slowest.seconds)}"
        if len(report.steps) > 1:
            steps = f"{len(report.steps)} steps, mean {duration(report.seconds)}; slowest: {steps}"
        console.print(f"{files}: {report.name}, {steps}", soft_wrap=True)
        _show_table(console, report.mean)
        return
    for step in [report.step(number) for number in wanted] or report.steps:
        console.print(f"{files}: {report.name}, step {step.step}, {duration(step.seconds)}", soft_wrap=True)
        _show_table(console, step.stages)


def _show_table(console: Console, stages: Sequence[TracedStage]) -> None:
    """The table; its peaks in a second one on a narrow terminal."""
    from rich.measure import Measurement

    from rrfp.trace.breakdown_table import breakdown_table, peaks_table

    parts, numbers = [stage.part for stage in stages], [stage.stage for stage in stages]
    held, peak_bytes = [stage.peak_held for stage in stages], bytes_by_stage(stages)
    table = breakdown_table(parts, peak_held=held, peak_bytes=peak_bytes, numbers=numbers)
    # Measured without the terminal's own width, which would cap the measure.
    if Measurement.get(console, console.options.update(max_width=1000), table).minimum > console.width:
        console.print(breakdown_table(parts, numbers=numbers))
        table = peaks_table(peak_held=held, peak_bytes=peak_bytes, numbers=numbers)
    console.print(table)
    console.print()


@dataclass(frozen=True, slots=True)
class TracedStage:
    """One stage in one step, or in the mean of several."""

    stage: int
    part: Breakdown
    #: The largest D, in chunk tasks.
    peak_held: int
    #: The most bytes that it held; None where the trace does not have them.
    peak_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        peaks = {"peak_held": self.peak_held, "peak_bytes": self.peak_bytes}
        return {"stage": self.stage, **self.part.to_json(), **peaks}


@dataclass(frozen=True, slots=True)
class StepReport:
    """The recorded stages in one step, ascending."""

    step: int
    stages: tuple[TracedStage, ...]

    @classmethod
    def of(cls, trace: StepTrace, stages: Sequence[int]) -> StepReport:
        num_bytes = {stage: peaks.num_bytes for stage, peaks in trace.peaks.items()}
        reports = (
            TracedStage(stage, breakdown(trace, stage), peak_held(trace, stage), num_bytes.get(stage))
            for stage in stages
        )
        return cls(trace.step, tuple(reports))

    @property
    def seconds(self) -> float:
        """The step's time; of several ranks' files, the longest."""
        return max(report.part.step for report in self.stages)


@dataclass(frozen=True, slots=True)
class RunReport:
    """A run, or the ranks of one that wrote a file each."""

    files: tuple[Path, ...]
    #: The run's.
    name: str
    #: At least one, all with the same stages.
    steps: tuple[StepReport, ...]

    @classmethod
    def of(cls, path: Path, run: TracedRun) -> RunReport:
        return cls((path,), run.name, tuple(StepReport.of(step, run.stages) for step in run.steps))

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(report.step for report in self.steps)

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(report.stage for report in self.steps[0].stages)

    @property
    def seconds(self) -> float:
        return fmean(report.seconds for report in self.steps)

    @property
    def slowest(self) -> StepReport:
        """The longest step, the first of equal ones."""
        return max(self.steps, key=lambda report: report.seconds)

    @property
    def mean(self) -> tuple[TracedStage, ...]:
        """Each stage's mean breakdown over the steps, and its largest peaks."""
        return tuple(_mean(reports) for reports in zip(*(step.stages for step in self.steps), strict=True))

    def step(self, number: int) -> StepReport:
        self.check([number])
        return self.steps[self.numbers.index(number)]

    def check(self, numbers: Iterable[int]) -> None:
        known = self.numbers
        for number in numbers:
            if number not in known:
                files = ", ".join(map(str, self.files))
                raise ConfigError(f"{files}: {self.name} has no step {number}, must be one of: {in_ranges(known)}")


def bytes_by_stage(reports: Sequence[TracedStage]) -> list[int] | None:
    """The peak bytes of every stage or step; None unless all are known."""
    known = [report.peak_bytes for report in reports if report.peak_bytes is not None]
    return known if len(known) == len(reports) else None


def _mean(reports: Sequence[TracedStage]) -> TracedStage:
    num_bytes = bytes_by_stage(reports)
    return TracedStage(
        stage=reports[0].stage,
        part=mean(report.part for report in reports),
        peak_held=max(report.peak_held for report in reports),
        peak_bytes=None if num_bytes is None else max(num_bytes),
    )


def joined(reports: Sequence[RunReport]) -> list[RunReport]:
    """The same reports, those of ranks of one run joined."""
    # They are ranks of one run if they have the same name and steps, and no stage in common. Each stage's times count
    # from the start of its own rank's step.
    alike: dict[tuple[str, tuple[int, ...]], list[RunReport]] = defaultdict(list)
    for report in reports:
        alike[report.name, report.numbers].append(report)
    result = []
    for group in alike.values():
        stages = [stage for report in group for stage in report.stages]
        are_ranks = len({report.files for report in group}) == len(group) and len(set(stages)) == len(stages)
        result += [_join(sorted(group, key=lambda report: report.stages))] if are_ranks else group
    return result


def _join(ranks: Sequence[RunReport]) -> RunReport:
    steps = tuple(
        StepReport(parts[0].step, tuple(sorted((r for part in parts for r in part.stages), key=lambda r: r.stage)))
        for parts in zip(*(report.steps for report in ranks), strict=True)
    )
    return RunReport(tuple(path for report in ranks for path in report.files), ranks[0].name, steps)


def in_ranges(numbers: Sequence[int]) -> str:
    """Numbers in few words: ``0 to 7, 9``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(texts)
