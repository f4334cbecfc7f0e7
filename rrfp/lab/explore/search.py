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

import functools
import operator
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rrfp.core.events import Arrived, Completed, Consumed, Enqueued, Previewed, StepOpened
from rrfp.core.hint import View
from rrfp.core.ready_set import ForcedOrder
from rrfp.core.stage_core import StageCore
from rrfp.core.waiting import describe, wait_line
from rrfp.lab.unused_hint import UnusedHint
from rrfp.memory.admission import Limit, rule_of
from rrfp.memory.rules import MemoryRule, RuleContext
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import ENDING_KINDS, KINDS, F, Kind, Mode, StepId, Task
from rrfp.model.topology import Topology
from rrfp.model.visits import Visits

#: For each microbatch, which of its tasks have run: bit i stands for the i-th kind and virtual stage of the graph.
State = tuple[int, ...]
#: A transition: the microbatch's index in the state, and the bit of the task that runs.
Move = tuple[int, int]


@dataclass(frozen=True, slots=True)
class StageProblem:
    """All that the answers of one stage depend on."""

    # Explorations may have a stage in common: its answers in one then serve the other.

    graph: TaskGraph
    step: StepId
    visits: Visits
    stage: int
    limit: Limit
    #: (kind, virtual stage) pairs that run in microbatch order. Of orders forced elsewhere a stage knows only that
    #: there are any: one pair stands for them.
    in_order: frozenset[ForcedOrder]
    #: The memory rule; None: the one that ships.
    admission: type[MemoryRule] | None
    #: Bytes that a chunk task of each microbatch holds.
    sizes: tuple[int, ...]
    #: For each microbatch, the number that is known of its forwards beforehand.
    estimates: tuple[int, ...] | None = None
    #: Bytes that a split backward adds, until its weight task has run.
    growth: int = 0

    def __post_init__(self) -> None:
        stage_of, here = self.graph.stage_of, self.stage
        in_order = frozenset(pair for pair in self.in_order if stage_of[pair[1]] == here)
        if self.in_order and not in_order:
            in_order = frozenset([next((Kind.B, v) for v, stage in enumerate(stage_of) if stage != here)])
        object.__setattr__(self, "in_order", in_order)

    @property
    def serves(self) -> bool:
        """Whether a full stage serves its lowest microbatch, gating backwards too."""
        return self.rule.drains_in_order

    @property
    def rule(self) -> type[MemoryRule]:
        context = RuleContext(self.graph, self.stage, self.visits, self.step.mode, bool(self.in_order))
        return self.admission or rule_of(self.limit.rule, context)

    @property
    def are_microbatches_alike(self) -> bool:
        """Whether a microbatch's number makes no difference on this stage."""
        if self.in_order or self.serves or self.rule.is_by_number or len(self.visits.patterns) > 1:
            return False
        return len({*zip(self.sizes, self.estimates or self.sizes, strict=True)}) <= 1

    def core(self) -> StageCore:
        core = StageCore(
            self.graph, self.stage, UnusedHint(), self.limit, in_order=self.in_order, admission=self.admission
        )
        step, visits = self.step, self.visits
        core.apply(StepOpened(step.number, step.mode, step.microbatches, self.estimates, visits=visits))
        for microbatch, estimate in enumerate(self.estimates or ()):
            for virtual_stage in self.graph.placement.virtual_stages(self.stage):
                if virtual_stage not in visits.skipped_by(microbatch):
                    core.apply(Previewed(Task(Kind.F, microbatch, virtual_stage), estimate))
        return core


@dataclass(frozen=True, slots=True)
class Answer:
    """What a stage says of a state."""

    moves: tuple[Move, ...]
    #: One of these that may be run before all else when only other stages are looked at, or None.
    safe: Move | None
    #: D.
    held: int
    #: D once a forward of these moves has been enqueued; a slot may be free again when it has run.
    most_held: int
    #: Inputs that came from other stages and that no task here has started to use up.
    received: int
    #: Forward inputs that came from other stages, kept until their backward (forward only: their forward) has run. This
    #: is what the paper's "forward-ready" buffer holds.
    buffered: int


