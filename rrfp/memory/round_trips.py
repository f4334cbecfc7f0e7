"""Limits that follow slow links (``limit="auto"``): K of every stage from round trips and task times. Pure.

A slot of stage s is taken until the microbatch is back, so a link that takes long keeps it long. Meanwhile the tasks of
other microbatches go on only while slots are left: one for each period (F + B + W of one microbatch) that the round
trip takes, on every stage before that link, which is Little's law. Where durations differ, further slots even them out:
in proportion to their spread and to the root of the number of microbatches on their way. docs/memory-rules.md has the
lemma and its conditions, docs/memory.md what was simulated.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, pstdev
from typing import Final

from rrfp.errors import ConfigError
from rrfp.model.graph import TaskGraph

#: Two stages between which outputs travel, the lower one first.
Edge = tuple[int, int]

#: A round trip below this part of a period counts as none, since every link takes some time.
NEGLIGIBLE: Final = 0.05

#: Further slots where the spread (standard deviation over mean) is 1 and one microbatch is on its way: found by
#: simulation.
SPREAD_SLOTS: Final = 2.5

#: The newest steps that decide.
STEPS: Final = 3


@dataclass(frozen=True, slots=True)
class StageMeasure:
    """What one stage measured in a step."""

    #: F + B + W of one microbatch, the mean, in seconds.
    period: float = 0.0
    #: The standard deviation of that, over the mean.
    spread: float = 0.0
    #: What a message to another stage and the answer take, in seconds, by stage.
    round_trips: Mapping[int, float] | None = None

    @classmethod
    def of(cls, seconds: Sequence[float], round_trips: Mapping[int, float]) -> StageMeasure:
        """Of a stage whose tasks took so long by microbatch, those that skip it not among them."""
        period = fmean(seconds) if seconds else 0.0
        return cls(period, pstdev(seconds) / period if period else 0.0, round_trips)


@dataclass(frozen=True, slots=True)
class Pace:
    """What decides on limits."""

    #: F + B + W of one microbatch on a stage, the mean over microbatches and stages, in seconds.
    period: float
    #: The mean of the stages' spreads.
    spread: float
    #: In seconds; edges that are absent take no time.
    round_trips: Mapping[Edge, float]

    @classmethod
    def of(cls, stages: Sequence[StageMeasure]) -> Pace:
        trips: dict[Edge, float] = {}
        for stage, measure in enumerate(stages):
            for peer, seconds in (measure.round_trips or {}).items():
                edge = (min(stage, peer), max(stage, peer))
                trips[edge] = max(seconds, trips.get(edge, 0.0))
        ran = [stage for stage in stages if stage.period] or stages  # where replicas share forwards, not every rank
        return cls(fmean(stage.period for stage in ran), fmean(stage.spread for stage in ran), trips)

    @classmethod
    def over(cls, steps: Sequence[Pace], choose: Callable[[Sequence[float]], float]) -> Pace:
        """The median period of ``steps``, and of the rest what ``choose`` makes of them."""
        edges = {edge for step in steps for edge in step.round_trips}
        trips = {e: choose([step.round_trips[e] for step in steps if e in step.round_trips]) for e in edges}
        return cls(median(step.period for step in steps), choose([step.spread for step in steps]), trips)

    def periods(self, edge: Edge) -> float:
        """The round trip of ``edge`` in periods; 0 where it is negligible."""
        trip = self.round_trips.get(edge, 0.0) / self.period if self.period > 0 else 0.0
        return trip if trip >= NEGLIGIBLE else 0.0

    def __str__(self) -> str:
        slow = ", ".join(
            f"stages {edge[0]}-{edge[1]} {seconds * 1e3:.3g} ms ({periods:.2g} periods)"
            for edge, seconds in sorted(self.round_trips.items())
            if (periods := self.periods(edge))
        )
        return f"round trips: {slow or 'none that counts'}; period {self.period * 1e3:.3g} ms, spread {self.spread:.0%}"


class RoundTripRule:
    """How many microbatches each stage of ``graph`` needs; a ConfigError where no rule is known.

    ``claims``: replicas share forwards by claims. Then an output is offered and claimed before it travels, so a link
    counts twice, and a slot is taken from the claim on, so the link before a stage counts too.
    """

    def __init__(self, graph: TaskGraph, *, claims: bool = False) -> None:
        placement = graph.placement
        chunks = {placement.chunks_of(stage) for stage in range(placement.stages)}
        if chunks != {1} and (not graph.is_chain or len(chunks) > 1):
            raise ConfigError(
                "limit is 'auto' on a graph or a placement that gives a stage several virtual stages, must be 'n', "
                "'2n' (the default), a number or an rrfp.Limit: its rule is known for one virtual stage on each stage, "
                "and for chains with as many on each"
            )
        if claims and chunks != {1}:
            raise ConfigError(
                f"limit is 'auto' with {max(chunks)} chunks a stage, must be 'n', '2n' (the default), a number or an "
                "rrfp.Limit with share_replicas=True, which 'auto' goes with for one chunk a stage"
            )
        self._graph = graph
        self.claims = claims
        stages = range(placement.stages)
        #: K where nothing is slow: that of 1F1B; N where the chunks of a stage share its slots.
        self.base = tuple([graph.distance_to_sink(s) if chunks == {1} else placement.stages for s in stages])

    def limits(self, pace: Pace) -> tuple[int, ...]:
        """K by stage."""
        graph, stage_of, crossings = self._graph, self._graph.stage_of, 2 if self.claims else 1
        slots = [0] * len(stage_of)
        for v in reversed(range(len(slots))):
            for w in graph.successors[v]:
                edge = (min(stage_of[v], stage_of[w]), max(stage_of[v], stage_of[w]))
                slots[v] = max(slots[v], slots[w] + math.ceil(crossings * pace.periods(edge)))
        stages = range(graph.placement.stages)
        first = [graph.placement.virtual_stages(stage)[0] for stage in stages]
        waits = self._claim_waits(pace) if self.claims else [0] * len(first)
        on_their_way = [self.base[s] + slots[first[s]] + waits[s] for s in stages]
        return tuple([k + math.floor(SPREAD_SLOTS * pace.spread * math.sqrt(k)) for k in on_their_way])

    def claimed_ahead(self, pace: Pace) -> tuple[int, ...]:
        """How many forwards each stage has to claim before it begins them: one, and one a period until the answer."""
        waits = self._claim_waits(pace)
        first = self._graph.stage_of[0]  # it claims from its own copies: the links to them may be as slow as any
        return tuple([1 + (max(waits) if stage == first else wait) for stage, wait in enumerate(waits)])

    def _claim_waits(self, pace: Pace) -> list[int]:
        """By stage, how many periods a claim and its answer take; of the first those of its own microbatches."""
        stage_of = self._graph.stage_of
        edges = [(min(pair), max(pair)) for pair in pairwise(stage_of)]
        waits = [0] * self._graph.placement.stages
        for edge, stage in zip(edges, stage_of[1:], strict=True):
            waits[stage] = math.ceil(pace.periods(edge))
        return waits


@dataclass(frozen=True, slots=True)
class LimitChange:
    """New limits, and why."""

    before: tuple[int, ...]
    now: tuple[int, ...]
    why: Pace

    def __str__(self) -> str:
        now, before = (" ".join(map(str, limits)) for limits in (self.now, self.before))
        return f"from the next step on stages may hold {now} microbatches, until now {before}; {self.why}"


class FollowedLimits:
    """The limits on which ranks agree between steps: the same measures in the same order give the same limits.

    They rise to what the medians of the newest steps ask for, at most to twice as many a step, and fall to what the
    largest values of these steps ask for, at most by half. What lies between the two changes nothing. ``most`` is the
    most that this rank wants to hold; other ranks need not know it.
    """

    def __init__(self, graph: TaskGraph, most: int | None = None, *, claims: bool = False) -> None:
        self._rule = RoundTripRule(graph, claims=claims)
        self._most = most
        #: K by stage; and how many forwards each claims before it begins them.
        self.now = self._rule.base
        self.claimed_ahead = (1,) * len(self.now)
        self._steps = deque[Pace](maxlen=STEPS)

    def own(self, stage: int) -> int:
        """K of ``stage``, where this rank is."""
        return self.now[stage] if self._most is None else min(self.now[stage], self._most)

    def observe(self, stages: Sequence[StageMeasure]) -> LimitChange | None:
        """A training step has ended, of which these are the measures by stage; returns new limits, if they change."""
        self._steps.append(Pace.of(stages))
        usual = Pace.over(self._steps, median)
        least, most = self._rule.limits(usual), self._rule.limits(Pace.over(self._steps, max))
        before, self.now = self.now, tuple(map(_moved, self.now, least, most))
        if self._rule.claims:
            self.claimed_ahead = self._rule.claimed_ahead(usual)
        return None if self.now == before else LimitChange(before, self.now, usual)


def _moved(now: int, least: int, most: int) -> int:
    """``now``, moved towards where it is between ``least`` and ``most``."""
    if now < least:
        return min(least, 2 * now)
    return max(most, -(-now // 2)) if now > most else now
