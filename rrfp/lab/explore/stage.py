"""What one stage may do in a state of the whole pipeline, asked of a real `StageCore` and remembered.

A state holds, for each microbatch, which of its tasks have run: one bit for each kind and virtual stage. A stage sees
its own tasks, the outputs that came in from others, and, forward only, who has consumed its own. What its core holds
ready is a function of that and not of the order in which it happened (`tests/sim/test_explore.py` holds cores that live
through random runs against it), so it is asked once, by telling a fresh core one order of it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rrfp.core.events import Arrived, Completed, Consumed, Enqueued, Previewed, StepOpened
from rrfp.core.hint import View
from rrfp.core.ready_set import ForcedOrder
from rrfp.core.stage_core import StageCore
from rrfp.lab.unused_hint import UnusedHint
from rrfp.memory.admission import Admission, Limit
from rrfp.memory.memory_rule import rule_of
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Mode, StepId, Task
from rrfp.model.visits import Skipped, Visits

#: For each microbatch, which of its tasks have run: bit i stands for the i-th kind and virtual stage of the graph.
State = tuple[int, ...]
#: A transition: the microbatch's index in the state, and the bit of the task that runs.
Move = tuple[int, int]


@dataclass(frozen=True, slots=True)
class StageProblem:
    """All that the answers of one stage depend on.

    Explorations may have a stage in common: its answers in one then serve the other.
    """

    graph: TaskGraph
    step: StepId
    stage: int
    limit: Limit
    #: (kind, virtual stage) pairs that run in microbatch order. Of orders forced elsewhere a stage knows only that
    #: there are any: one pair stands for them.
    in_order: frozenset[ForcedOrder]
    #: The memory rule; None: the one that ships.
    admission: type[Admission] | None
    #: Bytes that a chunk task of each microbatch holds.
    sizes: tuple[int, ...]
    #: For each microbatch, the number that is known of its forwards beforehand.
    estimates: tuple[int, ...] | None = None
    #: For each microbatch the virtual stages that it does not visit; empty: each one visits all.
    skipped: tuple[Skipped, ...] = ()
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
        """Whether the stage, once full, serves its lowest microbatch, so that backwards are gated too."""
        chunks = self.graph.placement.chunks_of(self.stage)
        return self.limit.rule == "paper" and chunks > 1 and self.step.mode is Mode.TRAIN

    @property
    def visits(self) -> Visits:
        """Which virtual stages each microbatch visits."""
        return Visits(self.step.microbatches, self.skipped)

    @property
    def rule(self) -> type[Admission]:
        """The memory rule of the stage."""
        limit = replace(self.limit, rule="staircase") if self.step.mode is Mode.FORWARD else self.limit
        chosen = rule_of(self.graph, self.stage, limit, self.visits, is_forced=bool(self.in_order))
        return self.admission or chosen

    @property
    def are_microbatches_alike(self) -> bool:
        """Whether a microbatch's number makes no difference to what may run on this stage."""
        if self.in_order or self.serves or self.rule.is_by_number or len(self.visits.patterns) > 1:
            return False
        return len({*zip(self.sizes, self.estimates or self.sizes, strict=True)}) <= 1

    def core(self) -> StageCore:
        """A new core, in its step."""
        core = StageCore(
            self.graph, self.stage, UnusedHint(), self.limit, in_order=self.in_order, admission=self.admission
        )
        step, visits = self.step, self.visits
        core.apply(StepOpened(step.number, step.mode, step.microbatches, self.estimates, skipped=self.skipped))
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
        self._forwards = sum(bit for bit, (kind, _) in self._own.items() if kind is Kind.F)
        #: The tasks of a microbatch of which a core receives events, each task after all that it reads.
        self._visible = [(bit, pair) for pair, bit in bits.items() if bit in self._own or bit in self._readers]
        awaited = [readers for *_, readers in self._credits]
        #: All bits that the stage can see.
        self.sight = functools.reduce(operator.or_, [*self._own, *self._readers, *awaited], 0)
        self._answers: dict[State, Answer] = {}

    def answer(self, state: State) -> Answer:
        """What the stage says of ``state``."""
        sight = self.sight
        key = tuple([ran & sight for ran in state])
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = self._translated(key) if self._alike else self._ask(key)
        return answer

    def core(self, state: State) -> StageCore:
        """A core of the stage after all events of ``state`` that concern it."""
        problem, step, core = self._problem, self._problem.step, self._problem.core()
        for microbatch, (ran, size, visited) in enumerate(zip(state, problem.sizes, self.visited, strict=True)):
            for bit, (kind, virtual_stage) in self._visible:
                task = Task(kind, microbatch, virtual_stage)
                if ran & bit and bit in self._own:
                    core.apply(Enqueued(task))
                    added = problem.growth if kind is Kind.B and problem.graph.split[virtual_stage] else 0
                    core.apply(Completed(task, held=size + added))
                elif ran & bit and self._readers[bit] & visited:
                    core.apply(Arrived(step, task))
            for producer, peer, readers in self._credits:
                if ran & producer and _have_run(readers & visited, ran):
                    core.apply(Consumed(step, peer, Task(Kind.F, microbatch, self._own[producer][1])))
        return core

    def _translated(self, key: State) -> Answer:
        """The answer for ``key``, asked only once for all ways to number its microbatches."""
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
        """A move that stays possible until it is made and takes nothing from any other; see `search`."""
        if self._problem.step.mode is Mode.FORWARD:
            return None
        if self._problem.serves:
            pairs = zip(key, self.visited, strict=True)
            left = sum((self._forwards & visited & ~ran).bit_count() for ran, visited in pairs)
            is_full = view.slots is not None and view.held >= view.slots
            is_never_full = view.slots is None or view.held + left < view.slots
            return moves[0] if moves and (is_full or is_never_full) else None
        # A backward that grows may not fit behind another one.
        stay = (Kind.W,) if self._problem.growth else (Kind.B, Kind.W)
        return next((move for move in moves if self._own[move[1]][0] in stay), None)

    def _find_readers(self) -> dict[int, int]:
        """The outputs of other stages that this one reads, each with the tasks here that do."""
        readers: dict[int, int] = {}
        for bit, (kind, v) in self._own.items():
            for producer in self._problem.graph.inputs(Task(kind, 0, v)):
                source = self._bits[producer.kind, producer.virtual_stage]
                if source not in self._own:
                    readers[source] = readers.get(source, 0) | bit
        return readers

    def _find_kept(self) -> dict[int, int]:
        """The forward outputs of other stages that this one reads, each with the tasks here until which it is kept."""
        last = Kind.B if self._problem.step.mode is Mode.TRAIN else Kind.F
        kept: dict[int, int] = {}
        for source, readers in self._readers.items():
            for bit, (kind, v) in self._own.items():
                if kind is Kind.F and readers & bit:
                    kept[source] = kept.get(source, 0) | self._bits[last, v]
        return kept

    def _find_credits(self) -> list[tuple[int, int, int]]:
        """Forward only: (a forward here, a peer, the peer's forwards that read its output)."""
        credits: dict[tuple[int, int], int] = {}
        graph = self._problem.graph
        if self._problem.step.mode is Mode.FORWARD:
            for _, v in self._own.values():
                for w in graph.successors[v]:
                    key = (self._bits[Kind.F, v], graph.placement.stage_of(w))
                    credits[key] = credits.get(key, 0) | self._bits[Kind.F, w]
        return [(bit, peer, readers) for (bit, peer), readers in credits.items() if peer != self._problem.stage]


def bits_of(graph: TaskGraph, mode: Mode) -> dict[tuple[Kind, int], int]:
    """The bit of every kind and virtual stage, each above those of all that it reads."""
    upward = range(graph.placement.num_virtual_stages)
    pairs = [(Kind.F, v) for v in upward]
    pairs += [(kind, v) for v in reversed(upward) for kind in graph.kinds(v, mode) if kind is not Kind.F]
    return {pair: 1 << index for index, pair in enumerate(pairs)}


def visited_bits(bits: Mapping[tuple[Kind, int], int], visits: Visits) -> tuple[int, ...]:
    """By microbatch, the bits of the tasks that it has."""
    of_pattern = {skipped: sum(bit for (_, v), bit in bits.items() if v not in skipped) for skipped in visits.patterns}
    return tuple(of_pattern[visits.skipped_by(microbatch)] for microbatch in range(visits.microbatches))


def _have_run(tasks: int, ran: int) -> bool:
    """Whether there are any ``tasks``, and all of them have run."""
    return tasks != 0 and ran & tasks == tasks
