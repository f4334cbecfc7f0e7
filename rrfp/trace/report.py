"""What a trace file says of its run: the breakdown of every step, their mean, the slowest step."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from rrfp.errors import ConfigError
from rrfp.trace.breakdown import Breakdown, breakdown, mean
from rrfp.trace.chrome_reader import TracedRun
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


#: Heading and value of the columns between the stage and the peaks; times in seconds.
_TIMES: tuple[tuple[str, Callable[[Breakdown], float]], ...] = (
    ("compute", lambda part: part.compute),
    ("input", lambda part: part.input),
    ("memory", lambda part: part.memory),
    ("TP\norder", lambda part: part.order),
    ("choice", lambda part: part.choice),
    ("nothing\nleft", lambda part: part.drained),
    ("other", lambda part: part.other),
)
#: Characters of a line that fits any such table.
_WIDEST = 80
#: Columns that are left out where they are 0 on every stage.
_OPTIONAL = ("memory", "TP\norder", "choice")


def breakdown_table(
    stages: Sequence[Breakdown],
    *,
    peak_held: Sequence[int] | None = None,
    peak_bytes: Sequence[int] | None = None,
    numbers: Sequence[int] | None = None,
    title: str | None = None,
) -> Table:
    """One row a stage, their mean, and the largest peaks; MiB where bytes were held.

    The caption names the unit of the times, which the length of the step decides. It fits 60 columns where no group
    of ranks waited for its order, else 68, and 54 without peaks.

    Args:
        stages: the breakdown of every stage, at least one.
        peak_held: the most chunk tasks held, by stage; None leaves the column out.
        peak_bytes: the most bytes held, by stage; None, or zeros alone, leave the column out.
        numbers: the stages' numbers; None counts them from 0.
        title: the table's title.
    """
    average = mean(stages)
    numbers = _one_a_stage("numbers", range(len(stages)) if numbers is None else numbers, len(stages))
    columns = [(name, value) for name, value in _TIMES if name not in _OPTIONAL or value(average) > 0]
    unit, time = _unit(average.step)
    peaks = _peaks(len(stages), peak_held, peak_bytes)
    heads = (*(name for name, _ in columns), "blocked", *peaks)
    table = _table(heads, title, f"times in {unit}; a step took {time(average.step)}")
    for index, (number, part) in enumerate(zip(numbers, stages, strict=True)):
        most = [cells[index] for cells, _ in peaks.values()]
        table.add_row(str(number), *(time(value(part)) for _, value in columns), _blocked(part), *most)
    table.add_section()
    table.add_row("mean", *(time(value(average)) for _, value in columns), _blocked(average))
    if peaks:
        table.add_row("max", *[""] * (len(heads) - len(peaks)), *(worst for _, worst in peaks.values()))
    return table


def breakdown_text(stages: Sequence[Breakdown], *, peak_held: Sequence[int], peak_bytes: Sequence[int]) -> str:
    """`breakdown_table` in ASCII, which any stream takes."""
    table = breakdown_table(stages, peak_held=peak_held, peak_bytes=peak_bytes)
    console = Console(file=io.StringIO(), width=_WIDEST, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip().replace("─", "-") for line in captured.get().splitlines())


def peaks_table(
    *, peak_held: Sequence[int], peak_bytes: Sequence[int] | None = None, numbers: Sequence[int] | None = None
) -> Table:
    """The peaks alone, for a terminal too narrow to have them beside the breakdown; see `breakdown_table`."""
    numbers = _one_a_stage("numbers", range(len(peak_held)) if numbers is None else numbers, len(peak_held))
    peaks = _peaks(len(peak_held), peak_held, peak_bytes)
    table = _table(peaks)
    for index, number in enumerate(numbers):
        table.add_row(str(number), *(cells[index] for cells, _ in peaks.values()))
    table.add_section()
    table.add_row("max", *(worst for _, worst in peaks.values()))
    return table


def duration(seconds: float) -> str:
    """A step's time in the unit that its table has."""
    unit, time = _unit(seconds)
    return f"{time(seconds)} {unit}"


def _table(heads: Iterable[str], title: str | None = None, caption: str | None = None) -> Table:
    """A table of numbers by stage, without rows."""
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.title_justify = table.caption_justify = "left"
    table.add_column("stage", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _peaks(
    num_stages: int, peak_held: Sequence[int] | None, peak_bytes: Sequence[int] | None
) -> dict[str, tuple[list[str], str]]:
    """By heading: the cell of every stage, and the largest."""
    peaks: dict[str, tuple[list[str], str]] = {}
    for name, values, heading, text in (
        ("peak_held", peak_held, "peak\nheld", str),
        ("peak_bytes", peak_bytes if peak_bytes and any(peak_bytes) else None, "peak\nMiB", _mebibytes),
    ):
        if values is None:
            continue
        _one_a_stage(name, values, num_stages)
        peaks[heading] = ([text(value) for value in values], text(max(values)))
    return peaks


def _one_a_stage(name: str, values: Iterable[int], num_stages: int) -> list[int]:
    entries = list(values)
    if len(entries) != num_stages:
        raise ValueError(f"{name} has {len(entries)} entries, must have {num_stages} (one a stage)")
    return entries


def _unit(step: float) -> tuple[str, Callable[[float], str]]:
    """The unit for a step's times, and their text: at most five characters up to a step of 27 hours."""
    unit, scale = ("s", 1.0) if step >= 10 else ("ms", 1e3) if step >= 1e-2 else ("us", 1e6)
    decimals = 1 if step * scale < 1000 else 0
    return unit, lambda seconds: f"{seconds * scale:.{decimals}f}"


def _mebibytes(num_bytes: int) -> str:
    mebibytes = num_bytes / (1 << 20)
    return f"{mebibytes:.{1 if mebibytes < 1000 else 0}f}"


def _blocked(part: Breakdown) -> str:
    return f"{part.blocking_share:.1%}"
