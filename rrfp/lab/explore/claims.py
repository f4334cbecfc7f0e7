"""Every interleaving of a small step whose replicas share forwards by claims, with the real cores.

A state is what each rank has heard and what is on its way. A transition lets one thing happen: a message arrives, the
lane of a rank takes any task that its core holds ready, or ends the one it has. Control messages between two ranks stay
in order; outputs overtake them and each other. So each hint, each duration and each delay is a path here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rrfp.core import events as ev
from rrfp.core.stage_core import StageCore
from rrfp.errors import RrfpError
from rrfp.lab.cluster.ranks import Rank, ranks_of
from rrfp.lab.unused_hint import UnusedHint
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Layout
from rrfp.model.tasks import Mode, StepId, Task

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
        paces: by copy, seconds of a microbatch, on each stage; empty: not known.
        chunks: of a stage.
        layout: ``"looped"`` or ``"v"``.
        most_bytes: the limit on bytes; None: unlimited.
        sizes: bytes that each microbatch holds on each chunk, which its caller tells; empty: none.
    """

    stages: int
    copies: int
    homes: tuple[int, ...]
    limit: int = 1
    depth: int = 1
    split: bool = False
    paces: tuple[float, ...] = ()
    chunks: int = 1
    layout: Layout = "looped"
    most_bytes: int | None = None
    sizes: tuple[int, ...] = ()


