"""Which tasks of one stage are ready: all inputs present (`Readiness`), and forwards admitted (`ReadySet`).

The ready set is kept sorted, because scanning a thousand ready tasks for each decision costs more than the decision.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import Literal

from rrfp.core.task_state import TaskState, TaskStates, counters
from rrfp.memory.rules import MemoryRule
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import ENDING_KINDS, KINDS, F, Kind, Mode, Task
from rrfp.model.visits import Skipped, Visits


class DrainOrder:
    """Microbatch by microbatch, each F of the shallowest chunk to the deepest, then B, with its W, back.

    ``virtual_stages`` are in chunk order; ``kinds`` has, for each of them, what a microbatch that visits it runs.
    """

    __slots__ = ("_all", "_bits", "_lowest", "_order", "_ran")

    def __init__(self, virtual_stages: Sequence[int], kinds: Sequence[Sequence[Kind]], visits: Visits) -> None:
        forwards = [(F, v) for v in virtual_stages]
        here = reversed(tuple(zip(virtual_stages, kinds, strict=True)))
        self._order = (*forwards, *((kind, v) for v, own in here for kind in own if kind is not F))
        self._bits = {pair: 1 << index for index, pair in enumerate(self._order)}
        self._all = (1 << len(self._order)) - 1
        #: By microbatch, what has run of it or is skipped.
        self._ran = [self._skipped(visits.skipped_by(microbatch)) for microbatch in range(visits.microbatches)]
        self._lowest = 0
        self._advance()

    def _skipped(self, skipped: Skipped) -> int:
        return sum(bit for (_, virtual_stage), bit in self._bits.items() if virtual_stage in skipped) if skipped else 0

    def note(self, task: Task) -> None:
        """``task`` was enqueued."""
        self._ran[task.microbatch] |= self._bits[task.kind, task.virtual_stage]
        self._advance()

    def _advance(self) -> None:
        while self._lowest < len(self._ran) and self._ran[self._lowest] == self._all:
            self._lowest += 1

    def due(self) -> Task | None:
        """The next task in this order, or None when all have been enqueued."""
        if self._lowest == len(self._ran):
            return None
        ran = self._ran[self._lowest]
        kind, virtual_stage = next(pair for pair, bit in self._bits.items() if not ran & bit)
        return Task(kind, self._lowest, virtual_stage)


#: "deeper": forwards of the deeper chunk first. "paper": Algorithm 1's order, the shallower chunk first.
ChunkOrder = Literal["deeper", "paper"]


#: What the limit does not gate, as a rule: kinds that take no slot.
_UNGATED = frozenset(kind for kind, row in KINDS.items() if not row.takes_slot)


class ReadySet:
    """Tasks of one stage whose inputs are all present; a forward counts as ready only if admission allows it.

    Hints read it: ``head``, ``first``, ``holds_back_forwards``, iteration (F, B, W; deeper chunk first; then by
    priority), ``in``, ``bool``. Only the core adds and removes. Of one kind and chunk the lower microbatch has
    priority, unless a hint orders them otherwise.

    Args:
        states: of the tasks of this stage.
        virtual_stages: the stage's virtual stages in chunk order.
        admission: gates forwards.
        visits: which virtual stages each microbatch visits.
        drain_order: what a full stage runs next, under the paper's admission rule; None under any other.
    """

    __slots__ = (
        "_admission",
        "_deeper_first",
        "_drain_order",
        "_free_kinds",
        "_next_forward",
        "_num_forwards",
        "_num_others",
        "_position_of",
        "_queues",
        "_started",
        "_states",
    )

    def __init__(
        self,
        states: TaskStates,
        virtual_stages: Sequence[int],
        admission: MemoryRule,
        visits: Visits,
        drain_order: DrainOrder | None,
    ) -> None:
        self._states = states.own
        self._deeper_first = tuple(reversed(range(len(virtual_stages))))
        self._admission = admission
        self._drain_order = drain_order
        #: Kinds that are never blocked: backwards and weight tasks, unless a full stage drains in order, or a limit on
        #: bytes lets weight tasks go first.
        self._free_kinds = frozenset[Kind]() if admission.drains_in_order else _UNGATED
        #: By microbatch, its position in the order of their priority.
        self._position_of: Sequence[int] = range(visits.microbatches)
        #: By kind and chunk, the queues of ready tasks; and how many tasks they hold.
        self._queues: dict[Kind, list[list[tuple[int, Task]]]] = {
            kind: [states.own[kind][v].queue if v in states.own[kind] else [] for v in virtual_stages] for kind in Kind
        }
        self._num_forwards = self._num_others = 0
        # For the reserve rule: by chunk, the lowest microbatch not yet forwarded and those above it that have started,
        # since a hint may start microbatches in any order, or never will.
        self._next_forward = [0] * len(virtual_stages)
        self._started = [set(visits.skippers(v)) for v in virtual_stages]
        for chunk in self._deeper_first:
            self._pass_started(chunk)

    @property
    def num_chunks(self) -> int:
        """C, the chunks of this stage."""
        return len(self._deeper_first)

    @property
    def positions(self) -> Sequence[int]:
        """By microbatch, its place in the order of priority."""
        return self._position_of

    def head(self, kind: Kind, chunk: int) -> Task | None:
        """The highest-priority ready microbatch, or None.

        Args:
            kind: F, B or W.
            chunk: the local chunk, 0..C-1.
        """
        queue = self._queues[kind][chunk]
        if not queue:
            return None
        task = queue[0][1]
        if kind in self._free_kinds or self._admits(task, chunk):
            return task
        return self._let_in_before(task, chunk)

    def _let_in_before(self, head: Task, chunk: int) -> Task | None:
        """What may run of the kind and chunk of ``head``, which itself is blocked."""
        if self._admission.is_draining:
            due = self._due()
            is_here = due is not None and due.kind is head.kind and due.virtual_stage == head.virtual_stage
            return due if is_here and due in self else None
        if head.kind is not F:
            return None
        # Where the rule prefers lower microbatches the lowest may start while one of higher priority is blocked.
        if not self._admission.is_by_number:
            return None
        lowest = min((task for _, task in self._queues[F][chunk]), key=itemgetter(1))
        return lowest if lowest in self else None

    def first(self, kind: Kind, chunk_order: ChunkOrder = "deeper") -> Task | None:
        """The highest-priority ready task of ``kind``: deeper chunk first, then its `head`.

        Args:
            kind: F, B or W.
            chunk_order: for F only; ``"paper"`` takes the shallower chunk first.
        """
        chunks = reversed(self._deeper_first) if kind is F and chunk_order == "paper" else self._deeper_first
        for chunk in chunks:
            if (task := self.head(kind, chunk)) is not None:
                return task
        return None

    def heads(self) -> Iterator[Task]:
        """The highest-priority ready microbatch of each kind and chunk that has one."""
        for kind in Kind:
            for chunk in self._deeper_first:
                if (task := self.head(kind, chunk)) is not None:
                    yield task

    def __contains__(self, task: object) -> bool:
        if not isinstance(task, Task):
            return False
        state = self._states[task.kind].get(task.virtual_stage)
        if state is None or not (queue := state.queue):
            return False
        if queue[0][1] is not task and self._index(queue, task) is None:
            return False
        return task.kind in self._free_kinds or self._admits(task, state.chunk)

    def __iter__(self) -> Iterator[Task]:
        for task, chunk in self._queued():
            if self._admits(task, chunk):
                yield task

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        if self._admission.is_draining:
            return self.holds_any and next(self.heads(), None) is not None
        return self._num_others > 0 or (self._num_forwards > 0 and self.first(F) is not None)

    @property
    def holds_any(self) -> bool:
        """Whether any task has all its inputs, blocked by the memory limit or not."""
        return self._num_forwards + self._num_others > 0

    @property
    def holds_back_forwards(self) -> bool:
        """Whether forwards have all their inputs and only the memory limit keeps every one of them from starting."""
        return self._num_forwards > 0 and self.first(F) is None

    def __repr__(self) -> str:
        return f"ReadySet({' '.join(map(str, self))})"

    def order_by(self, order: Sequence[int]) -> None:
        """Give the microbatches of one kind and chunk priority in this order. For the core only.

        Raises:
            ValueError: unless every microbatch occurs once.
        """
        count = len(self._position_of)
        if sorted(order) != list(range(count)):
            raise ValueError(f"must hold every microbatch of 0..{count - 1} once")
        self._position_of = sorted(range(count), key=order.__getitem__)
        for queues in self._queues.values():
            for queue in queues:
                queue[:] = sorted((self._position_of[task.microbatch], task) for _, task in queue)

    def defer_backwards(self) -> None:
        """Under a limit on bytes, hold back what does not fit while a weight task is ready. For the core only."""
        if (limit := self._admission.byte_limit) is not None:
            limit.defers_backwards = True
            self._free_kinds = frozenset(ENDING_KINDS)

    def add(self, state: TaskState, microbatch: int) -> None:
        """All inputs of the task are present. For the core only."""
        insort(state.queue, (self._position_of[microbatch], Task(state.kind, microbatch, state.virtual_stage)))
        if state.kind is F:
            self._num_forwards += 1
        else:
            self._num_others += 1

    def remove(self, state: TaskState, task: Task) -> None:
        """``task`` was enqueued; a ValueError if its inputs were not all present. For the core only."""
        queue = state.queue
        # Hints return a head as a rule, the very object: that saves the search.
        index = 0 if queue and queue[0][1] is task else self._index(queue, task)
        if index is None:
            raise ValueError(f"{task} is not in the ready set")
        del queue[index]
        if self._drain_order is not None:
            self._drain_order.note(task)
        if state.kind is F:
            self._num_forwards -= 1
            if self._admission.reserves:
                self._note_forward(state.chunk, task.microbatch)
        else:
            self._num_others -= 1

    def gated(self) -> Iterator[Task]:
        """Tasks whose inputs are present and which the memory limit blocks. For the core only."""
        for task, chunk in self._queued():
            if not self._admits(task, chunk):
                yield task

    def _queued(self) -> Iterator[tuple[Task, int]]:
        """Every task whose inputs are present, with its chunk."""
        for kind in Kind:
            for chunk in self._deeper_first:
                for _, task in self._queues[kind][chunk]:
                    yield task, chunk

    def _index(self, queue: list[tuple[int, Task]], task: Task) -> int | None:
        if not 0 <= task.microbatch < len(self._position_of):
            return None
        position = self._position_of[task.microbatch]
        at = bisect_left(queue, position, key=itemgetter(0))
        return at if at < len(queue) and queue[at][0] == position else None

    def _admits(self, task: Task, chunk: int) -> bool:
        admission = self._admission
        if admission.is_draining:
            return task == self._due()
        if task.kind is not F:
            return task.kind in self._free_kinds or self._lets_back(task.microbatch, chunk)
        if admission.held < admission.roomy_below:
            return True
        return admission.allows(chunk, task.microbatch, self._next_forward[chunk])

    def _lets_back(self, microbatch: int, chunk: int) -> bool:
        """Whether a backward need not let weight tasks go first."""
        limit = self._admission.byte_limit
        if limit is None or not any(any(self._queues[kind]) for kind in ENDING_KINDS):
            return True
        return limit.fits_backward((chunk, microbatch))

    def _due(self) -> Task | None:
        """What a full stage runs next."""
        return None if self._drain_order is None else self._drain_order.due()

    def _note_forward(self, chunk: int, microbatch: int) -> None:
        self._started[chunk].add(microbatch)
        self._pass_started(chunk)

    def _pass_started(self, chunk: int) -> None:
        started = self._started[chunk]
        while self._next_forward[chunk] in started:
            started.discard(self._next_forward[chunk])
            self._next_forward[chunk] += 1


#: A kind on a virtual stage whose tasks must be enqueued in microbatch order.
ForcedOrder = tuple[Kind, int]

#: In which order the microbatches of one kind run on one virtual stage: "free", the hint's, or "natural", the caller's.
MicrobatchOrder = Literal["free", "natural"]


def natural_order(graph: TaskGraph) -> frozenset[ForcedOrder]:
    """Every kind on every virtual stage in microbatch order."""
    stages = range(graph.placement.num_virtual_stages)
    return frozenset((kind, v) for v in stages for kind in graph.kinds(v, Mode.TRAIN))


def forced_by(order: MicrobatchOrder, graph: TaskGraph) -> frozenset[ForcedOrder]:
    return natural_order(graph) if order == "natural" else frozenset()


class Readiness:
    """Counts missing inputs for the tasks of one stage in one step, and hands tasks that lack none to the ready set.

    Beside the inputs of the dependency graph there are three further kinds, treated the same way:

    - *forced order*: the same kind of the microbatch before that visits the same virtual stage (backwards in microbatch
      order);
    - *grants*: where replicas share forwards, of one that reads no other task (`rrfp.core.claims`);
    - *reports*: on the leader of a group, one from each of ``followers`` for a task that needs an output of another
      stage. They are counted apart, to tell a task that lacks nothing else from one that lacks inputs.
    """

    def __init__(
        self,
        graph: TaskGraph,
        states: TaskStates,
        ready: ReadySet,
        visits: Visits,
        *,
        in_order: Collection[ForcedOrder],
        followers: int,
        is_pooled: bool = False,
    ) -> None:
        self._graph = graph
        self._states = states
        self._ready = ready
        #: Whether forwards that read no other task wait for a grant.
        self._is_pooled = is_pooled
        #: Tasks that lack nothing but reports.
        self.num_unreported = 0
        for state in states:
            state.is_ordered = (state.kind, state.virtual_stage) in in_order
            self._count(state, visits.microbatches, followers)
            if visits.are_partial:
                self._count_visits(state, followers)
            first = _next(state, -1)
            if state.is_ordered and first < visits.microbatches:
                state.missing[first] -= 1  # nothing comes before it
        if visits.are_partial:
            self._mark_unawaited(visits.microbatches)
        for state in states:
            for microbatch, count in enumerate(state.missing):
                if count == 0:
                    ready.add(state, microbatch)

    def _count(self, state: TaskState, microbatches: int, followers: int) -> None:
        """What the tasks of ``state`` are missing, all alike."""
        wiring, most = state.wiring(0), self._never(state)
        awaits_grant = self._is_pooled and state.kind is F and not wiring.num_inputs
        state.missing = counters(microbatches, wiring.num_inputs + state.is_ordered + awaits_grant, most=most)
        state.missing_remote = counters(microbatches, wiring.num_remote, most=most)
        if followers and wiring.num_remote:
            state.unreported = counters(microbatches, followers, most=followers)

    def _count_visits(self, state: TaskState, followers: int) -> None:
        """What each task of ``state`` is missing, where some do not exist: they miss more than ever comes."""
        never, count = self._never(state), len(state.missing)
        wirings = [state.wiring(microbatch) for microbatch in range(count)]
        for microbatch, wiring in enumerate(wirings):
            exists = microbatch not in state.skippers
            state.missing[microbatch] = wiring.num_inputs + state.is_ordered if exists else never
            state.missing_remote[microbatch] = wiring.num_remote if exists else never
        if followers and any(wiring.num_remote for wiring in wirings):
            state.unreported = counters(count, 0, most=followers)
            for microbatch, wiring in enumerate(wirings):
                state.unreported[microbatch] = followers if wiring.num_remote else 0

    def _never(self, state: TaskState) -> int:
        """More inputs than ever come for a task of ``state``, the order's among them."""
        return len(self._graph.inputs(state.task(0))) + 2

    def _mark_unawaited(self, microbatches: int) -> None:
        """Outputs that are never made, or never come here, count as available: no task waits for them."""
        own = (state for rows in self._states.own.values() for state in rows.values())
        for state in own:
            for microbatch in state.skippers:
                state.is_available[microbatch] = True
        read = (state for rows in self._states.read.values() for state in rows.values())
        for state in read:
            for microbatch in range(microbatches):
                state.is_available[microbatch] = not state.wiring(microbatch).num_readers

    def arrive(self, source: TaskState, microbatch: int) -> None:
        """An output of another stage is here, for the first time."""
        source.is_available[microbatch] = True
        self._supply(source.readers, microbatch)

    def grant(self, state: TaskState, microbatch: int) -> None:
        """A forward that reads no other task runs here; see `rrfp.core.claims`."""
        self._supply((state,), microbatch)

    def supplied_by(self, source: TaskState, microbatch: int) -> list[Task]:
        """Follower, once after each `arrive`: the tasks that now have everything they need from other stages."""
        supplied = []
        for state in source.readers:
            state.missing_remote[microbatch] -= 1
            if state.missing_remote[microbatch] == 0:
                supplied.append(state.task(microbatch))
        return supplied

    def enqueue(self, state: TaskState, microbatch: int) -> None:
        """A local task was enqueued (or, on a follower, ordered)."""
        state.is_available[microbatch] = True
        self._supply(state.readers, microbatch)
        if state.is_ordered and (following := _next(state, microbatch)) < len(state.missing):
            self._supply((state,), following)

    def report(self, task: Task) -> None:
        """A follower has everything that ``task`` needs from other stages."""
        state, m = self._states.of(task), task.microbatch
        state.unreported[m] -= 1
        if not state.unreported[m] and not state.missing[m]:
            self.num_unreported -= 1
            self._ready.add(state, m)

    def expects_reports(self, task: Task) -> bool:
        return self._states.knows(task) and self._states.of(task).wiring(task.microbatch).num_remote > 0

    def has_inputs(self, task: Task) -> bool:
        """Whether no input of ``task`` is missing; reports may be."""
        return self._states.of(task).missing[task.microbatch] == 0

    def is_available(self, task: Task) -> bool:
        """Whether ``task`` was enqueued here (on a follower: ordered), or its output has arrived from elsewhere."""
        kind, m, virtual_stage = task
        state = self._states.own[kind].get(virtual_stage) or self._states.read[kind][virtual_stage]
        return bool(state.is_available[m])

    def inputs(self, task: Task) -> tuple[Task, ...]:
        """The inputs of ``task``; in a forced order the microbatch before is the last one."""
        needed, state = self._graph.inputs(task), self._states.of(task)
        if state.is_ordered:
            before = (m for m in reversed(range(task.microbatch)) if m not in state.skippers)
            needed = (*needed, *(task._replace(microbatch=m) for m in islice(before, 1)))
        return needed

    def absent_inputs(self, task: Task) -> tuple[Task, ...]:
        return tuple(producer for producer in self.inputs(task) if not self.is_available(producer))

    def _supply(self, states: Sequence[TaskState], microbatch: int) -> None:
        """One more input of ``microbatch`` is there for each of ``states``."""
        for state in states:
            left = state.missing[microbatch] - 1
            state.missing[microbatch] = left
            if left:
                continue
            if state.unreported and state.unreported[microbatch]:
                self.num_unreported += 1
            else:
                self._ready.add(state, microbatch)


def _next(state: TaskState, microbatch: int) -> int:
    """The next microbatch after ``microbatch`` that visits the virtual stage; M if none does."""
    following = microbatch + 1
    while following in state.skippers:
        following += 1
    return following
