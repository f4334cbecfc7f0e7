"""Shares of the chain's step time, with their intervals, beside published ones and the aims."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from benchmarks.graphs.runs import CHAIN, FORMS, Case, Outcome

#: A row of the table: PP, latency, shares and limit.
Row = tuple[int, str, tuple[float, float], str]

#: The forms that are compared with the chain.
COMPARED = tuple(form for form in FORMS if form != CHAIN)

#: By shares, limit and form: the shares of the chain's time in an emulation of the same mean costs on PP 8 under bf,
#: with wire and with spike latency. Those of the co-located model are with a fixed cap on how far encoders run ahead
#: at N, and without one at 2N. Of co-located encoders that all microbatches visit at (0.6, 0.4): with the cap.
EMULATED: dict[tuple[tuple[float, float], str, str], tuple[float, float]] = {
    ((1, 1), "N", "branch"): (0.93, 0.93),
    ((1, 1), "2N", "branch"): (0.95, 0.94),
    ((1, 1), "N", "co-located, skipped"): (0.85, 0.89),
    ((1, 1), "2N", "co-located, skipped"): (0.88, 0.92),
    ((0.6, 0.4), "N", "branch"): (0.93, 0.93),
    ((0.6, 0.4), "2N", "branch"): (0.95, 0.94),
    ((0.6, 0.4), "N", "branch, skipped"): (0.91, 0.90),
    ((0.6, 0.4), "2N", "branch, skipped"): (0.91, 0.91),
    ((0.6, 0.4), "N", "co-located"): (0.69, 0.72),
    ((0.6, 0.4), "2N", "co-located"): (0.82, 0.86),
    ((0.6, 0.4), "N", "co-located, skipped"): (0.70, 0.79),
    ((0.6, 0.4), "2N", "co-located, skipped"): (0.76, 0.84),
    ((0.3, 0.2), "N", "branch"): (0.94, 0.94),
    ((0.3, 0.2), "2N", "branch"): (0.93, 0.92),
    ((0.3, 0.2), "N", "branch, skipped"): (0.83, 0.83),
    ((0.3, 0.2), "2N", "branch, skipped"): (0.86, 0.86),
    ((0.3, 0.2), "N", "co-located"): (0.60, 0.61),
    ((0.3, 0.2), "2N", "co-located"): (0.72, 0.74),
    ((0.3, 0.2), "N", "co-located, skipped"): (0.55, 0.58),
    ((0.3, 0.2), "2N", "co-located, skipped"): (0.66, 0.68),
}
_EMULATED_STAGES, _EMULATED_LATENCIES = 8, ("wire", "spike")

#: At shares (0.6, 0.4): the largest share of the chain's time, by form and latency.
AIMED_SHARES = (0.6, 0.4)
AIMS = {
    ("branch, skipped", "wire"): 0.92,
    ("branch, skipped", "spike"): 0.92,
    ("co-located, skipped", "wire"): 0.80,
    ("co-located, skipped", "spike"): 0.86,
}


@dataclass(frozen=True, slots=True)
class Share:
    """Of the chain's step time.

    Attributes:
        mean: over the seeds.
        interval: 95% of the mean of another such set of seeds lie within it, either way.
        emulated: the mean of `EMULATED`, if it has one.
    """

    mean: float
    interval: float
    emulated: float | None


class Figures:
    """What the outcomes add up to."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self._outcomes: dict[Row, list[Outcome]] = {}
        for outcome in outcomes:
            self._outcomes.setdefault(_row(outcome.case), []).append(outcome)
        self.rows = tuple(self._outcomes)

    def chain(self, row: Row) -> float:
        """The mean step time of the chain in seconds."""
        return fmean(outcome.seconds[CHAIN] for outcome in self._outcomes[row])

    def passed(self, row: Row) -> float:
        """By how many percent the limit was passed at most by any form."""
        return max(max(outcome.passed.values()) for outcome in self._outcomes[row])

    def share(self, row: Row, form: str) -> Share:
        """Step times of ``form`` over the chain's, seed by seed."""
        shares = [outcome.seconds[form] / outcome.seconds[CHAIN] for outcome in self._outcomes[row]]
        interval = _STUDENT * stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else 0.0
        stages, latency, of_parts, limit = row
        emulated = None
        if stages == _EMULATED_STAGES and latency in _EMULATED_LATENCIES:
            pair = EMULATED.get((of_parts, limit, form))
            emulated = None if pair is None else pair[_EMULATED_LATENCIES.index(latency)]
        return Share(fmean(shares), interval, emulated)

    def missed(self) -> Iterator[str]:
        """One line for each aim that a row misses."""
        for row in self.rows:
            stages, latency, shares, limit = row
            for form in COMPARED if shares == AIMED_SHARES else ():
                aim, share = AIMS.get((form, latency)), self.share(row, form)
                if aim is not None and share.mean > aim:
                    where = f"PP {stages}, {latency}, {limit}"
                    yield f"{form}: {where}: {share.mean:.3f} ± {share.interval:.3f}, aim {aim:g}"


def _row(case: Case) -> Row:
    return case.stages, case.latency, case.shares, case.limit


#: Student's t at 97.5% for 19 degrees of freedom: 20 seeds. With fewer the interval is somewhat too narrow.
_STUDENT = 2.093
