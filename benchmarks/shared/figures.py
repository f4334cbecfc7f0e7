"""What the benchmarks share to report: quantiles of samples, and aims that are met or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import comb
from typing import Any, Literal

from rich.table import Table


def quantile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least ``share`` of all do not exceed.

    Raises:
        ValueError: if there is no sample.
    """
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """Two of ``samples`` between which the median of all that could be drawn lies with 95%.

    They are the k-th from below and from above with the largest k that suffices. Fewer than six samples never do: then
    they are the extremes, of five with 94%, of three with 75%.

    Raises:
        ValueError: if there is no sample.
    """
    if not samples:
        raise ValueError("no samples")
    ordered, count, rank, below = sorted(samples), len(samples), 0, 1
    # The median is below the k-th smallest one if at most k - 1 samples are below it, each with 1/2.
    while 2 * (below + comb(count, rank + 1)) <= 0.05 * 2**count:
        rank += 1
        below += comb(count, rank)
    return ordered[rank], ordered[count - 1 - rank]


@dataclass(frozen=True, slots=True)
class Spread:
    """Samples of one latency, in seconds."""

    p50: float
    p90: float
    p99: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Summarise ``samples``."""
        return cls(quantile(samples, 0.5), quantile(samples, 0.9), quantile(samples, 0.99), len(samples))


@dataclass(frozen=True, slots=True)
class Aim:
    """What a figure should be.

    Attributes:
        name: of the figure.
        value: measured.
        limit: the aim.
        sense: whether the aim is an upper or a lower limit.
        unit: of both numbers.
    """

    name: str
    value: float
    limit: float
    sense: Literal["at most", "at least"] = "at most"
    unit: str = ""

    @property
    def met(self) -> bool:
        """Whether the figure is what it should be."""
        return self.value <= self.limit if self.sense == "at most" else self.value >= self.limit

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "met": self.met}


def us(seconds: float) -> str:
    """Microseconds for a table."""
    return f"{seconds * 1e6:,.0f}" if seconds >= 1e-5 else f"{seconds * 1e6:.1f}"


def table_of(title: str, *columns: str) -> Table:
    """An empty table: the first column says what a row is, the others hold figures."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def aims_table(aims: Sequence[Aim]) -> Table:
    """Each aim, what was measured, and whether that meets it."""
    table = table_of("aims", "figure", "unit", "measured", "aim", "met")
    for aim in aims:
        row = (aim.unit, f"{aim.value:,.0f}", f"{aim.sense} {aim.limit:,.0f}")
        table.add_row(aim.name, *row, "yes" if aim.met else "NO")
    return table
