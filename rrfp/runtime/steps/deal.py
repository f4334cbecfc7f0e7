"""How many microbatches of a step each replica runs, by measured durations, and which of them change replicas.

A pipeline needs about ``rest + each * m`` seconds for m microbatches, where ``each`` is the time of its slowest stage
for one of them and ``rest`` that of all its other stages: while it fills and drains, these run alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

#: Microbatches change replicas for so much less time of a step, relatively: durations always differ a little.
WORTH = 0.05


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a replica is."""

    #: Seconds of its slowest stage for one microbatch.
    each: float
    #: Those of its other stages together.
    rest: float

    @classmethod
    def of(cls, stages: Sequence[float]) -> Pace:
        """Of a replica whose stages take so many seconds for a microbatch."""
        return cls(max(stages), sum(stages) - max(stages))

    def seconds(self, microbatches: int) -> float:
        """The time for a number of microbatches."""
        return self.rest + self.each * microbatches


class Home(NamedTuple):
    """A microbatch by its place in its caller's lists."""

    #: Whose caller has it.
    replica: int
    #: Its number there.
    microbatch: int


def dealt(given: Sequence[int], paces: Sequence[Pace]) -> tuple[int, ...]:
    """How many microbatches each replica runs, one at least; as ``given`` where another deal gains less than `WORTH`.

    Args:
        given: how many each replica's caller has, one at least.
        paces: of the replicas.
    """
    counts = [1] * len(given)
    ends = [(pace.seconds(2), replica) for replica, pace in enumerate(paces)]
    heapq.heapify(ends)
    for _ in range(sum(given) - len(given)):
        _, replica = ends[0]  # where one more ends first
        counts[replica] += 1
        heapq.heapreplace(ends, (paces[replica].seconds(counts[replica] + 1), replica))
    return tuple(counts if _slowest(counts, paces) < (1 - WORTH) * _slowest(given, paces) else given)


def _slowest(counts: Sequence[int], paces: Sequence[Pace]) -> float:
    return max(pace.seconds(count) for pace, count in zip(paces, counts, strict=True))


@dataclass(frozen=True)
class Deal:
    """Which microbatches of a step each replica runs.

    Attributes:
        given: how many each replica's caller has.
        counts: how many each replica runs.
    """

    given: tuple[int, ...]
    counts: tuple[int, ...]

    @cached_property
    def homes(self) -> tuple[tuple[Home, ...], ...]:
        """For each replica the microbatches that it runs, in their order there: the first of its own, then others'."""
        kept = list(map(min, self.given, self.counts))
        spare = iter([Home(r, m) for r, count in enumerate(self.given) for m in range(kept[r], count)])
        return tuple(
            (*(Home(r, m) for m in range(kept[r])), *(next(spare) for _ in range(kept[r], count)))
            for r, count in enumerate(self.counts)
        )

    def places(self, replica: int) -> list[tuple[int, int]]:
        """For each microbatch of a replica's caller: the replica that runs it, and its number there."""
        found = {home: (r, m) for r, homes in enumerate(self.homes) for m, home in enumerate(homes)}
        return [found[Home(replica, m)] for m in range(self.given[replica])]

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.counts))} of {', '.join(map(str, self.given))}"
