"""Every reachable state of a small pipeline, whatever the hints choose and however late messages are.

The rules are not written down here a second time: what may run is asked of the real `StageCore`. A state of the whole
pipeline is the set of tasks that have run. A transition lets any stage run any task that its core holds ready, all at
once: enqueue, completion, and delivery of every message that follows from it.

Why instant delivery and atomic tasks cover every real run, with any delays, any hint and any `depth`:

1. Order the tasks of a real run by completion. Each of them is ready in the explorer's state at that point: all its
   inputs had completed, and the tasks enqueued on its stage before it are those that have completed there, since a lane
   runs in order. Only D may be smaller than it was at the enqueue, and then no rule admits less (the paper's rule goes
   by the tasks enqueued when it serves, which are the same). So every real run is a path here. (Under a byte limit with
   uneven sizes this needs a `depth` of 1: a forward may be enqueued before the size of another is known.)
2. A message that is late leaves a stage with fewer ready tasks than it has here: the stage chooses among some of them,
   or idles, and idling is a path on which other stages move. A hint is a choice among ready tasks, a strict one may
   idle: both are paths.
3. A lane that takes offers (`rrfp.arbiter.offers`) may begin a task on a decision that did not know the last events.
   That is one more choice among ready tasks: a ready task stays ready under every event but the `Enqueued` of another
   one (`tests/sim/test_ready_stays_ready.py` watches the real cores), and while a task is offered no other is enqueued.
   The order of events is then one of a `depth` of 2.
4. A real pipeline is stuck only if no task runs, no message is on its way and nothing is ready anywhere: a state in
   which everything was delivered, which is a state here without a transition.

D of a stage counts tasks enqueued on it and completed on it, which a state determines; forward only, a slot is freed
here once all successors have run, and a credit on its way only keeps D up where it already was. Microbatches differ in
nothing but their number unless an order is forced, a stage admits or serves them by number (the banker, the paper's
rule), or their sizes or visits differ; so else states are kept up to renumbering.

**Not every order of the same tasks** (``reduce``, after the persistent sets of Godefroid, 1996). A task t that is ready
is *safe* if it stays ready whatever else runs, and running it first takes no task from any path that runs without it.
Then a deadlock d reachable from here has t behind it (t is not ready in d), and moving t to the front of the path to d
gives a path again: running t alone from here loses no deadlock. Every step adds a task, so nothing is put off forever.
Safe are, in a training step:

- a ready B or W, where only forwards are gated: nothing takes its inputs away, and a smaller D admits no less;
- under the paper's rule, what a full stage serves: nothing else may run there before it;
- under the paper's rule, every ready task of a stage that cannot fill again (D + forwards to come < K*C).

A B or W of the paper's rule is not safe otherwise: a forward may fill the stage, and it then waits for its turn.
Largest values are a matter of one stage. Looked at for stage i, a safe task of another stage takes nothing from D, from
the received or from the buffered inputs of i, so a path that ends on a largest value does so too with t in front. So
there is one search for each stage, in which every move of that stage is made and only others run safe tasks alone; each
of them finds every deadlock. `tests/sim/test_explore_reduced.py` holds both ways against each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from rrfp.core.ready_set import ForcedOrder
from rrfp.core.waiting import describe, wait_line
from rrfp.lab.explore.stage import Answer, Move, StageOracle, StageProblem, State, bits_of, visited_bits
from rrfp.memory.admission import Admission, Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Mode, StepId, Task
from rrfp.model.topology import Topology
from rrfp.model.visits import Skipped


@dataclass(frozen=True, slots=True)
class Deadlock:
    """A state in which tasks are left and nothing can run."""

    #: a sequence of tasks that leads there; all such sequences have one length, that of what has run.
    trace: tuple[Task, ...]
    #: D of each stage.
    held: tuple[int, ...]
    #: For each stage, its first task that has not run, and why; empty where all have run.
    waits: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"deadlock after {' '.join(map(str, self.trace))}"]
        for stage, (held, text) in enumerate(zip(self.held, self.waits, strict=True)):
            lines.append(f"  {wait_line(f'stage {stage} holds {held},', (text,) if text else ())}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Exploration:
    """What was found."""

    #: States visited, over all searches (up to renumbering of microbatches where they are alike).
    states: int
    #: Ways taken from one to the next.
    transitions: int
    #: Every state that cannot be left with tasks undone, nearest first.
    deadlocks: tuple[Deadlock, ...]
    #: The largest D of each stage in any state.
    peak_held: tuple[int, ...]
    #: The most inputs from other stages that lay on each stage without a task having started to use them up.
    peak_received: tuple[int, ...]
    #: The most forward inputs from other stages on each stage, counted until their backward (forward only: their
    #: forward) has run: the paper's "forward-ready" buffer.
    peak_buffered: tuple[int, ...]

    def __str__(self) -> str:
        head = (
            f"{self.states} states, {self.transitions} transitions, {len(self.deadlocks)} deadlocks; "
            f"largest D by stage: {' '.join(map(str, self.peak_held))}"
        )
        return "\n".join([head, *map(str, self.deadlocks[:1])])


__all__ = ["Deadlock", "Exploration", "Oracles", "explore"]

#: What stages have answered, for every stage that was asked.
Oracles = dict[StageProblem, StageOracle]


def explore(
    graph: TaskGraph,
    microbatches: int,
    limits: Sequence[Limit | int | None] | Limit | int | str | None = None,
    mode: Mode = Mode.TRAIN,
    *,
    in_order: Collection[ForcedOrder] = (),
    admission: type[Admission] | None = None,
    sizes: Sequence[int] | None = None,
    estimates: Sequence[int] | None = None,
    skipped: Sequence[Skipped] = (),
    growth: int = 0,
    reduce: bool = True,
    oracles: Oracles | None = None,
) -> Exploration:
    """Find every deadlock of one step, and the largest memory of each stage.

    Args:
        graph: the dependency graph.
        microbatches: M.
        limits: one limit a stage, or one for all in any form that `Limit.resolve` takes, such as ``2`` or ``"1f1b"``.
        mode: training or forward only.
        in_order: (kind, virtual stage) pairs that run in microbatch order.
        admission: the memory rule, such as one of `rrfp.lab.explore.cases` to see what is wrong with it. None:
            what the core chooses for each stage.
        sizes: bytes that a chunk task of each microbatch holds, for byte limits; one each by default.
        estimates: for each microbatch, the number that is known of its forwards beforehand; None: nothing is known.
        skipped: for each microbatch the virtual stages that it does not visit; empty: each one visits all.
        growth: bytes that a split backward adds, until its weight task has run.
        reduce: leave out orders that cannot matter; see the module's docstring. False visits every reachable state.
        oracles: what stages have answered in earlier explorations; added to.
    """
    stages = graph.placement.stages
    specs = limits if isinstance(limits, Sequence) and not isinstance(limits, str) else [limits] * stages
    resolved = [Limit.resolve(spec, stage, stages) for stage, spec in enumerate(specs)]
    held = (1,) * microbatches if sizes is None else tuple(sizes)
    known = None if estimates is None else tuple(estimates)
    step = StepId(0, mode, microbatches)
    problems = [
        StageProblem(graph, step, stage, limit, frozenset(in_order), admission, held, known, tuple(skipped), growth)
        for stage, limit in zip(range(stages), resolved, strict=True)
    ]
    return _Explorer(problems, {} if oracles is None else oracles).run(
        range(stages) if reduce and mode is Mode.TRAIN else [None]
    )


class _Explorer:
    def __init__(self, problems: Sequence[StageProblem], oracles: Oracles) -> None:
        graph, step = problems[0].graph, problems[0].step
        self._microbatches = step.microbatches
        self._visits = problems[0].visits
        #: Whether a microbatch's number makes no difference to what may run anywhere.
        self._alike = all(problem.are_microbatches_alike for problem in problems)
        self.bits = bits_of(graph, step.mode)
        self._pairs: dict[int, tuple[Kind, int]] = {bit: pair for pair, bit in self.bits.items()}
        for problem in problems:
            oracles.setdefault(problem, StageOracle(problem))
        self.oracles = [oracles[problem] for problem in problems]
        self._peaks = [(0, 0, 0) for _ in problems]

    def run(self, focuses: Iterable[int | None]) -> Exploration:
        """One search for each stage to look at, or for None one that makes every move."""
        states = transitions = 0
        deadlocks: dict[State, Deadlock] = {}
        for focus in focuses:
            parents, stuck, taken = self._search(focus)
            states += len(parents)
            transitions += taken
            deadlocks |= {state: self._deadlock(state, parents) for state in stuck if state not in deadlocks}
        nearest = tuple(sorted(deadlocks.values(), key=lambda deadlock: len(deadlock.trace)))
        held, received, buffered = zip(*self._peaks, strict=True)
        return Exploration(states, transitions, nearest, held, received, buffered)

    def _search(self, focus: int | None) -> tuple[dict[State, tuple[State, Move] | None], list[State], int]:
        """Every state met, with the one before it and the move between; those without a way on; moves made."""
        start: State = (0,) * self._microbatches
        end: State = visited_bits(self.bits, self._visits)
        parents: dict[State, tuple[State, Move] | None] = {start: None}
        queue, stuck, taken = deque([start]), [], 0
        while queue:
            state = queue.popleft()
            moves = self._moves(state, focus)
            taken += len(moves)
            if not moves and state != end:
                stuck.append(state)
            for move in moves:
                following = self._after(state, move)
                if following not in parents:
                    parents[following] = (state, move)
                    queue.append(following)
        return parents, stuck, taken

    def _moves(self, state: State, focus: int | None) -> Sequence[Move]:
        """The moves to make: a safe one alone, or every one (of microbatches that are alike, those of the first)."""
        answers = [oracle.answer(state) for oracle in self.oracles]
        self._note_peaks(answers)
        if focus is not None:
            for stage, answer in enumerate(answers):
                if answer.safe is not None and stage != focus:
                    return (answer.safe,)
        moves = [move for answer in answers for move in answer.moves]
        if not self._alike:
            return moves
        return [(at, bit) for at, bit in moves if not at or state[at] != state[at - 1]]

    def _note_peaks(self, answers: Sequence[Answer]) -> None:
        for stage, (answer, (held, received, buffered)) in enumerate(zip(answers, self._peaks, strict=True)):
            if answer.most_held > held or answer.received > received or answer.buffered > buffered:
                self._peaks[stage] = (
                    max(held, answer.most_held),
                    max(received, answer.received),
                    max(buffered, answer.buffered),
                )

    def _after(self, state: State, move: Move) -> State:
        at, bit = move
        following = [*state[:at], state[at] | bit, *state[at + 1 :]]
        if self._alike:
            following.sort()
        return tuple(following)

    def _deadlock(self, state: State, parents: dict[State, tuple[State, Move] | None]) -> Deadlock:
        trace = self._trace(state, parents)
        ran = [0] * self._microbatches
        for kind, microbatch, virtual_stage in trace:
            ran[microbatch] |= self.bits[kind, virtual_stage]
        cores = [oracle.core(tuple(ran)) for oracle in self.oracles]
        waits = [describe(core, Topology(core.stage, len(cores)), most=1) for core in cores]
        return Deadlock(trace, tuple(c.view.held for c in cores), tuple(map("; ".join, waits)))

    def _trace(self, state: State, parents: dict[State, tuple[State, Move] | None]) -> tuple[Task, ...]:
        """The tasks that lead to ``state``, each microbatch under one number from start to end."""
        steps: list[tuple[State, Move]] = []
        while (parent := parents[state]) is not None:
            steps.append(parent)
            state = parent[0]
        columns = list(state)
        trace = []
        for before, (at, bit) in reversed(steps):
            microbatch = columns.index(before[at]) if self._alike else at
            columns[microbatch] |= bit
            kind, virtual_stage = self._pairs[bit]
            trace.append(Task(kind, microbatch, virtual_stage))
        return tuple(trace)
