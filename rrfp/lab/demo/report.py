"""The results of a demo run: a table, summary.json, timeline.png and a trace for each method."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rrfp.atomic_files import write_atomically
from rrfp.core.usage import WaitCause
from rrfp.engine.bound import lower_bound
from rrfp.lab.demo.settings import BASELINE, JITTER, METHODS, PROFILE, DemoMethod, DemoSettings
from rrfp.lab.report.page import write_report
from rrfp.lab.traces.timeline import plot_timelines
from rrfp.tables import Column, print_table, terminal
from rrfp.trace.breakdown import CAUSE_LABELS, Breakdown, mean
from rrfp.trace.chrome import write_chrome
from rrfp.trace.plain import from_plain
from rrfp.trace.spans import StepTrace, merge

#: The page of fixed order beside readiness-driven dispatch.
PAGE = "report.html"

#: From this share on other programs have taken the cores, and the methods' figures compare those too.
_BUSY = 0.05


@dataclass(frozen=True, slots=True)
class MethodFigures:
    """One method over the measured steps."""

    #: Median time of a step, in seconds.
    iteration_s: float
    #: Longest minus shortest; the steps differ in their cost tables too.
    iteration_s_spread: float
    #: Median over the steps of the baseline's time for that step over this method's.
    speedup: float
    #: Share of the step in which a stage was idle, mean over stages and steps.
    blocking: float
    blocking_by_cause: Mapping[str, float]
    #: The most microbatches held in any step, by stage; parts of one, on some of its chunks, count whole.
    peak_held: tuple[int, ...]
    #: The most bytes held in any step, by stage.
    peak_bytes: tuple[int, ...]
    #: Median over the steps of time over the lower bound of the method's chunks and placement; None with real compute,
    #: which has no table.
    ratio: float | None
    #: Of all steps, the warm-up's too.
    losses: tuple[float, ...]


class Steps:
    """Collects the lines that rank 0 prints."""

    def __init__(self, settings: DemoSettings) -> None:
        self._settings = settings
        self._lines: dict[str, list[Mapping[str, Any]]] = defaultdict(list)

    def add(self, line: Mapping[str, Any]) -> None:
        self._lines[line["method"]].append(line)

    def bounds(self, method: DemoMethod) -> list[float] | None:
        """The lower bound of each measured step for ``method``'s chunks, in seconds."""
        settings = self._settings
        if settings.real_compute:
            return None
        measured = range(settings.warm_up, settings.warm_up + settings.steps)
        # Of the split table: a method that splits backward may end earlier than all that do not.
        return [lower_bound(settings.costs(step, method, split=True), None) for step in measured]

    def seconds(self, method: str) -> list[float]:
        return [line["seconds"] for line in self._lines[method][self._settings.warm_up :]]

    def figures(self) -> dict[str, MethodFigures]:
        return {name: self._figures(name, method) for name, method in self._settings.methods.items()}

    def typical_step(self, method: str) -> int:
        """The measured step, from 0, of median speed-up: the one to show."""
        ratios = [base / own for base, own in zip(self.seconds(BASELINE), self.seconds(method), strict=True)]
        middle = sorted(ratios)[(len(ratios) - 1) // 2]
        return ratios.index(middle)

    def _figures(self, name: str, method: DemoMethod) -> MethodFigures:
        lines, bounds = self._lines[name], self.bounds(method)
        measured = lines[self._settings.warm_up :]
        seconds = self.seconds(name)
        parts = [mean(Breakdown(**stage) for stage in line["breakdown"]) for line in measured]
        ratios = None if bounds is None else [took / bound for took, bound in zip(seconds, bounds, strict=True)]
        return MethodFigures(
            iteration_s=median(seconds),
            iteration_s_spread=max(seconds) - min(seconds),
            speedup=median(base / own for base, own in zip(self.seconds(BASELINE), seconds, strict=True)),
            blocking=fmean(part.blocking_share for part in parts),
            blocking_by_cause={cause.value: fmean(p.share(p.by_cause[cause]) for p in parts) for cause in WaitCause},
            peak_held=tuple(-(-held // method.chunks) for held in _largest(line["peak_held"] for line in measured)),
            peak_bytes=_largest(line["peak_bytes"] for line in measured),
            ratio=None if ratios is None else median(ratios),
            losses=tuple(line["loss"] for line in lines),
        )


def _largest(peaks: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(max, zip(*peaks, strict=True)))


class DemoReport:
    """All results of a run."""

    def __init__(self, settings: DemoSettings, steps: Steps) -> None:
        self._settings = settings
        self._steps = steps
        self._out = Path(settings.out)
        self.figures = steps.figures()
        bounds = steps.bounds(METHODS[BASELINE])
        #: Mean over the measured steps of the lower bound on one chunk a stage, in seconds; None with real
        #: compute.
        self.lower_bound_s = None if bounds is None else sum(bounds) / len(bounds)
        self._parts = {method: self._read_parts(method) for method in settings.methods}
        #: The seconds by which tasks took longer than planned, over the planned ones; None with real
        #: compute.
        self.overrun_share = self._overrun_share()

    def to_json(self) -> dict[str, Any]:
        """The stable interface of ``rrfp demo --json``; ``weights_sha256`` with ``--deterministic`` only."""
        methods = {method: asdict(figures) for method, figures in self.figures.items()}
        if self._settings.deterministic:
            for method in methods:
                methods[method]["weights_sha256"] = self.weights_sha256(method)
        return {"methods": methods, "lower_bound_s": self.lower_bound_s, "overrun_share": self.overrun_share}

    def weights_sha256(self, method: str) -> str:
        """The digest of the trained model, however the method cuts it."""
        by_stage = {int(v): parts for part in self._parts[method] for v, parts in part["weights_sha256"].items()}
        digests = (digest for v in sorted(by_stage) for digest in by_stage[v])
        return hashlib.sha256("".join(digests).encode()).hexdigest()

    def write(self, *, has_picture: bool, has_page: bool) -> list[str]:
        """Write summary, traces and, if possible, picture and page; returns their names."""
        summary = {**self.to_json(), "settings": asdict(self._settings)}
        write_atomically(self._out / "summary.json", json.dumps(summary, indent=1) + "\n")
        traces = {method: self._traces(method) for method in self._settings.methods}
        for method, steps in traces.items():
            job = self._settings.methods[method].traced(self._settings.stages)
            write_chrome(self._out / f"trace-{method}.json", steps, name=method, job=job)
        names = ["summary.json", *(f"trace-{method}.json" for method in traces)]
        driven = next(name for name, method in self._settings.methods.items() if method.hint is not None)
        shown = self._steps.typical_step(driven)
        pair = BASELINE, driven
        if has_picture:
            rows = [(self._title(method, traces[method][shown]), traces[method][shown]) for method in pair]
            plot_timelines(rows, self._out / "timeline.png")
            names.append("timeline.png")
        if has_page:
            write_report([str(self._out / f"trace-{method}.json") for method in pair], self._out / PAGE)
            names.append(PAGE)
        return names

    def show(self) -> None:
        settings, console = self._settings, terminal()
        head = f"{settings.stages} stages, {settings.microbatches} microbatches, {settings.steps} steps a method"
        console.print(head, soft_wrap=True)
        columns = [Column(head, [cell(figures) for figures in self.figures.values()]) for head, cell in _COLUMNS]
        shown = [column for column in columns if set(column.cells) != {_NOTHING}]
        print_table([Column("method", list(self.figures), "left")], shown)
        console.print(self._caption())

    def _caption(self) -> str:
        caption = f"loss {self._losses()}; {self._emulation()}"
        if self._settings.deterministic:
            weights = {self.weights_sha256(method) for method in self._settings.methods}
            same = "bitwise the same weights by every method" if len(weights) == 1 else "DIFFERENT weights by method"
            caption += f"; {same}"
        return caption

    def _losses(self) -> str:
        losses = {method: f"{f.losses[0]:.2f} -> {f.losses[-1]:.2f}" for method, f in self.figures.items()}
        if len(set(losses.values())) == 1:
            return f"{losses[BASELINE]} by every method"
        return ", ".join(f"{text} ({method})" for method, text in losses.items())

    def _emulation(self) -> str:
        if self.overrun_share is None:
            return "real compute, nothing emulated"
        advice = "" if self.overrun_share < _BUSY else ": the cores were busy, so compare on a quieter machine"
        return (
            f"emulated accelerator time: {PROFILE} table, jitter {JITTER}; "
            f"real compute overran it by {self.overrun_share:.1%} in sum{advice}"
        )

    def _title(self, method: str, trace: StepTrace) -> str:
        name = f"{method} (fixed order)" if method == BASELINE else f"{method} (readiness-driven)"
        return f"{name}, holds up to {max(self.figures[method].peak_held)} microbatches"

    def _read_parts(self, method: str) -> list[dict[str, Any]]:
        folder = self._out / "parts"
        paths = [folder / f"{method}-{stage}.json" for stage in range(self._settings.stages)]
        return [json.loads(path.read_text()) for path in paths]

    def _traces(self, method: str) -> list[StepTrace]:
        by_rank = [[from_plain(trace) for trace in part["traces"]] for part in self._parts[method]]
        return [merge(ranks) for ranks in zip(*by_rank, strict=True)]

    def _overrun_share(self) -> float | None:
        parts: Sequence[Mapping[str, Any]] = [part for parts in self._parts.values() for part in parts]
        if any(part["overrun"] is None for part in parts):
            return None
        planned: float = sum(part["overrun"]["planned_s"] for part in parts)
        overrun: float = sum(part["overrun"]["overrun_s"] for part in parts)
        return overrun / planned


#: The cell of a figure that is missing or zero; a column of these alone is left out.
_NOTHING = "-"


def _percent(share: float) -> str:
    return f"{share:.1%}".removesuffix("%") if share >= 0.0005 else _NOTHING


def _cause(cause: WaitCause) -> tuple[str, Callable[[MethodFigures], str]]:
    return f"{CAUSE_LABELS[cause]} %", lambda figures: _percent(figures.blocking_by_cause[cause])


#: Heading and cell of each column.
_COLUMNS: tuple[tuple[str, Callable[[MethodFigures], str]], ...] = (
    ("median ms", lambda figures: f"{figures.iteration_s * 1e3:.0f}"),
    ("spread ms", lambda figures: f"{figures.iteration_s_spread * 1e3:.0f}"),
    ("speed-up", lambda figures: f"{figures.speedup:.2f}"),
    ("over bound", lambda figures: _NOTHING if figures.ratio is None else f"{figures.ratio:.2f}"),
    ("blocked %", lambda figures: _percent(figures.blocking)),
    *map(_cause, WaitCause),
    ("held", lambda figures: " ".join(map(str, figures.peak_held))),
)
