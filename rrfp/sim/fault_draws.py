"""Draws what goes wrong in a run: nothing at times, mostly one fault, at most three.

It knows which messages a run sends (from its graph), about how long it takes, and nothing else of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from rrfp.core.graph import Graph
from rrfp.core.tasks import Kind, Mode, StepId, Task
from rrfp.sim.fault_plan import Death, Delay, Duplicate, Fault, Lose, MessageFault, MessageId, Pause, Spike, Swap


def draw_faults(rng: random.Random, graph: Graph, steps: Sequence[StepId], horizon: float) -> tuple[Fault, ...]:
    """The faults of one run.

    Args:
        rng: decides everything.
        graph: the dependency graph.
        steps: the steps of the run.
        horizon: about how long the run takes, in seconds.
    """
    return _Draw(rng, graph, steps, horizon).faults()


class _Draw:
    def __init__(self, rng: random.Random, graph: Graph, steps: Sequence[StepId], horizon: float) -> None:
        self._rng = rng
        self._stages = graph.placement.stages
        self._steps = steps
        self._horizon = horizon
        where = graph.placement.stage_of
        pairs = [(u, v) for u, v in graph.edges or () if where(u) != where(v)]
        #: Edges between stages: both virtual stages, and where they are.
        self._edges = [(u, v, where(u), where(v)) for u, v in pairs]

    def faults(self) -> tuple[Fault, ...]:
        number = self._rng.choice([0, 1, 1, 1, 1, 1, 1, 2, 2, 3])
        faults: list[Fault] = []
        hit: set[MessageId] = set()
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
        if not self._edges:
            return Pause(0, self._instant(), self._instant())
        makers: list[Callable[[], Fault]] = [self._spike, self._pause, self._death, self._duplicate, self._delay]
        makers += [lambda: Lose(self._message())] * 2 + [lambda: Swap(self._message())]
        return rng.choice(makers)()

    def _instant(self) -> float:
        return self._rng.random() * self._horizon

    def _spike(self) -> Spike:
        _, _, below, above = self._rng.choice(self._edges)
        sender, receiver = self._rng.sample([below, above], 2)
        start = self._instant()
        return Spike(sender, receiver, start, start + self._instant(), self._instant() / 2)

    def _pause(self) -> Pause:
        return Pause(self._rng.randrange(self._stages), self._instant(), self._instant())

    def _death(self) -> Death:
        stage = self._rng.randrange(self._stages)
        return Death(stage, self._instant(), self._instant() / 4, self._rng.random() < 0.5)

    def _duplicate(self) -> Duplicate:
        return Duplicate(self._message(), self._rng.choice([0.0, 0.1, 1.0]) * self._instant())

    def _delay(self) -> Delay:
        return Delay(self._message(), self._rng.random() < 0.6)

    def _message(self) -> MessageId:
        """Any message that the run sends."""
        rng, step = self._rng, self._rng.choice(self._steps)
        u, v, below, above = rng.choice(self._edges)
        microbatch, backwards = rng.randrange(step.microbatches), rng.random() < 0.5
        if not backwards:
            return MessageId(step.number, Task(Kind.F, microbatch, u), below, above)
        if step.mode is Mode.FORWARD:
            return MessageId(step.number, Task(Kind.F, microbatch, u), above, below, is_credit=True)
        return MessageId(step.number, Task(Kind.B, microbatch, v), above, below)
