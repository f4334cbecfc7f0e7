"""From the steps of a demo run to its figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from rrfp.core.usage import WaitCause
from rrfp.demo.methods import BASELINE, DemoMethod
from rrfp.demo.settings import DemoSettings
from rrfp.sim.bound import lower_bound
from rrfp.trace.breakdown import Breakdown, mean


@dataclass(frozen=True, slots=True)
class MethodFigures:
    """One method over the measured steps.

    Attributes:
        iteration_s: median time of a step, in seconds.
        iteration_s_spread: longest minus shortest; the steps differ in their cost tables too.
        speedup: median over the steps of the baseline's time for that step over this method's.
        blocking: share of the step in which a stage was idle, mean over stages and steps.
        blocking_by_cause: the same by cause.
        peak_held: the most microbatches held in any step, by stage; parts of one, on some of its chunks, count whole.
        peak_bytes: the most bytes held in any step, by stage.
        ratio: median over the steps of time over the lower bound of the method's chunks and placement; None with real
            compute, which has no table.
        losses: of all steps, the warm-up's too.
    """

    iteration_s: float
    iteration_s_spread: float
    speedup: float
    blocking: float
    blocking_by_cause: Mapping[str, float]
    peak_held: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    ratio: float | None
    losses: tuple[float, ...]


class Steps:
    """Collects the lines that rank 0 prints.

    Args:
        settings: the run's.
    """

    def __init__(self, settings: DemoSettings) -> None:
        self._settings = settings
        self._lines: dict[str, list[Mapping[str, Any]]] = defaultdict(list)

    def add(self, line: Mapping[str, Any]) -> None:
        """One more step."""
        self._lines[line["method"]].append(line)

    def bounds(self, method: DemoMethod) -> list[float] | None:
        """The lower bound of each measured step in seconds, without a memory limit, on the chunks of ``method``."""
        settings = self._settings
        if settings.real_compute:
            return None
        measured = range(settings.warm_up, settings.warm_up + settings.steps)
        # Of the split table: a method that splits backward may end earlier than all that do not.
        return [lower_bound(settings.costs(step, method, split=True), None) for step in measured]

    def seconds(self, method: str) -> list[float]:
        """Time of each measured step."""
        return [line["seconds"] for line in self._lines[method][self._settings.warm_up :]]

    def figures(self) -> dict[str, MethodFigures]:
        """Every method's figures."""
        return {name: self._figures(name, method) for name, method in self._settings.methods.items()}

    def typical_step(self, method: str) -> int:
        """The measured step (0 is the first measured) whose speed-up is the median one: the one to show."""
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
    """For each stage the largest of all steps."""
    return tuple(map(max, zip(*peaks, strict=True)))