class StageOracle:
    """Answers for one stage."""

    def __init__(self, problem: StageProblem) -> None:
        self._problem = problem
        self._alike = problem.are_microbatches_alike
        self._bits = bits = bits_of(problem.graph, problem.step.mode)
        placement = problem.graph.placement
        self._own = {bit: pair for pair, bit in bits.items() if placement.stage_of(pair[1]) == problem.stage}
        #: By microbatch, the bits of the tasks that exist.
        self.visited = visited_bits(bits, problem.visits)
        self._readers = self._find_readers()
        self._credits = self._find_credits()
        self._kept = self._find_kept()
        self._forwards = sum(bit for bit, (kind, _) in self._own.items() if KINDS[kind].takes_slot)
        #: The tasks of a microbatch of which a core receives events, each task after all that it reads.
        self._visible = [(bit, pair) for pair, bit in bits.items() if bit in self._own or bit in self._readers]
        awaited = [readers for *_, readers in self._credits]
        #: All bits that the stage can see.
        self.sight = functools.reduce(operator.or_, [*self._own, *self._readers, *awaited], 0)
        self._answers: dict[State, Answer] = {}

    def answer(self, state: State) -> Answer:
        sight = self.sight
        key = tuple([ran & sight for ran in state])
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = self._translated(key) if self._alike else self._ask(key)
        return answer

    def core(self, state: State) -> StageCore:
        problem, step, core = self._problem, self._problem.step, self._problem.core()
        for microbatch, (ran, size, visited) in enumerate(zip(state, problem.sizes, self.visited, strict=True)):
            for bit, (kind, virtual_stage) in self._visible:
                task = Task(kind, microbatch, virtual_stage)
                if ran & bit and bit in self._own:
                    core.apply(Enqueued(task))
                    grows = kind is Kind.B and kind is not problem.graph.last_kind(virtual_stage, Mode.TRAIN)
                    added = problem.growth if grows else 0
                    core.apply(Completed(task, held=size + added))
                elif ran & bit and self._readers[bit] & visited:
                    core.apply(Arrived(step, task))
            for producer, peer, readers in self._credits:
                if ran & producer and _have_run(readers & visited, ran):
                    core.apply(Consumed(step, peer, Task(Kind.F, microbatch, self._own[producer][1])))
        return core

    def _translated(self, key: State) -> Answer:
        """The answer for ``key``, asked once for all numberings of microbatches."""
        order = sorted(range(len(key)), key=key.__getitem__)
        renumbered = tuple([key[at] for at in order])
        if renumbered == key:
            return self._ask(key)
        known = self._answers.get(renumbered)
        if known is None:
            known = self._answers[renumbered] = self._ask(renumbered)
        moves = tuple((order[at], bit) for at, bit in known.moves)
        safe = None if known.safe is None else (order[known.safe[0]], known.safe[1])
        return replace(known, moves=moves, safe=safe)

    def _ask(self, key: State) -> Answer:
        core = self.core(key)
        moves = tuple((task.microbatch, self._bits[task.kind, task.virtual_stage]) for task in core.ready)
        received, buffered = (
            sum(
                bool(ran & bit) and bool(users & visited & ~ran)
                for ran, visited in zip(key, self.visited, strict=True)
                for bit, users in used.items()
            )
            for used in (self._readers, self._kept)
        )
        held = core.view.held
        most_held = held + any(bit & self._forwards for _, bit in moves)
        return Answer(moves, self._safe(key, moves, core.view), held, most_held, received, buffered)

    def _safe(self, key: State, moves: Sequence[Move], view: View) -> Move | None:
        """A move that stays possible and takes nothing from others."""
        if self._problem.step.mode is Mode.FORWARD:
            return None
        if self._problem.serves:
            pairs = zip(key, self.visited, strict=True)
            left = sum((self._forwards & visited & ~ran).bit_count() for ran, visited in pairs)
            is_full = view.slots is not None and view.held >= view.slots
            is_never_full = view.slots is None or view.held + left < view.slots
            return moves[0] if moves and (is_full or is_never_full) else None
        # A backward that grows may not fit behind another one.
        stay = ENDING_KINDS if self._problem.growth else [kind for kind in Kind if not KINDS[kind].takes_slot]
        return next((move for move in moves if self._own[move[1]][0] in stay), None)

    def _find_readers(self) -> dict[int, int]:
        """The outputs of other stages, each with the tasks that read it."""
        readers: dict[int, int] = {}
        for bit, (kind, v) in self._own.items():
            for producer in self._problem.graph.inputs(Task(kind, 0, v)):
                source = self._bits[producer.kind, producer.virtual_stage]
                if source not in self._own:
                    readers[source] = readers.get(source, 0) | bit
        return readers

    def _find_kept(self) -> dict[int, int]:
        """Forward outputs of other stages, each with the tasks until which it is kept."""
        last = Kind.B if self._problem.step.mode is Mode.TRAIN else Kind.F
        kept: dict[int, int] = {}
        for source, readers in self._readers.items():
            for bit, (kind, v) in self._own.items():
                if kind is Kind.F and readers & bit:
                    kept[source] = kept.get(source, 0) | self._bits[last, v]
        return kept

    def _find_credits(self) -> list[tuple[int, int, int]]:
        """Forward only: a forward here, a peer, and its forwards that read it."""
        credits: dict[tuple[int, int], int] = {}
        graph = self._problem.graph
        if self._problem.step.mode is Mode.FORWARD:
            for _, v in self._own.values():
                for w in graph.successors[v]:
                    key = (self._bits[Kind.F, v], graph.placement.stage_of(w))
                    credits[key] = credits.get(key, 0) | self._bits[Kind.F, w]
        return [(bit, peer, readers) for (bit, peer), readers in credits.items() if peer != self._problem.stage]


