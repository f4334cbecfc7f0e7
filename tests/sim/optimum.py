"""The best makespan of all schedules, searched without the package's engine.

The search knows only the rules: chains, one task at a time on a stage, D within the limit. It visits every order of
tasks on every stage, each task starting as early as its order allows; the best of these is the optimum.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rrfp.costs import CostTable

#: Kind, virtual stage, microbatch.
Task = tuple[str, int, int]


class State(NamedTuple):
    """What the past means for the future: all that a schedule so far can differ in once its set of tasks is known."""

    #: Chunk tasks that each stage holds.
    held: tuple[int, ...]
    #: When each stage is free.
    free: tuple[float, ...]
    #: When the inputs of every task arrive whose producer has run, and which has not run itself.
    inputs: dict[Task, float]


class Pipeline:
    """The rules of a step, written for the search: what may run next on a stage, and what follows."""

    def __init__(self, costs: CostTable, limits: Sequence[int] | None) -> None:
        self.costs, self.limits = costs, limits
        self.release = "W" if costs.split else "B"
        self.size = (3 if costs.split else 2) * costs.num_virtual_stages * costs.microbatches
        self.rows = {"F": costs.forward, "B": costs.backward, "W": costs.weight}
        self.first = State(
            (0,) * costs.stages, (0.0,) * costs.stages, {("F", 0, m): 0.0 for m in range(costs.microbatches)}
        )

    def stage(self, v: int) -> int:
        chunk, offset = divmod(v, self.costs.stages)
        flip = self.costs.placement == "v" and chunk % 2 == 1
        return self.costs.stages - 1 - offset if flip else offset

    def successors(self, task: Task) -> Iterator[tuple[Task, float]]:
        """What a task feeds, and how long after its end."""
        kind, v, m = task
        last = self.costs.num_virtual_stages - 1
        if kind == "F":
            yield (("F", v + 1, m), float(self.costs.latency_forward[v, m])) if v < last else (("B", v, m), 0.0)
        if kind == "B" and v > 0:
            yield ("B", v - 1, m), float(self.costs.latency_backward[v - 1, m])
        if kind == "B" and self.costs.split:
            yield ("W", v, m), 0.0

    def moves(self, state: State) -> list[Task]:
        """Every task that may be the next of its stage."""
        if self.limits is None:
            return list(state.inputs)
        room = [held < k * self.costs.chunks for held, k in zip(state.held, self.limits, strict=True)]
        return [task for task in state.inputs if task[0] != "F" or room[self.stage(task[1])]]

    def run(self, state: State, task: Task) -> State:
        """The task starts as early as it can after all that its stage has run."""
        kind, v, m = task
        stage = self.stage(v)
        held, free, inputs = list(state.held), list(state.free), dict(state.inputs)
        rows = self.rows[kind]
        assert rows is not None
        free[stage] = end = max(inputs.pop(task), free[stage]) + float(rows[v, m])
        held[stage] += (kind == "F") - (kind == self.release)
        for following, latency in self.successors(task):
            inputs[following] = end + (0.0 if self.stage(following[1]) == stage else latency)
        # An input that waits for its lane anyway may as well come later: more states compare.
        ready = {waiting: max(arrival, free[self.stage(waiting[1])]) for waiting, arrival in sorted(inputs.items())}
        return State(tuple(held), tuple(free), ready)

    def optimum(self) -> float:
        """The best makespan of all orders: of two ways to run the same tasks, one that is nowhere later is enough."""
        layer: dict[frozenset[Task], list[State]] = {frozenset(): [self.first]}
        for _ in range(self.size):
            following: dict[frozenset[Task], list[State]] = {}
            for done, states in layer.items():
                for state in states:
                    for task in self.moves(state):
                        keep_undominated(following.setdefault(done | {task}, []), self.run(state, task))
            layer = following
        return min(max(state.free) for states in layer.values() for state in states)

    def some_makespan(self, choose: random.Random) -> float:
        """The makespan of one random run; a run that fills its memory the wrong way around starts over."""
        while True:
            state = self.first
            for _ in range(self.size):
                if not (moves := self.moves(state)):
                    break
                state = self.run(state, choose.choice(moves))
            else:
                return max(state.free)


def keep_undominated(states: list[State], new: State) -> None:
    def no_later(one: State, other: State) -> bool:
        mine, others = (*one.free, *one.inputs.values()), (*other.free, *other.inputs.values())
        return all(map(operator.le, mine, others))

    if not any(no_later(state, new) for state in states):
        states[:] = [state for state in states if not no_later(new, state)] + [new]
