"""Every interleaving of a small step whose replicas share forwards by claims, with the real cores.

A state is what each rank has heard and what is on its way. A transition lets one thing happen: a message arrives, the
lane of a rank takes any task that its core holds ready, or ends the one it has. Control messages between two ranks stay
in order; outputs overtake them and each other. So each hint, each duration and each delay is a path here.

**Failures** (``aborts``): any rank may fail at any time, and each other one hears of it at any later time, after or
before any message that is on its way. A core that has heard must do nothing more, whatever comes, and until then none
may refuse what comes from those that have not heard yet: the error that ends the job would name it instead.

**Not every order of the same events** (``reduce``). A move t is *safe* if whatever can still go wrong or come to an end
can do so after t as well; then t alone is explored. Each move adds an event, so none is delayed forever. Safe are

1. a claim that reaches a holder which has given the forward away: it changes nothing there, now or later;
2. with one chunk and no limit on bytes, on a rank that is *quiet*, which has heard of all forwards of its stage and has
   an answer, or awaits one, for each:
   what arrives from holders and from the stage behind, and tasks whose end no copy has to hear of (all but the forwards
   whose output is offered).

A quiet rank claims nothing more, since no forward is offered to it again. So its events differ in what they add to it
and in nothing that another event there reads: an answer or an output adds a ready task, or takes one away that another
copy runs; a claim of its own outputs is decided by those alone; a task that it has claimed has a slot whatever ran
before. Such a task sends at most an output, which no order with other messages concerns; an offer keeps
its place among the messages to the copies, so its forward is not safe. With t first, the other events of a path
are possible as before and lead to the same end. D and what is claimed together are largest at once: a forward that
begins moves from the one to the other, and all else makes them smaller. `tests/sim/test_explore_claims.py` compares
both searches.

What a rank can do, and does on an event, is asked of its core once for each of its own states: many states of the whole
differ in other ranks alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rrfp import Hint, View
from rrfp.core import events as ev
from rrfp.core.ready_set import ReadySet
from rrfp.core.stage_core import StageCore
from rrfp.errors import Origin, RrfpError
from rrfp.lab.cluster.ranks import Rank, ranks_of
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Layout
from rrfp.model.tasks import F, Mode, StepId, Task

#: What a rank has heard, in order.
_History = tuple[ev.Event, ...]


@dataclass(frozen=True, slots=True)
class ClaimCase:
    """A chain over N stages, each with so many copies.

    Attributes:
        stages: N.
        copies: replicas.
        homes: by microbatch, the replica whose caller has it.
        limit: K.
        depth: forwards claimed and not begun.
        split: whether backward is split.
        paces: by stage and copy, seconds of a microbatch; empty: not known.
        chunks: of a stage.
        layout: ``"looped"`` or ``"v"``.
        most_bytes: the limit on bytes; None: unlimited.
        sizes: bytes that each microbatch holds on each chunk, which its caller tells; empty: none.
        is_even: the first microbatch of each replica runs there.
    """

    stages: int
    copies: int
    homes: tuple[int, ...]
    limit: int = 1
    depth: int = 1
    split: bool = False
    paces: tuple[tuple[float, ...], ...] = ()
    chunks: int = 1
    layout: Layout = "looped"
    most_bytes: int | None = None
    sizes: tuple[int, ...] = ()
    is_even: bool = False


@dataclass(slots=True)
class ClaimsExplored:
    """What was found.

    Attributes:
        states: states reached.
        ends: those in which the step has ended on all ranks; with failures, those in which all have heard of one.
        wrong: what is wrong with a state, each once; empty if nothing is.
        peak_held: the most D plus claimed forwards on any rank; of several chunks D alone.
        peak_bytes: the most bytes that microbatches in work held on any rank.
        takers: who has run the forwards in some state at the end: by stage and microbatch, the copy.
    """

    states: int = 0
    ends: int = 0
    wrong: list[str] = field(default_factory=list)
    peak_held: int = 0
    peak_bytes: int = 0
    takers: set[tuple[tuple[int, ...], ...]] = field(default_factory=set)


class _Channel(NamedTuple):
    """Between two ranks: that of control messages, or of one output."""

    sender: Rank
    receiver: Rank
    output: Task | None


class _Sent(NamedTuple):
    channel: _Channel
    event: ev.Event


class _Move(NamedTuple):
    """What an event does to a rank: the number of its next state, and what it sends."""

    following: int
    sent: tuple[_Sent, ...]


class _Line(NamedTuple):
    """Messages on their way in one channel, at least one."""

    channel: _Channel
    messages: tuple[ev.Event, ...]


@dataclass(slots=True)
class _Local:
    rank: Rank
    #: One way there.
    history: _History
    #: What its lane may do next.
    next: tuple[ev.Event, ...] = ()
    #: Its tasks that have begun.
    begun: frozenset[Task] = frozenset()
    is_stopped: bool = False
    is_finished: bool = False
    #: It will claim nothing more.
    is_quiet: bool = False
    #: By virtual stage and microbatch, which copy runs it, as it has heard.
    takers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    #: By event, what follows; None: it is refused.
    moves: dict[ev.Event, _Move | None] = field(default_factory=dict)


class _AnyReady(Hint):
    """Asked only of a core that was aborted, which must not ask it."""

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        return next(iter(ready))


#: The numbers of the ranks' states, then those of the lines in order.
_State = tuple[int, ...]


class ClaimSearch:
    """Explores one case, to its end with `run`; ``most`` states at most. ``aborts``, ``reduce``: see the module."""

    def __init__(
        self, case: ClaimCase, most: int = 1_000_000, *, aborts: bool = False, reduce: bool | None = None
    ) -> None:
        self._case = case
        self._most = most
        self._aborts = aborts
        # A failure may come between any two events, also between those whose order makes no difference else.
        self._reduces = not aborts if reduce is None else reduce
        assert not (aborts and self._reduces), "a search with failures visits every state"
        self._ranks = ranks_of(case.stages, case.copies)
        self._graph = TaskGraph.chain(case.stages, chunks=case.chunks, layout=case.layout, split=case.split)
        self._sizes = case.sizes or (0,) * len(case.homes)
        self._step = StepId(0, Mode.TRAIN, len(case.homes))
        self._found = ClaimsExplored()
        self._locals: list[_Local] = []
        self._lines: list[_Line] = []
        #: The numbers of both, by what tells them apart.
        self._local_numbers: dict[tuple[object, ...], int] = {}
        self._line_numbers: dict[_Line, int] = {}
        #: Of ranks that have stopped, the states and what was on its way to them.
        self._stops: set[tuple[int, tuple[ev.Event, ...]]] = set()

    def run(self) -> ClaimsExplored:
        state: _State = tuple(self._local(rank, ()) for rank in self._ranks)
        for rank in self._ranks:
            paces = self._case.paces[rank.stage] if self._case.paces else ()
            case = self._case
            pool = ev.Pool(rank.replica, case.copies, case.homes, case.depth, paces, case.is_even)
            sizes = tuple(map(float, self._case.sizes)) or None
            move = self._move(state, rank, ev.StepOpened(0, Mode.TRAIN, len(self._case.homes), sizes, pool=pool))
            if move is None:
                return self._found
            state = self._after(state, rank, move)
        seen, queue = {state}, deque([state])
        while queue and len(seen) < self._most:
            for following in self._following(queue.popleft()):
                if following not in seen:
                    seen.add(following)
                    queue.append(following)
        assert not queue, f"{self._case} has more than {self._most} states"
        self._found.states = len(seen)
        return self._found

    def _following(self, state: _State) -> Iterator[_State]:
        here = [self._locals[number] for number in state[: len(self._ranks)]]
        self._check(here)
        possible: list[tuple[Rank, ev.Event, int | None]] = [
            (line.channel.receiver, line.messages[0], number)
            for number, line in ((number, self._lines[number]) for number in state[len(here) :])
        ]
        possible += [(local.rank, event, None) for local in here for event in local.next]
        moves: list[tuple[Rank, _Move, int | None]] = []
        for rank, event, line in possible:
            if (move := self._move(state, rank, event)) is not None:
                moves.append((rank, move, line))
                if self._reduces and self._is_safe(here[rank], event, move):
                    moves = moves[-1:]
                    break
        for rank, move, line in moves:
            yield self._after(state, rank, move, line)
        living = [local for local in here if not local.is_stopped]
        if not possible and len(living) == len(here):
            self._end(here)
        if self._aborts:
            self._found.ends += not living
            yield from (self._stopped(state, local) for local in living)

    def _is_safe(self, local: _Local, event: ev.Event, move: _Move) -> bool:
        match event:
            case ev.Claimed():
                return not move.sent
            case ev.Offered():
                return False
            case ev.Enqueued(task) | ev.Completed(task) if (
                task.kind is F and task.virtual_stage < self._case.stages - 1
            ):
                return False
        return local.is_quiet and self._case.chunks == 1 and self._case.most_bytes is None

    # States.

    def _move(self, state: _State, rank: Rank, event: ev.Event) -> _Move | None:
        """What ``event`` does to ``rank``; None if it is refused."""
        local = self._locals[state[rank]]
        if event not in local.moves:
            try:
                local.moves[event] = self._made(local, event)
            except RrfpError as error:
                self._note(f"{rank.name} refuses {event}: {error}")
                local.moves[event] = None
        return local.moves[event]

    def _made(self, local: _Local, event: ev.Event) -> _Move:
        """``event`` happens, with all that the rank can do at once."""
        core, history, sent = self._core(local), [*local.history], list[_Sent]()
        due = deque([event])
        while due:
            event = due.popleft()
            history.append(event)
            for instruction in core.apply(event):
                due += self._perform(local.rank, instruction, sent)
        return _Move(self._local(local.rank, tuple(history)), tuple(sent))

    def _after(self, state: _State, rank: Rank, move: _Move, arrived: int | None = None) -> _State:
        """``move`` happened on ``rank``, as the first message of the line ``arrived`` came, if one did."""
        numbers = [*state[: len(self._ranks)]]
        numbers[rank] = move.following
        lines = {self._lines[number].channel: number for number in state[len(numbers) :] if number != arrived}
        if arrived is not None and len((line := self._lines[arrived]).messages) > 1:
            lines[line.channel] = self._line(_Line(line.channel, line.messages[1:]))
        for channel, event in move.sent:
            if not self._locals[numbers[channel.receiver]].is_stopped:
                before = () if (number := lines.get(channel)) is None else self._lines[number].messages
                lines[channel] = self._line(_Line(channel, (*before, event)))
        return (*numbers, *sorted(lines.values()))

    def _stopped(self, state: _State, local: _Local) -> _State:
        """The rank has failed, or has heard that another one did."""
        key = (local.rank, local.begun, "stopped")
        if key not in self._local_numbers:
            self._local_numbers[key] = len(self._locals)
            self._locals.append(_Local(local.rank, (), begun=local.begun, is_stopped=True))
        numbers, lines = state[: len(self._ranks)], state[len(self._ranks) :]
        coming = [line for line in lines if self._lines[line].channel.receiver == local.rank]
        stop = numbers[local.rank], tuple(event for line in coming for event in self._lines[line].messages)
        if stop not in self._stops:
            self._stops.add(stop)
            self._check_stopped(local, stop[1])
        stopped = self._local_numbers[key]
        return (
            *(stopped if rank == local.rank else number for rank, number in zip(self._ranks, numbers, strict=True)),
            *(line for line in lines if line not in coming),
        )

    def _local(self, rank: Rank, history: _History) -> int:
        """The number of the state of ``rank`` after ``history``."""
        core = self._core(_Local(rank, history))
        sharing = None if core.step is None else core.step.sharing
        # The order of events on a rank shows in what it has claimed and granted alone.
        key = (rank,) if sharing is None else (rank, frozenset(history), *sharing.state, core.in_flight)
        if key not in self._local_numbers:
            self._local_numbers[key] = len(self._locals)
            self._locals.append(self._described(_Local(rank, history), core))
        return self._local_numbers[key]

    def _line(self, line: _Line) -> int:
        number = self._line_numbers.setdefault(line, len(self._lines))
        if number == len(self._lines):
            self._lines.append(line)
        return number

    def _perform(self, rank: Rank, instruction: ev.Instruction, sent: list[_Sent]) -> Iterable[ev.Event]:
        """Put messages on their way; what happens on the rank itself at once."""

        def tell(receivers: Iterable[Rank], event: ev.Event, output: Task | None = None) -> None:
            sent.extend(_Sent(_Channel(rank, receiver, output), event) for receiver in receivers)

        own = rank.replica
        match instruction:
            case ev.Send(task, peer, _, copy):
                tell([self._at(peer, own if copy is None else copy)], ev.Arrived(self._step, task), task)
                return (ev.SendReleased(task, peer),)
            case ev.Offer(task):
                tell(self._copies(task.virtual_stage), ev.Offered(self._step, task, own))
            case ev.Claim(task, copy):
                holder = self._graph.stage_of[max(0, task.virtual_stage - 1)]
                tell([self._at(holder, copy)], ev.Claimed(self._step, task, own))
            case ev.Grant(task, copy):
                others = (each for each in self._copies(task.virtual_stage) if each.replica != copy and each != rank)
                tell(others, ev.Granted(self._step, task, copy))
            case ev.Give(task, copy) if not task.virtual_stage:
                tell([self._at(rank.stage, copy)], ev.Granted(self._step, task, copy), task)
            case ev.ReduceChunk(virtual_stage):
                return (ev.ChunkReduced(virtual_stage),)
        return ()

    def _at(self, stage: int, copy: int) -> Rank:
        return self._ranks[stage * self._case.copies + copy]

    def _copies(self, virtual_stage: int) -> Sequence[Rank]:
        first = self._graph.stage_of[virtual_stage] * self._case.copies
        return self._ranks[first : first + self._case.copies]

    def _core(self, local: _Local) -> StageCore:
        core = StageCore(self._graph, local.rank.stage, _AnyReady(), Limit(self._case.limit, self._case.most_bytes))
        for event in local.history:
            core.apply(event)
        return core

    # What must be true.

    def _described(self, local: _Local, core: StageCore) -> _Local:
        """``local`` with what its core says; memory must be within the limit."""
        step = core.step
        if step is None:
            return local
        assert step.sharing is not None
        sharing, case = step.sharing, self._case
        ends = (ev.Completed(task, self._sizes[task.microbatch]) for task in core.in_flight[:1])
        local.next = tuple(ends) or tuple(map(ev.Enqueued, core.ready))
        every = self._graph.tasks(local.rank.stage, len(case.homes), Mode.TRAIN)
        local.begun = frozenset(
            task
            for task in every
            if sharing.of(task.virtual_stage).is_own(task.microbatch) and step.readiness.is_available(task)
        )
        local.is_finished, local.is_quiet = step.finished, True
        local.takers = {v: tuple(claims.takers) for v, claims in sharing.claims.items()}
        claimed = 0
        for v, claims in sharing.claims.items():
            for m, taker in enumerate(claims.takers):
                is_asked = claims.is_asked(m)
                claimed += is_asked or (claims.is_own(m) and Task(F, m, v) not in local.begun)
                local.is_quiet &= claims.holders[m] >= 0 and (is_asked or taker >= 0)
        # With several chunks a claim may have to wait for a slot.
        used = step.admission.held + (claimed if case.chunks == 1 else 0)
        self._found.peak_held = max(self._found.peak_held, used)
        if used > case.limit * case.chunks:
            self._note(f"{local.rank.name} holds and claims {used}, the limit is {case.limit}")
        if claimed > case.depth * case.chunks:
            self._note(f"{local.rank.name} has claimed {claimed}, the most allowed is {case.depth} of a chunk")
        held = core.holding.num_bytes
        self._found.peak_bytes = max(self._found.peak_bytes, held)
        if case.most_bytes is not None and held > max(case.most_bytes, *self._sizes):
            self._note(f"{local.rank.name} holds {held} bytes, the limit is {case.most_bytes}")
        return local

    def _check(self, here: Sequence[_Local]) -> None:
        for first in range(0, len(here), self._case.copies):
            begun = [local.begun for local in here[first : first + self._case.copies]]
            if sum(map(len, begun)) > len(frozenset[Task]().union(*begun)):
                twice = sorted(task for task in begun[0].union(*begun) if sum(task in each for each in begun) > 1)
                self._note(f"{' '.join(map(str, twice))} ran twice")

    def _check_stopped(self, local: _Local, coming: Iterable[ev.Event]) -> None:
        """A core that hears of a failure gives nothing more to do, whatever comes."""
        core = self._core(local)
        for event in (ev.Aborted(Origin(0, None, "a rank failed")), *local.next[: len(core.in_flight)], *coming):
            try:
                instructions = core.apply(event)
            except RrfpError as error:
                self._note(f"{local.rank.name} refuses {event} after it was aborted: {error}")
                return
            if instructions:
                self._note(f"{local.rank.name} gives {instructions[0]} after it was aborted")
        if core.step is not None and core.decide() is not None:
            self._note(f"{local.rank.name} wants to run {core.decide()} after it was aborted")

    def _end(self, here: Sequence[_Local]) -> None:
        self._found.ends += not self._aborts
        takers: dict[int, tuple[int, ...]] = {}
        for local in here:
            if not local.is_finished:
                self._note(f"nothing can happen any longer, and {local.rank.name} has not ended the step")
            for v, told in local.takers.items():
                if takers.setdefault(v, told) != told:
                    self._note(f"{local.rank.name} has heard of other copies than its counterparts: {told}")
        self._found.takers.add(tuple(takers.values()))

    def _note(self, what: str) -> None:
        if what not in self._found.wrong:
            self._found.wrong.append(what)