@dataclass(slots=True)
class ClaimsExplored:
    """What was found.

    Attributes:
        states: states reached.
        ends: those in which the step has ended on all ranks.
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

    sender: int
    receiver: int
    output: Task | None


class _State(NamedTuple):
    histories: tuple[_History, ...]
    #: Messages on their way; none empty.
    channels: Mapping[_Channel, tuple[ev.Event, ...]]


class ClaimSearch:
    """Explores one case, to its end with `run`; ``most`` states at most."""

    def __init__(self, case: ClaimCase, most: int = 1_000_000) -> None:
        self._case = case
        self._most = most
        self._ranks = ranks_of(case.stages, case.copies)
        self._graph = TaskGraph.chain(case.stages, chunks=case.chunks, layout=case.layout, split=case.split)
        self._sizes = case.sizes or (0,) * len(case.homes)
        self._step = StepId(0, Mode.TRAIN, len(case.homes))
        self._found = ClaimsExplored()

    def run(self) -> ClaimsExplored:
        """Visit every state."""
        state = _State(((),) * len(self._ranks), {})
        for rank in self._ranks:
            pool = ev.Pool(rank.replica, self._case.copies, self._case.homes, self._case.depth, self._case.paces)
            sizes = tuple(map(float, self._case.sizes)) or None
            opened = ev.StepOpened(0, Mode.TRAIN, len(self._case.homes), sizes, pool=pool)
            state = self._after(state, rank, opened)
        seen, queue = {self._key(state)}, deque([state])
        while queue and len(seen) < self._most:
            state = queue.popleft()
            for following in self._following(state):
                if (key := self._key(following)) not in seen:
                    seen.add(key)
                    queue.append(following)
        assert not queue, f"{self._case} has more than {self._most} states"
        self._found.states = len(seen)
        return self._found

    def _following(self, state: _State) -> Iterator[_State]:
        cores = [self._core(rank, state.histories[rank]) for rank in self._ranks]
        self._check(cores)
        is_end = True
        for channel, messages in state.channels.items():
            is_end = False
            rest = {key: each for key, each in state.channels.items() if key != channel}
            if len(messages) > 1:
                rest[channel] = messages[1:]
            yield from self._try(state._replace(channels=rest), self._ranks[channel.receiver], messages[0])
        for rank, core in zip(self._ranks, cores, strict=True):
            if core.in_flight:
                is_end = False
                task = core.in_flight[0]
                yield from self._try(state, rank, ev.Completed(task, self._sizes[task.microbatch]))
                continue
            for task in core.ready:
                is_end = False
                yield from self._try(state, rank, ev.Enqueued(task))
        if is_end:
            self._end(cores)

    def _try(self, state: _State, rank: Rank, event: ev.Event) -> Iterator[_State]:
        try:
            yield self._after(state, rank, event)
        except RrfpError as error:
            self._note(f"{rank.name} refuses {event}: {error}")

    def _after(self, state: _State, rank: Rank, event: ev.Event) -> _State:
        """The state once ``event`` has happened on ``rank``, with all that it can do at once."""
        history, channels = [*state.histories[rank]], dict(state.channels)
        core = self._core(rank, tuple(history))
        due = deque([event])
        while due:
            event = due.popleft()
            history.append(event)
            for instruction in core.apply(event):
                due += self._perform(rank, instruction, channels)
        histories = (*state.histories[:rank], tuple(history), *state.histories[rank + 1 :])
        return _State(histories, channels)

    def _perform(
        self, rank: Rank, instruction: ev.Instruction, channels: dict[_Channel, tuple[ev.Event, ...]]
    ) -> Iterable[ev.Event]:
        """Put messages on their way; what happens on the rank itself at once."""

        def tell(receivers: Iterable[Rank], event: ev.Event, output: Task | None = None) -> None:
            for receiver in receivers:
                channel = _Channel(rank, receiver, output)
                channels[channel] = (*channels.get(channel, ()), event)

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

    def _core(self, rank: Rank, history: _History) -> StageCore:
        core = StageCore(self._graph, rank.stage, UnusedHint(), Limit(self._case.limit, self._case.most_bytes))
        for event in history:
            core.apply(event)
        return core

    def _key(self, state: _State) -> tuple[object, ...]:
        """What tells states apart: the order of events on a rank shows in what it has claimed and granted alone."""
        channels = frozenset(state.channels.items())
        return (*(self._summary(rank, state.histories[rank]) for rank in self._ranks), channels)

    def _summary(self, rank: Rank, history: _History) -> tuple[object, ...]:
        core = self._core(rank, history)
        assert core.step is not None or not history
        sharing = None if core.step is None else core.step.sharing
        if sharing is None:
            return ()
        return (frozenset(history), *sharing.state, core.in_flight)

    # What must be true.

    def _check(self, cores: Sequence[StageCore]) -> None:
        ran: dict[Task, int] = {}
        for rank, core in zip(self._ranks, cores, strict=True):
            step = core.step
            assert step is not None
            assert step.sharing is not None
            used, unbegun = step.admission.held, len(step.sharing.unbegun)
            if self._case.chunks == 1:  # else a claim may have to wait for a slot
                used += unbegun
            self._found.peak_held = max(self._found.peak_held, used)
            if used > self._case.limit * self._case.chunks:
                self._note(f"{rank.name} holds and claims {used}, the limit is {self._case.limit}")
            if unbegun > self._case.depth * self._case.chunks:
                self._note(f"{rank.name} has claimed {unbegun}")
            self._check_bytes(rank, core)
            for task in self._graph.tasks(rank.stage, len(self._case.homes), Mode.TRAIN):
                is_own = step.sharing.of(task.virtual_stage).is_own(task.microbatch)
                if is_own and step.readiness.is_available(task) and ran.setdefault(task, rank) != rank:
                    self._note(f"{task} ran twice")

    def _check_bytes(self, rank: Rank, core: StageCore) -> None:
        """They fit, or are those of one microbatch that is larger by itself."""
        held, most = core.holding.num_bytes, self._case.most_bytes
        self._found.peak_bytes = max(self._found.peak_bytes, held)
        if most is not None and held > max(most, *self._sizes):
            self._note(f"{rank.name} holds {held} bytes, the limit is {most}")

    def _end(self, cores: Sequence[StageCore]) -> None:
        self._found.ends += 1
        takers: dict[tuple[int, int], tuple[int, ...]] = {}
        for rank, core in zip(self._ranks, cores, strict=True):
            step = core.step
            assert step is not None
            assert step.sharing is not None
            if not step.finished:
                self._note(f"nothing can happen any longer, and {rank.name} has not ended the step")
            for virtual_stage, claims in step.sharing.claims.items():
                told = tuple(claims.takers)
                if takers.setdefault((rank.stage, virtual_stage), told) != told:
                    self._note(f"{rank.name} has heard of other copies than its counterparts: {told}")
        self._found.takers.add(tuple(takers.values()))

    def _note(self, what: str) -> None:
        if what not in self._found.wrong:
            self._found.wrong.append(what)
