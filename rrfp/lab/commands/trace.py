"""`rrfp trace FILE...`: where the time of recorded steps went, as tables or as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rrfp.commands.output import Json, print_json
from rrfp.errors import ConfigError
from rrfp.lab.commands.timeline_options import From, TimelineFile, To, check_tasks, checked_window

if TYPE_CHECKING:
    from rich.console import Console

    from rrfp.lab.traces.chrome_reader import TracedRun
    from rrfp.lab.traces.report import RunReport, TracedStage
    from rrfp.lab.traces.window import TimeWindow

#: What `--step` has for every step.
ALL = "all"

_STEP = "Show this step alone: its number, or all. May be repeated. Without it: the mean over all steps."


def trace(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Traces (Chrome JSON) written by rrfp.")],
    step: Annotated[list[str] | None, typer.Option("--step", metavar="N|all", help=_STEP)] = None,
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
    from rrfp.lab.traces.report import RunReport, joined

    wanted, window = _wanted(step), checked_window(timeline, from_ms, to_ms)
    runs = [(path, run) for path in dict.fromkeys(files) for run in read_chrome(path)]
    reports = joined([RunReport.of(path, run) for path, run in runs])
    for report in reports:
        report.check(wanted or ())
    if timeline is not None:
        _draw(runs, wanted, timeline, window)
    if json:
        print_json([_document(report, wanted) for report in reports])
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    for report in reports:
        _show(console, report, wanted)


def _wanted(texts: Sequence[str] | None) -> list[int] | None:
    """The steps to show alone; empty for all of them, None for none."""
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
    from rrfp.lab.traces.plot import plot_timelines

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
    from rrfp.lab.traces.report import bytes_by_stage

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
    """The table; with its peaks in a second one where the terminal is too narrow."""
    from rich.measure import Measurement

    from rrfp.lab.traces.report import bytes_by_stage
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
