"""Draws what goes wrong in a run: nothing at times, mostly one fault, at most three.

It knows which messages a run sends (from its graph), about how long it takes, and nothing else of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from rrfp.arbiter.group_messages import GroupMessageKind
from rrfp.core.tasks import Kind, Mode, Task
from rrfp.sim.cluster.ranks import Rank
from rrfp.sim.faults.faults import (
    AnyId,
    Death,
    Delay,
    Duplicate,
    Fault,
    GroupMessageId,
    Lose,
    MessageFault,
    MessageId,
    Pause,
    Spike,
    Swap,
)
from rrfp.sim.faults.scenario import Scenario


class RandomFaults:
    """Draws the faults of a scenario that has none yet; the generator decides everything."""

    def __init__(self, rng: random.Random, scenario: Scenario) -> None:
        self._rng = rng
        self._graph = graph = scenario.graph
        self._ranks = scenario.ranks
        self._parallelism = scenario.parallelism
        self._reports_bytes = scenario.limits[0].bytes is not None
        self._steps = scenario.steps
        self._horizon = _horizon(scenario)
        where = graph.placement.stage_of
        pairs = [(u, v) for u, v in graph.edges or () if where(u) != where(v)]
        #: Edges between stages: both virtual stages, and where they are.
        self._edges = [(u, v, where(u), where(v)) for u, v in pairs]
        visits = scenario.visits_of(self._steps[0])
        #: What is sent where microbatches skip something: a microbatch and an edge of its own graph.
        self._sent = [
            (m, edge)
            for edge in self._edges
            for m in range(visits.microbatches)
            if visits.skipped_by(m).isdisjoint(edge[:2])
        ]
        self._skips = visits.are_partial

    def draw(self) -> tuple[Fault, ...]:
        """The faults."""
        number = self._rng.choice([0, 1, 1, 1, 1, 1, 1, 2, 2, 3])
        faults: list[Fault] = []
        hit: set[AnyId] = set()
        for _ in range(number):
            fault = self._fault()
            if isinstance(fault, MessageFault):
                if fault.message in hit:
                    continue  # what a transport does to one message twice is one fault, not two
                hit.add(fault.message)
            if isinstance(fault, Death) and any(isinstance(other, Death) for other in faults):
                continue  # two deaths at once leave open whose name comes first
            faults.append(fault)
        return tuple(faults)

    def _fault(self) -> Fault:
        rng = self._rng
        if not self._sent and not self._parallelism.members > 1:
            return Pause(rng.choice(self._ranks), self._instant(), self._instant())
        makers: list[Callable[[], Fault]] = [self._spike, self._pause, self._death, self._duplicate, self._delay]
        makers += [lambda: Lose(self._message())] * 2 + [lambda: Swap(self._message())]
        return rng.choice(makers)()

    def _instant(self) -> float:
        return self._rng.random() * self._horizon

    def _spike(self) -> Spike:
        if self._is_in_group():
            first, second = self._pair()
        else:
            _, _, below, above = self._rng.choice(self._edges)
            first, second = self._counterparts(below, above)
        sender, receiver = self._rng.sample([first, second], 2)
        start = self._instant()
        return Spike(sender, receiver, start, start + self._instant(), self._instant() / 2)

    def _pause(self) -> Pause:
        return Pause(self._rng.choice(self._ranks), self._instant(), self._instant())

    def _death(self) -> Death:
        rank = self._rng.choice(self._ranks)
        return Death(rank, self._instant(), self._instant() / 4, self._rng.random() < 0.5)

    def _duplicate(self) -> Duplicate:
        return Duplicate(self._message(), self._rng.choice([0.0, 0.1, 1.0]) * self._instant())

    def _delay(self) -> Delay:
        return Delay(self._message(), self._rng.random() < 0.6)

    def _message(self) -> AnyId:
        """Any message that the run sends."""
        if self._is_in_group():
            return self._group_message()
        rng, step = self._rng, self._rng.choice(self._steps)
        if self._skips:
            microbatch, (u, v, below, above) = rng.choice(self._sent)
        else:
            u, v, below, above = rng.choice(self._edges)
            microbatch = rng.randrange(step.microbatches)
        backwards = rng.random() < 0.5
        lower, upper = self._counterparts(below, above)
        if not backwards:
            return MessageId(step.number, Task(Kind.F, microbatch, u), lower, upper)
        if step.mode is Mode.FORWARD:
            return MessageId(step.number, Task(Kind.F, microbatch, u), upper, lower, is_credit=True)
        return MessageId(step.number, Task(Kind.B, microbatch, v), upper, lower)

    def _is_in_group(self) -> bool:
        """Whether a message is one inside a group."""
        return self._parallelism.members > 1 and (not self._edges or self._rng.random() < 0.7)

    def _counterparts(self, *stages: int) -> list[Rank]:
        """One rank of each of these stages, all of the same replica and with the same index in their groups."""
        chosen = self._rng.choice(self._ranks)
        counterparts = [r for r in self._ranks if (r.replica, r.member) == (chosen.replica, chosen.member)]
        return [counterparts[stage] for stage in stages]

    def _pair(self) -> tuple[Rank, Rank]:
        """The first rank of some group, and another."""
        follower = self._rng.choice([rank for rank in self._ranks if rank.member])
        first = next(r for r in self._ranks if (r.stage, r.replica, r.member) == (follower.stage, follower.replica, 0))
        return first, follower

    def _group_message(self) -> GroupMessageId:
        """Any message inside a group that the run is certain to send."""
        rng, step = self._rng, self._rng.choice(self._steps)
        first, other = self._pair()
        tasks = list(self._graph.tasks(first.stage, step.microbatches, step.mode))
        number = rng.randrange(len(tasks))
        if self._parallelism.agrees:
            down = rng.random() < 0.5
            kind, way = (
                (GroupMessageKind.OUTCOME, (first, other)) if down else (GroupMessageKind.PROPOSE, (other, first))
            )
            return GroupMessageId(step.number, kind, number, *way)
        reported = [task for task in tasks if self._reads_elsewhere(task)]
        choices: list[GroupMessageId] = [GroupMessageId(step.number, GroupMessageKind.ORDER, number, first, other)]
        if reported:
            choices.append(GroupMessageId(step.number, GroupMessageKind.READY, rng.choice(reported), other, first))
        if self._reports_bytes:
            choices.append(GroupMessageId(step.number, GroupMessageKind.HELD, rng.choice(tasks), other, first))
        return rng.choice(choices)

    def _reads_elsewhere(self, task: Task) -> bool:
        where = self._graph.placement.stage_of
        return any(where(source.virtual_stage) != where(task.virtual_stage) for source in self._graph.inputs(task))


def _horizon(scenario: Scenario) -> float:
    """About how long the run takes, so that faults fall into it."""
    durations, latencies, steps = scenario.durations, scenario.latencies, scenario.steps
    microbatches = max(step.microbatches for step in steps)
    each = sum(sum(row) for rows in durations.values() for row in rows) / microbatches
    latency = sum(sum(row) for rows in latencies.values() for row in rows) / microbatches
    rounds = sum(step.microbatches / scenario.graph.placement.stages + 1 for step in steps)
    return 0.6 * (rounds * each + len(steps) * latency)
