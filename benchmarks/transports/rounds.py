"""What both processes reported, joined: rounds, and those of them that other processes disturbed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.transports.processes import RoundReport
from benchmarks.transports.settings import Kind

#: A round counts as disturbed if other processes took more than this share of the machine meanwhile.
DISTURBED = 0.1

#: At least so many of all rounds are used, the least disturbed ones.
_LEAST_KEPT = 1 / 3


@dataclass(frozen=True, slots=True)
class Measured:
    """One way in one round.

    Attributes:
        seconds: of half round trips, or of the whole stream.
        cpu_s: processor time of both processes.
    """

    seconds: Sequence[float]
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """All ways, one after the other.

    Attributes:
        ways: by name.
        others: the share of the machine that other processes took meanwhile; 0 if it is not known.
    """

    ways: Mapping[str, Measured]
    others: float

    @classmethod
    def of(cls, reports: Sequence[RoundReport]) -> Round:
        """Join the reports of both processes; rank 0's comes first."""
        first = reports[0]
        pairs = zip(*(report.blocks for report in reports), strict=True)
        ways = {
            blocks[0].block.way: Measured(blocks[0].seconds, sum(block.cpu_s for block in blocks)) for blocks in pairs
        }
        others = 0.0 if first.machine_s is None else first.machine_s - sum(report.cpu_s for report in reports)
        return cls(ways, max(0.0, others / (first.wall_s * (os.cpu_count() or 1))))


class Rounds:
    """The rounds of one size and kind.

    Args:
        size: bytes of the tensor.
        kind: of the blocks.
        count: messages of a block.
        rounds: all that were measured.

    Attributes:
        kept: those that were not disturbed, but never less than a third: the least disturbed.
        discarded: the number of the others.
    """

    def __init__(self, size: int, kind: Kind, count: int, rounds: Iterable[Round]) -> None:
        self.size = size
        self.kind = kind
        ordered = sorted(rounds, key=lambda each: each.others)
        least = math.ceil(len(ordered) * _LEAST_KEPT)
        self.kept = [each for index, each in enumerate(ordered) if index < least or each.others <= DISTURBED]
        self.discarded = len(ordered) - len(self.kept)
        self._bytes = size * count

    @property
    def others(self) -> float:
        """The most that other processes took of the machine in a round that is used."""
        return max(each.others for each in self.kept)

    @property
    def ways(self) -> list[str]:
        """Those that took part."""
        return [way for way in self.kind.ways(self.size) if way in self.kept[0].ways]

    def samples(self, way: str) -> list[float]:
        """Seconds of all half round trips."""
        return [seconds for each in self.kept for seconds in each.ways[way].seconds]

    def latency_s(self, way: str) -> float:
        """The median over the rounds of each one's median."""
        return self._median(lambda each: median(each.ways[way].seconds))

    def rate(self, way: str) -> float:
        """Bytes a second."""
        return self._median(lambda each: self._bytes / each.ways[way].seconds[0])

    def cpu(self, way: str) -> float:
        """Seconds of processor time a byte."""
        return self._median(lambda each: each.ways[way].cpu_s / self._bytes)

    def faster(self, way: str, other: str) -> float:
        """How many times ``way`` is faster than ``other``, both in the same round."""
        return self._median(lambda each: median(each.ways[other].seconds) / median(each.ways[way].seconds))

    def later_s(self, way: str, other: str) -> float:
        """How much longer a message of ``way`` takes than one of ``other``, both in the same round."""
        return self._median(lambda each: median(each.ways[way].seconds) - median(each.ways[other].seconds))

    def cpu_ratio(self, way: str, other: str) -> float:
        """Processor time of ``way`` over that of ``other``, both in the same round."""
        return self._median(lambda each: each.ways[way].cpu_s / each.ways[other].cpu_s)

    def _median(self, figure: Callable[[Round], float]) -> float:
        return median(figure(each) for each in self.kept)
