"""`rrfp trace FILE...`: the breakdown of recorded steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rrfp.commands.output import Json, print_json

if TYPE_CHECKING:
    from rrfp.trace.breakdown import Breakdown
    from rrfp.trace.chrome_reader import TracedRun
    from rrfp.trace.spans import StepTrace


def trace(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Traces (Chrome JSON) written by rrfp.")],
    json: Json = False,
) -> None:
    """Show where the time of recorded steps went, by stage."""
    from rrfp.trace.chrome_reader import read_chrome

    reports = [
        (path, run, [_Report.of(step, run.num_stages) for step in run.steps])
        for path in files
        for run in read_chrome(path)
    ]
    if json:
        print_json([_document(*report) for report in reports])
        return
    for report in reports:
        _show(*report)


@dataclass(frozen=True, slots=True)
class _Report:
    """One step: each stage's breakdown, peak D (chunk tasks), and peak bytes where the trace has them."""

    step: int
    stages: tuple[Breakdown, ...]
    peak_held: list[int]
    peak_bytes: list[int] | None

    @classmethod
    def of(cls, trace: StepTrace, num_stages: int) -> _Report:
        from rrfp.trace.breakdown import by_stage

        peak_held = [_peak_held(trace, stage) for stage in range(num_stages)]
        by_stage_bytes = {entry.stage: entry.peaks.num_bytes for entry in trace.peaks}
        stages = range(num_stages)
        peak_bytes = [by_stage_bytes[stage] for stage in stages] if set(by_stage_bytes) == set(stages) else None
        return cls(trace.step, by_stage(trace, num_stages), peak_held, peak_bytes)


def _peak_held(trace: StepTrace, stage: int) -> int:
    """The largest D. A chunk task is held from its F's start to its last span's end; at one instant ends come first."""
    changes: Counter[tuple[float, int]] = Counter()
    ends: dict[tuple[int, int], float] = {}
    for span in trace.tasks:
        if span.stage == stage:
            key = (span.task.microbatch, span.task.virtual_stage)
            ends[key] = max(span.end, ends.get(key, span.end))
            changes[span.start, 1] += span.task.kind == "F"
    for end in ends.values():
        changes[end, -1] += 1
    held = peak = 0
    for (_, sign), count in sorted(changes.items()):
        held += sign * count
        peak = max(peak, held)
    return peak


def _document(path: Path, run: TracedRun, reports: list[_Report]) -> dict[str, Any]:
    return {
        "file": str(path),
        "run": run.name,
        "steps": [
            {
                "step": report.step,
                "stages": [part.to_json() for part in report.stages],
                "peak_held": report.peak_held,
                "peak_bytes": report.peak_bytes,
            }
            for report in reports
        ],
    }


def _show(path: Path, run: TracedRun, reports: list[_Report]) -> None:
    from rich.console import Console

    from rrfp.trace.breakdown import mean
    from rrfp.trace.table import breakdown_table

    console = Console(highlight=False, markup=False)
    for report in reports:
        console.print(f"{path}: {run.name}, step {report.step}", soft_wrap=True)
        console.print(breakdown_table(report.stages, peak_held=report.peak_held, peak_bytes=report.peak_bytes))
    total = mean(part for report in reports for part in report.stages)
    console.print(
        f"{run.name}: {len(reports)} step(s) of {total.step * 1e3:.1f} ms, computing {total.compute_share:.1%},"
        f" blocked {total.blocking_share:.1%}, peak held {max(max(report.peak_held) for report in reports)}\n"
    )
