"""Every reachable state of a small pipeline, whatever the hints choose and however late messages are.

The rules are not written down here a second time: what may run is asked of the real `StageCore`. A state of the whole
pipeline is the set of tasks that have run. A transition lets any stage run any task that its core holds ready, all at
once: enqueue, completion, and delivery of every message that follows from it. States are visited breadth first, so the
trace to a deadlock is a shortest one.

Why instant delivery and atomic tasks cover every real run, with any delays, any hint and any `depth`:

1. Order the tasks of a real run by completion. Each of them is ready in the explorer's state at that point: all its
   inputs had completed, and what admission looks at on its stage has since then only changed in its favour (tasks
   enqueued before it have completed, so slots may have become free; none was enqueued after it and completed before
   it, since a lane runs in order). So every real run is a path here.
2. A message that is late leaves a stage with fewer ready tasks than it has here: the stage chooses among some of them,
   or idles, and idling is a path on which other stages move. A hint is a choice among ready tasks, a strict one may
   idle: both are paths.
3. A real pipeline is stuck only if no task runs, no message is on its way and nothing is ready anywhere: a state in
   which everything was delivered, which is a state here without a transition.

D of a stage counts tasks enqueued on it and completed on it, which a state determines; forward only, a slot is freed
here once all successors have run, and a credit on its way only keeps D up where it already was.

Microbatches differ in nothing but their number unless an order is forced, so then states are kept up to renumbering.
What a core holds ready is a function of what arrived and ran on its stage, not of the order in which that happened: it
is asked once for each such set, by telling a fresh core one order of it. `tests/sim/test_explore.py` checks that claim
against cores that live through random runs.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from rrfp.core.admission import Limit
from rrfp.core.events import Arrived, Completed, Consumed, Enqueued, StepOpened
from rrfp.core.graph import Graph
from rrfp.core.hint import Hint, View
from rrfp.core.readiness import ForcedOrder
from rrfp.core.ready_set import ReadySet
from rrfp.core.stage_core import StageCore
from rrfp.core.tasks import Kind, Mode, StepId, Task

#: For each microbatch, which of its tasks have run: bit i stands for the i-th kind and virtual stage of the graph.
State = tuple[int, ...]
#: A transition: the microbatch's place in the state, and the bit of the task that runs.
Move = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Deadlock:
    """A state in which tasks are left and nothing can run.

    Attributes:
        trace: a shortest sequence of tasks that leads there.
        held: D of each stage.
        waiting: for each stage, its first task that has not run, with the inputs it lacks; None where all have run.
    """

    trace: tuple[Task, ...]
    held: tuple[int, ...]
    waiting: tuple[tuple[Task, tuple[Task, ...]] | None, ...]

    def __str__(self) -> str:
        lines = [f"deadlock after {' '.join(map(str, self.trace))}"]
        for stage, (held, entry) in enumerate(zip(self.held, self.waiting, strict=True)):
            what = "is done"
            if entry is not None:
                task, absent = entry
                what = f"{task} waits for " + (" and ".join(map(str, absent)) or "memory")
            lines.append(f"  stage {stage} holds {held}: {what}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Exploration:
    """What was found.

    Attributes:
        states: number of reachable states (up to renumbering of microbatches where no order is forced).
        transitions: number of ways from one to the next.
        deadlocks: every state that cannot be left with tasks undone, nearest first.
        peak_held: the largest D of each stage in any state.
    """

    states: int
    transitions: int
    deadlocks: tuple[Deadlock, ...]
    peak_held: tuple[int, ...]

    def __str__(self) -> str:
        head = (
            f"{self.states} states, {self.transitions} transitions, {len(self.deadlocks)} deadlocks; "
            f"largest D by stage: {' '.join(map(str, self.peak_held))}"
        )
        return "\n".join([head, *map(str, self.deadlocks[:1])])


def explore(
    graph: Graph,
    microbatches: int,
    limits: Sequence[Limit | int | None] | Limit | int | str | None = None,
    mode: Mode = Mode.TRAIN,
    *,
    in_order: Collection[ForcedOrder] = (),
    reserve: bool = True,
) -> Exploration:
    """Visit every reachable state of one step.

    Args:
        graph: the dependency graph.
        microbatches: M.
        limits: one limit a stage, or one for all in any form that `Limit.resolve` takes, such as ``2`` or ``"1f1b"``.
            Under a byte limit every chunk task holds one byte.
        mode: training or forward only.
        in_order: (kind, virtual stage) pairs that run in microbatch order.
        reserve: whether the reserve rule applies when an order is forced.
    """
    stages = graph.placement.stages
    specs = limits if isinstance(limits, Sequence) and not isinstance(limits, str) else [limits] * stages
    resolved = [Limit.resolve(spec, stage, stages) for stage, spec in enumerate(specs)]
    return _Explorer(graph, microbatches, resolved, mode, frozenset(in_order), reserve).run()


@dataclass(frozen=True, slots=True)
class _Sight:
    """What one stage can know of a state, as sets of bits."""

    #: Its own tasks.
    own: int
    #: Tasks of other stages whose output it reads.
    inputs: int
    #: Forward only: (own virtual stage, peer, the peer's forwards that read its output).
    credits: tuple[tuple[int, int, int], ...]
    #: All that its core depends on.
    everything: int


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a stage's core says: which tasks are ready, and D."""

    moves: tuple[Move, ...]
    held: int


