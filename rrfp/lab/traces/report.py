"""What a trace file says of its run: the breakdown of every step, their mean, the slowest step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rrfp.errors import ConfigError
from rrfp.lab.traces.chrome_reader import TracedRun
from rrfp.trace.breakdown import Breakdown, breakdown, mean
from rrfp.trace.held import peak_held
from rrfp.trace.spans import StepTrace


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
        """The breakdown's plain data with the stage's number and peaks."""
        peaks = {"peak_held": self.peak_held, "peak_bytes": self.peak_bytes}
        return {"stage": self.stage, **self.part.to_json(), **peaks}


@dataclass(frozen=True, slots=True)
class StepReport:
    """The recorded stages in one step, ascending."""

    step: int
    stages: tuple[TracedStage, ...]

    @classmethod
    def of(cls, trace: StepTrace, stages: Sequence[int]) -> StepReport:
        """The report of ``stages`` in one step."""
        num_bytes = {entry.stage: entry.peaks.num_bytes for entry in trace.peaks}
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
    """A run, or the ranks of one run that wrote a file each."""

    files: tuple[Path, ...]
    #: The run's.
    name: str
    #: At least one, all with the same stages.
    steps: tuple[StepReport, ...]

    @classmethod
    def of(cls, path: Path, run: TracedRun) -> RunReport:
        """The report of one run of a file."""
        return cls((path,), run.name, tuple(StepReport.of(step, run.stages) for step in run.steps))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The steps' numbers."""
        return tuple(report.step for report in self.steps)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages' numbers."""
        return tuple(report.stage for report in self.steps[0].stages)

    @property
    def seconds(self) -> float:
        """The mean time of a step."""
        return fmean(report.seconds for report in self.steps)

    @property
    def slowest(self) -> StepReport:
        """The longest step, the first of equal ones."""
        return max(self.steps, key=lambda report: report.seconds)

    @property
    def mean(self) -> tuple[TracedStage, ...]:
        """Each stage's mean breakdown over the steps, and the most that it held in any of them."""
        return tuple(_mean(reports) for reports in zip(*(step.stages for step in self.steps), strict=True))

    def step(self, number: int) -> StepReport:
        """The report of one step."""
        self.check([number])
        return self.steps[self.numbers.index(number)]

    def check(self, numbers: Iterable[int]) -> None:
        """Refuse the number of a step that the run does not have."""
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
    """The same reports, with one for all ranks of a run that wrote a file each.

    They are ranks of one run if they have the same name and steps, and no stage in common. Each stage's times count
    from the start of its own rank's step.
    """
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