def bits_of(graph: TaskGraph, mode: Mode) -> dict[tuple[Kind, int], int]:
    """The bit of every kind and virtual stage, above those it reads."""
    upward = range(graph.placement.num_virtual_stages)
    pairs = [(F, v) for v in upward]
    pairs += [(kind, v) for v in reversed(upward) for kind in graph.kinds(v, mode) if kind is not F]
    return {pair: 1 << index for index, pair in enumerate(pairs)}


def visited_bits(bits: Mapping[tuple[Kind, int], int], visits: Visits) -> tuple[int, ...]:
    of_pattern = {skipped: sum(bit for (_, v), bit in bits.items() if v not in skipped) for skipped in visits.patterns}
    return tuple(of_pattern[visits.skipped_by(microbatch)] for microbatch in range(visits.microbatches))


def _have_run(tasks: int, ran: int) -> bool:
    return tasks != 0 and ran & tasks == tasks


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
    admission: type[MemoryRule] | None = None,
    sizes: Sequence[int] | None = None,
    estimates: Sequence[int] | None = None,
    visits: Visits | None = None,
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
        visits: which virtual stages each microbatch visits; None: all.
        growth: bytes that a split backward adds, until its weight task has run.
        reduce: leave out orders that cannot matter; False visits every reachable state.
        oracles: what stages have answered in earlier explorations; added to.
    """
    stages = graph.placement.stages
    specs = limits if isinstance(limits, Sequence) and not isinstance(limits, str) else [limits] * stages
    resolved = [Limit.resolve(spec, stage, stages) for stage, spec in enumerate(specs)]
    held = (1,) * microbatches if sizes is None else tuple(sizes)
    known = None if estimates is None else tuple(estimates)
    step, own = StepId(0, mode, microbatches), visits or Visits(microbatches)
    problems = [
        StageProblem(graph, step, own, stage, limit, frozenset(in_order), admission, held, known, growth)
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
        """One search for each stage, or for None, with every move."""
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
        """States met, each with its origin and move; dead ends; moves made."""
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
        """A safe move alone, or every one of different microbatches."""
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
