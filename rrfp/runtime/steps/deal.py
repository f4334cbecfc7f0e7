"""Which microbatches of a step each replica runs, by measured durations.

A pipeline needs about ``rest + each * s`` seconds for microbatches of sizes that sum to s, where ``each`` is the time
of its slowest stage for one unit of size, and ``rest`` that of all its other stages for one microbatch: while it fills
and drains, these run alone. Without sizes each microbatch counts 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

#: Microbatches change replicas for so much less time of a step, relatively: durations always differ a little.
WORTH = 0.05


@dataclass(frozen=True, slots=True)
class ReplicaPace:
    """How fast a replica is, in seconds for a unit of size."""

    #: Its slowest stage.
    each: float
    #: Its other stages together.
    rest: float

    @classmethod
    def of(cls, stages: Sequence[float]) -> ReplicaPace:
        """Of a replica whose stages take so many seconds for a unit."""
        return cls(max(stages), sum(stages) - max(stages))


class Home(NamedTuple):
    """A microbatch by its place in its caller's lists."""

    #: Whose caller has it.
    replica: int
    #: Its number there.
    microbatch: int

    def __str__(self) -> str:
        return f"{self.microbatch} of replica {self.replica}"


@dataclass(frozen=True)
class Deal:
    """Which microbatches of a step each replica runs."""

    #: For each replica the microbatches that it runs, in their order there: of its own caller's first.
    homes: tuple[tuple[Home, ...], ...]

    @classmethod
    def alone(cls, given: Sequence[int]) -> Deal:
        """Each replica runs those of its caller, so many."""
        return cls(tuple(tuple(Home(r, m) for m in range(count)) for r, count in enumerate(given)))

    @property
    def counts(self) -> tuple[int, ...]:
        """How many each replica runs."""
        return tuple(map(len, self.homes))

    @property
    def is_trivial(self) -> bool:
        """Whether none moves."""
        return all(home.replica == r for r, homes in enumerate(self.homes) for home in homes)

    def given(self, replica: int) -> int:
        """How many a replica's caller has."""
        return sum(home.replica == replica for homes in self.homes for home in homes)

    def places(self, replica: int) -> list[tuple[int, int]]:
        """For each microbatch of a replica's caller: the replica that runs it, and its number there."""
        found = {home: (r, m) for r, homes in enumerate(self.homes) for m, home in enumerate(homes)}
        return [found[Home(replica, m)] for m in range(self.given(replica))]


def dealt(sizes: Sequence[Sequence[float]], paces: Sequence[ReplicaPace]) -> Deal:
    """A deal in which the slowest replica is as fast as single moves make it, and each runs one microbatch at least.

    As the callers have them where that gains less than `WORTH`. For microbatches of one size no deal is faster.

    Args:
        sizes: for each replica those of its caller's microbatches, one at least; in any unit.
        paces: of the replicas.
    """
    own = [{Home(r, m): size for m, size in enumerate(each)} for r, each in enumerate(sizes)]
    mean = sum(map(sum, sizes)) / sum(map(len, sizes))
    each = [pace.each for pace in paces]
    ends = [pace.rest * mean + pace.each * sum(given) for pace, given in zip(paces, sizes, strict=True)]
    before = max(ends)
    while len(own[slow := ends.index(max(ends))]) > 1:
        # Why one replica alone? To try all with all microbatches would take long where there are many.
        quick = min(range(len(ends)), key=lambda r: (ends[r] + each[r] * mean, r))
        reached, home = ends[slow], None
        for tried, size in reversed(own[slow].items()):  # of equal ones the last goes
            ended = max(ends[slow] - each[slow] * size, ends[quick] + each[quick] * size)
            if ended < reached:
                reached, home = ended, tried
        if home is None or quick == slow:
            break
        size = own[quick][home] = own[slow].pop(home)
        ends[slow], ends[quick] = ends[slow] - each[slow] * size, ends[quick] + each[quick] * size
    if max(ends) >= (1 - WORTH) * before:
        return Deal.alone([*map(len, sizes)])
    return Deal(tuple(tuple(sorted(ran, key=lambda home: (home.replica != r, home))) for r, ran in enumerate(own)))