class _Explorer:
    def __init__(
        self,
        graph: Graph,
        microbatches: int,
        limits: Sequence[Limit],
        mode: Mode,
        in_order: frozenset[ForcedOrder],
        reserve: bool,
    ) -> None:
        self._graph = graph
        self._step = StepId(0, mode, microbatches)
        self._limits = limits
        self._in_order = in_order
        self._reserve = reserve
        self._stages = range(graph.placement.stages)
        self._bits = {pair: 1 << place for place, pair in enumerate(_in_dependency_order(graph, mode))}
        self._pairs = {bit: pair for pair, bit in self._bits.items()}
        self._sights = [self._sight(stage) for stage in self._stages]
        self._answers: list[dict[State, _Answer]] = [{} for _ in self._stages]
        self._parents: dict[State, tuple[State, Move] | None] = {}

    def run(self) -> Exploration:
        microbatches = self._step.microbatches
        start: State = (0,) * microbatches
        end: State = (sum(self._pairs),) * microbatches
        self._parents = {start: None}
        queue, stuck, transitions = deque([start]), [], 0
        while queue:
            state = queue.popleft()
            moves = self._moves(state)
            transitions += len(moves)
            if not moves and state != end:
                stuck.append(state)
            for move in moves:
                following = self._after(state, move)
                if following not in self._parents:
                    self._parents[following] = (state, move)
                    queue.append(following)
        peaks = tuple(max(answer.held for answer in answers.values()) for answers in self._answers)
        return Exploration(len(self._parents), transitions, tuple(map(self._deadlock, stuck)), peaks)

    def _moves(self, state: State) -> list[Move]:
        """One move for each task that may run; one for all microbatches that are alike."""
        moves: list[Move] = []
        for stage, sight in enumerate(self._sights):
            key = tuple([ran & sight.everything for ran in state])
            answer = self._answers[stage].get(key)
            if answer is None:
                answer = self._answers[stage][key] = self._ask(stage, key)
            moves += answer.moves
        if self._in_order:
            return moves
        return [(at, bit) for at, bit in moves if not at or state[at] != state[at - 1]]

    def _after(self, state: State, move: Move) -> State:
        at, bit = move
        following = [*state[:at], state[at] | bit, *state[at + 1 :]]
        if not self._in_order:
            following.sort()
        return tuple(following)

    def _ask(self, stage: int, state: State) -> _Answer:
        core = self._core(stage, state)
        moves = tuple((task.microbatch, self._bits[task.kind, task.virtual_stage]) for task in core.ready)
        return _Answer(moves, core.view.held)

    def _core(self, stage: int, state: State) -> StageCore:
        """A core of ``stage`` that was told everything it can know of ``state``."""
        graph, step, sight = self._graph, self._step, self._sights[stage]
        limit = self._limits[stage]
        core = StageCore(graph, stage, _Unasked(), limit, in_order=self._in_order, reserve=self._reserve)
        core.apply(StepOpened(step.number, step.mode, step.microbatches))
        for microbatch, ran in enumerate(state):
            for bit, (kind, virtual_stage) in self._pairs.items():
                task = Task(kind, microbatch, virtual_stage)
                if ran & bit & sight.own:
                    core.apply(Enqueued(task))
                    core.apply(Completed(task, held=1))
                elif ran & bit & sight.inputs:
                    core.apply(Arrived(step, task))
            for virtual_stage, peer, readers in sight.credits:
                if ran & readers == readers:
                    core.apply(Consumed(step, peer, Task(Kind.F, microbatch, virtual_stage)))
        return core

    def _sight(self, stage: int) -> _Sight:
        graph, place = self._graph, self._graph.placement
        own = [(kind, v) for kind, v in self._bits if place.stage_of(v) == stage]
        read = {(task.kind, task.virtual_stage) for kind, v in own for task in graph.inputs(Task(kind, 0, v))}
        credits: dict[tuple[int, int], int] = {}
        if self._step.mode is Mode.FORWARD:
            for _, v in own:
                for w in graph.successors[v]:
                    key = (v, place.stage_of(w))
                    credits[key] = credits.get(key, 0) | self._bits[Kind.F, w]
        mine = sum(self._bits[pair] for pair in own)
        inputs = sum(self._bits[pair] for pair in read.difference(own))
        awaited = tuple((v, peer, readers) for (v, peer), readers in credits.items() if peer != stage)
        return _Sight(mine, inputs, awaited, functools.reduce(operator.or_, (r for *_, r in awaited), mine | inputs))

    def _deadlock(self, state: State) -> Deadlock:
        trace = self._trace(state)
        ran = [0] * self._step.microbatches
        for kind, microbatch, virtual_stage in trace:
            ran[microbatch] |= self._bits[kind, virtual_stage]
        cores = [self._core(stage, tuple(ran)) for stage in self._stages]
        return Deadlock(trace, tuple(c.view.held for c in cores), tuple(next(iter(c.awaited(1)), None) for c in cores))

    def _trace(self, state: State) -> tuple[Task, ...]:
        """The tasks that lead to ``state``, each microbatch under one number from start to end."""
        steps: list[tuple[State, Move]] = []
        while (parent := self._parents[state]) is not None:
            steps.append(parent)
            state = parent[0]
        columns = list(state)
        trace = []
        for before, (at, bit) in reversed(steps):
            microbatch = at if self._in_order else columns.index(before[at])
            columns[microbatch] |= bit
            kind, virtual_stage = self._pairs[bit]
            trace.append(Task(kind, microbatch, virtual_stage))
        return tuple(trace)


class _Unasked(Hint):
    """The explorer reads what is ready and takes every choice itself."""

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        raise AssertionError("the explorer asks no hint")


def _in_dependency_order(graph: Graph, mode: Mode) -> Iterator[tuple[Kind, int]]:
    """Every kind and virtual stage, each after all that it reads."""
    upward = range(graph.placement.num_virtual_stages)
    for v in upward:
        yield Kind.F, v
    for v in reversed(upward):
        yield from ((kind, v) for kind in graph.kinds(v, mode) if kind is not Kind.F)
