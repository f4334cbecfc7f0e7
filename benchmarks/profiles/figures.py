"""Gains of one method over another on the same tables, with their intervals, and the aims that they miss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from benchmarks.profiles.runs import Case, Outcome

#: Profiles of which several modalities make the microbatches differ by stage.
MULTIMODAL = ("mllm", "modalities", "video")


@dataclass(frozen=True, slots=True)
class Comparison:
    """A method and what it is compared with.

    Attributes:
        name: a column's head.
        method: a key of `Outcome.seconds`.
        base: another.
        least: the aim, percent less makespan.
        by_cell: whether each cell should reach it, or each profile of `MULTIMODAL` on average.
    """

    name: str
    method: str
    base: str
    least: float | None = None
    by_cell: bool = False


#: By table; each at equal slots, or within equal bytes, on every stage.
COMPARISONS: dict[str, tuple[Comparison, ...]] = {
    "split backward, one chunk, over bfw": (
        Comparison("1f1b", "default, 1f1b", "bfw, 1f1b"),
        Comparison("n", "default, n", "bfw, n"),
        Comparison("2n", "default, 2n", "bfw, 2n"),
        Comparison("own bytes of 1f1b", "default, own bytes, 1f1b", "bfw, 1f1b", 8.0),
        Comparison("own bytes of n", "default, own bytes, n", "bfw, n", 8.0),
        Comparison("bfw's bytes of 1f1b", "default, bfw's bytes, 1f1b", "bfw, 1f1b", 8.0),
        Comparison("bfw's bytes of n", "default, bfw's bytes, n", "bfw, n", 8.0),
        Comparison("bytes a rank of 1f1b", "default, bytes a rank, 1f1b", "bfw, bytes a rank, 1f1b"),
        Comparison("bytes a rank of n", "default, bytes a rank, n", "bfw, bytes a rank, n"),
    ),
    "split backward, bfw's bytes, by the order of microbatches, over bfw": tuple(
        Comparison(f"{order}, bytes of {count}", f"{order}, bfw's bytes, {count}", f"bfw, {count}")
        for count in ("1f1b", "n")
        for order in ("pyramids", "caller's", "default", "better of both")
    ),
    "split backward, bytes of the default hint, by the order of microbatches, over pyramids": tuple(
        Comparison(f"{order}, bytes of {count}", f"{order}, own bytes, {count}", f"pyramids, own bytes, {count}")
        for count in ("1f1b", "n")
        for order in ("caller's", "default", "better of both")
    ),
    "split backward, against schedules; two chunks in V": (
        Comparison("1f1b over strict 1f1b", "default, 1f1b", "1f1b", -1.0, by_cell=True),
        Comparison("n over zb-h1", "default, n", "zb-h1"),
        Comparison("V, n over n", "default, V, n", "default, n"),
        Comparison("V, n over bf, n", "default, V, n", "bfw, n", 15.0),
        Comparison("V, n over zb-v", "default, V, n", "zb-v"),
    ),
    "whole backward": (
        Comparison("1f1b over strict 1f1b", "whole default, 1f1b", "whole 1f1b", -1.0, by_cell=True),
        Comparison("1f1b over bf", "whole default, 1f1b", "whole bf, 1f1b"),
        Comparison("2n over bf", "whole default, 2n", "whole bf, 2n"),
    ),
}


@dataclass(frozen=True, slots=True)
class Gain:
    """Percent less makespan.

    Attributes:
        mean: over all tables.
        interval: 95% of the mean of another such set of seeds lie within it, either way.
        worst: the cell (PP, jitter level) of the least mean over the seeds, and that mean.
        behind: percent of the tables on which the method takes over 1% longer.
    """

    mean: float
    interval: float
    worst: tuple[str, float]
    behind: float


class Figures:
    """What the outcomes add up to."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self._outcomes = outcomes
        self.profiles = tuple(dict.fromkeys(outcome.case.profile for outcome in outcomes))
        self.passed = max(outcome.passed for outcome in outcomes)

    def gain(self, profile: str, comparison: Comparison) -> Gain:
        """Over all tables of a profile."""
        gains = list(self._gains(profile, comparison))
        mean, interval = self._by_seed(gains)
        cells = self.cells(profile, comparison)
        where = min(cells, key=lambda cell: cells[cell][0])
        behind = 100 * fmean(gain < -1 for _, gain in gains)
        return Gain(mean, interval, (where, cells[where][0]), behind)

    def more_bytes(self, profile: str, count: str) -> float:
        """By how many percent the default hint holds more bytes than bfw within a count, mean over all tables."""
        return fmean(each.more_bytes[count] for each in self._outcomes if each.case.profile == profile)

    def cells(self, profile: str, comparison: Comparison) -> dict[str, tuple[float, float]]:
        """Mean and interval of each PP and jitter level."""
        found: dict[str, list[tuple[Case, float]]] = {}
        for case, gain in self._gains(profile, comparison):
            found.setdefault(f"PP {case.stages} {case.jitter}", []).append((case, gain))
        return {name: self._by_seed(gains) for name, gains in found.items()}

    def missed(self) -> Iterator[str]:
        """One line for each aim that a profile or a cell misses."""
        for title, comparisons in COMPARISONS.items():
            for comparison in comparisons:
                if comparison.least is not None:
                    yield from (f"{title}, {line}" for line in self._missed(comparison, comparison.least))

    def _missed(self, comparison: Comparison, least: float) -> Iterator[str]:
        for profile in self.profiles:
            if comparison.by_cell:
                reached = {f"{profile} {cell}": gain for cell, gain in self.cells(profile, comparison).items()}
            elif profile in MULTIMODAL:
                over_all = self.gain(profile, comparison)
                reached = {profile: (over_all.mean, over_all.interval)}
            else:
                continue
            for where, (mean, interval) in reached.items():
                if mean < least:
                    yield f"{comparison.name}: {where} {mean:.2f} ± {interval:.2f}, aim {least:g}"

    def _gains(self, profile: str, comparison: Comparison) -> Iterator[tuple[Case, float]]:
        for outcome in self._outcomes:
            if outcome.case.profile == profile:
                seconds = outcome.seconds
                yield outcome.case, 100 * (1 - seconds[comparison.method] / seconds[comparison.base])

    def _by_seed(self, gains: Sequence[tuple[Case, float]]) -> tuple[float, float]:
        """Tables of one seed share their draws, so that seeds, and not tables, are the samples of the interval."""
        by_seed: dict[int, list[float]] = {}
        for case, gain in gains:
            by_seed.setdefault(case.seed, []).append(gain)
        means = [fmean(each) for each in by_seed.values()]
        interval = _STUDENT * stdev(means) / len(means) ** 0.5 if len(means) > 1 else 0.0
        return fmean(means), interval


#: Student's t at 97.5% for 19 degrees of freedom: 20 seeds. With fewer the interval is somewhat too narrow.
_STUDENT = 2.093
