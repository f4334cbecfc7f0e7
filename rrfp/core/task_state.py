"""The state of all tasks of one stage in one step, laid out by kind and virtual stage.

One `TaskState` holds all microbatches of one kind on one virtual stage. It knows its wiring (which others read its
outputs here, what it reads, which stages its outputs go to) and keeps a few counters for each microbatch. So an event
costs one look-up and some array entries, however many tasks there are. Each field has one writer: `TaskStates`, which
wires it up, `Outputs`, or one of `ReadySet` and `Readiness` (`rrfp.core.ready_set`).

A microbatch that skips virtual stages has a `Wiring` of its own; without skips all microbatches share one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from rrfp.errors import ProtocolError
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import KINDS, F, Kind, Mode, Task
from rrfp.model.visits import Skipped, Visits

#: A small number for each microbatch. Bytes wherever they do: the state of a thousand stages should fit into a cache.
Counters = bytearray | list[int]


def counters(count: int, start: int, *, most: int) -> Counters:
    """``count`` counters at ``start`` that never exceed ``most``."""
    return bytearray([start]) * count if most < 256 else [start] * count


class RefCounts:
    """How often the outputs of one `TaskState`, which have ``most`` uses each, are still used. Written by `Outputs`."""

    __slots__ = ("kind", "left", "stage", "unread", "virtual_stage")

    def __init__(self, kind: Kind, virtual_stage: int, stage: int, microbatches: int, most: int) -> None:
        self.kind = kind
        self.virtual_stage = virtual_stage
        self.stage = stage
        #: By microbatch: uses left; of what was received, readers here that were not enqueued.
        self.left = counters(microbatches, 0, most=most)
        self.unread = counters(microbatches, 0, most=most)


class Wiring:
    """What the tasks of a `TaskState` read, and who uses their outputs.

    Only ``num_readers`` is there for outputs of other stages.
    """

    __slots__ = ("num_inputs", "num_readers", "num_remote", "peers", "sources")

    def __init__(self) -> None:
        #: Tasks here that read an output and are of another virtual stage.
        self.num_readers = 0
        #: All inputs; what is read of other virtual stages, and how much of it runs on other stages. Only the counts:
        #: without cycles a step is freed as soon as it is dropped.
        self.num_inputs = 0
        self.sources: list[RefCounts] = []
        self.num_remote = 0
        #: Stages that an output goes to.
        self.peers: tuple[int, ...] = ()


class TaskState:
    """All microbatches of one kind on one virtual stage: tasks of this stage, or outputs of others that it reads."""

    __slots__ = (
        "_wiring",
        "_wirings",
        "chunk",
        "frees_memory",
        "is_available",
        "is_ordered",
        "kind",
        "missing",
        "missing_remote",
        "queue",
        "readers",
        "refs",
        "sending",
        "skippers",
        "takes_slot",
        "unreported",
        "virtual_stage",
    )

    def __init__(self, kind: Kind, virtual_stage: int, stage: int, microbatches: int, most_refs: int) -> None:
        # Wiring, fixed once it is made.
        self.kind = kind
        self.virtual_stage = virtual_stage
        #: Those of this stage that read its outputs, for any microbatch.
        self.readers: list[TaskState] = []
        self._wiring = Wiring()
        #: By microbatch, where any of them skips a virtual stage.
        self._wirings: list[Wiring] = []
        self.skippers: Collection[int] = ()
        #: The rest of the wiring is of tasks that run on this stage. The local chunk.
        self.chunk = -1
        #: Whether a microbatch takes its slot on the virtual stage with this kind; training: whether it holds nothing
        #: after it.
        self.takes_slot = KINDS[kind].takes_slot
        self.frees_memory = False
        # Written by `Readiness`.
        #: By microbatch: whether the output is at hand, since it arrived or was enqueued here, or nothing awaits it.
        self.is_available = bytearray(microbatches)
        #: Whether its tasks are enqueued in microbatch order.
        self.is_ordered = False
        #: By microbatch: inputs missing; those of them from other stages; on the leader of a group, followers that have
        #: not reported theirs (empty where no follower has to).
        self.missing: Counters = bytearray()
        self.missing_remote: Counters = bytearray()
        self.unreported: Counters = bytearray()
        # Written by `ReadySet`.
        #: Its tasks whose inputs are all there, each behind its position; highest priority first.
        self.queue: list[tuple[int, Task]] = []
        # Written by `Outputs`.
        self.refs = RefCounts(kind, virtual_stage, stage, microbatches, most_refs)
        #: For each peer, the microbatches whose memory the send still reads.
        self.sending: dict[int, set[int]] = {}

    def wiring(self, microbatch: int) -> Wiring:
        return self._wirings[microbatch] if self._wirings else self._wiring

    def wire(self, wirings: Sequence[Wiring]) -> None:
        """Take ``wirings``: one for all microbatches, or one for each."""
        self._wiring = wirings[0]
        self._wirings = [] if len(wirings) == 1 else list(wirings)

    def task(self, microbatch: int) -> Task:
        return Task(self.kind, microbatch, self.virtual_stage)


class TaskStates:
    """Every `TaskState` of one stage in one step, wired up."""

    def __init__(self, graph: TaskGraph, stage: int, visits: Visits, mode: Mode) -> None:
        self._graph = graph
        self._stage = stage
        self._visits = visits
        self._mode = mode
        #: What runs here, and what runs elsewhere and is read here, by kind and virtual stage.
        self.own: dict[Kind, dict[int, TaskState]] = {kind: {} for kind in Kind}
        self.read: dict[Kind, dict[int, TaskState]] = {kind: {} for kind in Kind}
        for chunk, virtual_stage in enumerate(graph.placement.virtual_stages(stage)):
            for kind in graph.kinds(virtual_stage, mode):
                state = self.own[kind][virtual_stage] = self._state(kind, virtual_stage)
                state.chunk = chunk
                state.frees_memory = kind is graph.last_kind(virtual_stage, Mode.TRAIN)
                consumers = graph.consumers(kind, virtual_stage, mode)
                state.sending = {peer: set() for peer in {graph.stage_of[v] for _, v in consumers} - {stage}}
        for state in self:
            for task in graph.inputs(state.task(0)):
                self._source(task).readers.append(state)
        for states in (*self.own.values(), *self.read.values()):
            for state in states.values():
                self._wire(state)

    def __iter__(self) -> Iterator[TaskState]:
        for states in self.own.values():
            yield from states.values()

    def of(self, task: Task) -> TaskState:
        return self.own[task.kind][task.virtual_stage]

    def reads(self, producer: Task) -> bool:
        """Whether ``producer`` runs on another stage and some task here reads its output."""
        kind, microbatch, virtual_stage = producer
        state = self.read[kind].get(virtual_stage)
        if state is None or not 0 <= microbatch < self._visits.microbatches:
            return False
        return state.wiring(microbatch).num_readers > 0

    def knows(self, task: Task) -> bool:
        kind, microbatch, virtual_stage = task
        state = self.own[kind].get(virtual_stage)
        return state is not None and 0 <= microbatch < self._visits.microbatches and microbatch not in state.skippers

    def _source(self, task: Task) -> TaskState:
        kind, _, virtual_stage = task
        source = self.own[kind].get(virtual_stage) or self.read[kind].get(virtual_stage)
        if source is None:
            source = self.read[kind][virtual_stage] = self._state(kind, virtual_stage)
        return source

    def _state(self, kind: Kind, virtual_stage: int) -> TaskState:
        visits, graph = self._visits, self._graph
        most_refs = len(graph.consumers(kind, virtual_stage, self._mode))
        state = TaskState(kind, virtual_stage, graph.stage_of[virtual_stage], visits.microbatches, most_refs)
        state.skippers = visits.skippers(virtual_stage)
        return state

    def _wire(self, state: TaskState) -> None:
        by_pattern = {skipped: self._wiring(state, skipped) for skipped in self._visits.patterns}
        every = range(self._visits.microbatches) if self._visits.are_partial else (0,)
        state.wire([by_pattern[self._visits.skipped_by(microbatch)] for microbatch in every])

    def _wiring(self, state: TaskState, skipped: Skipped) -> Wiring:
        wiring, graph, v = Wiring(), self._graph, state.virtual_stage
        if v in skipped:
            return wiring
        wiring.num_readers = sum(r.virtual_stage != v and r.virtual_stage not in skipped for r in state.readers)
        if state.refs.stage != self._stage:
            return wiring
        consumers = (w for _, w in graph.consumers(state.kind, v, self._mode) if w not in skipped)
        wiring.peers = tuple(sorted({graph.stage_of[w] for w in consumers} - {self._stage}))
        inputs = [task for task in graph.inputs(state.task(0)) if task.virtual_stage not in skipped]
        wiring.num_inputs = len(inputs)
        wiring.sources = [self._source(task).refs for task in inputs if task.virtual_stage != v]
        wiring.num_remote = sum(source.stage != self._stage for source in wiring.sources)
        return wiring


class Outputs:
    """The users of each output of one stage in one step: readers here, sends in flight, consumers elsewhere.

    An output produced here is used by each task of another chunk here that reads it, until that completes, and by each
    peer that it goes to, until the send's memory is free. A received output is used by its readers here. In a
    forward-only step the consumers of a forward also keep its slot taken.
    """

    def __init__(self, states: TaskStates, stage: int, mode: Mode) -> None:
        self._states = states
        self._stage = stage
        self._is_forward_only = mode is Mode.FORWARD
        #: Sends whose memory is still read.
        self._num_sending = 0
        #: Forward only: stages (one entry a use) that are not done with a forward of this stage.
        self._consumers: dict[Task, list[int]] = {}
        #: Received outputs that have a reader here that was not enqueued, and their bytes; the most of both.
        self.received = self.received_bytes = 0
        self.peak_received = self.peak_received_bytes = 0
        self._bytes_of: dict[tuple[RefCounts, int], int] = {}
        #: By peer: its forward outputs that this stage has started to use.
        self.consumed_of: dict[int, int] = {}

    @property
    def is_settled(self) -> bool:
        """Whether no send and no consumer is awaited."""
        return not (self._num_sending or self._consumers)

    def unconsumed(self) -> list[tuple[Task, tuple[int, ...]]]:
        """Forward only: forwards of this stage, each with the peers whose credit is missing."""
        owed = ((task, tuple(peer for peer in uses if peer != self._stage)) for task, uses in self._consumers.items())
        return [(task, peers) for task, peers in owed if peers]

    def receive(self, source: TaskState, microbatch: int, num_bytes: int = 0) -> None:
        refs = source.refs
        refs.left[microbatch] = refs.unread[microbatch] = source.wiring(microbatch).num_readers
        self.received += 1
        if self.received > self.peak_received:
            self.peak_received = self.received
        if num_bytes:
            self._bytes_of[refs, microbatch] = num_bytes
            self.received_bytes += num_bytes
            self.peak_received_bytes = max(self.peak_received_bytes, self.received_bytes)

    def are_here(self, state: TaskState, microbatch: int) -> bool:
        """Whether all that a task reads, which has not run, is here: received, or made by a completed task."""
        return all(source.left[microbatch] for source in state.wiring(microbatch).sources)

    def completed_by(self, source: TaskState, microbatch: int) -> Iterator[Task]:
        """Forwards not yet enqueued whose last input was the output of ``source``."""
        for reader in source.readers:
            if reader.kind is F and not reader.is_available[microbatch] and self.are_here(reader, microbatch):
                yield reader.task(microbatch)

    def fed_by_caller(self) -> Iterator[Task]:
        """Forwards that read no other task."""
        for state in self._states.own[F].values():
            for microbatch, skips in enumerate(state.is_available):
                if not skips and not state.wiring(microbatch).num_inputs:
                    yield state.task(microbatch)

    def start_reading(self, state: TaskState, microbatch: int) -> None:
        """A task was enqueued: what it reads is used from now on."""
        for source in state.wiring(microbatch).sources:
            left = source.unread[microbatch]
            if left:
                source.unread[microbatch] = left - 1
            if left == 1:
                self.received -= 1
                if self._bytes_of:
                    self.received_bytes -= self._bytes_of.pop((source, microbatch), 0)
                if source.kind is F:
                    self.consumed_of[source.stage] = self.consumed_of.get(source.stage, 0) + 1

    def end_use(self, refs: RefCounts, microbatch: int) -> None:
        """A task that read an output completed, or a send released it."""
        refs.left[microbatch] -= 1

    def produce(self, state: TaskState, wiring: Wiring, task: Task) -> None:
        """``task`` completed: its output is on its way to every peer."""
        m = task.microbatch
        peers, num_readers = wiring.peers, wiring.num_readers
        count = num_readers + len(peers)
        state.refs.left[m] = count
        if count and self._is_forward_only:
            self._consumers[task] = [self._stage] * num_readers + [*peers]
        for peer in peers:
            state.sending[peer].add(m)
            self._num_sending += 1

    def release_send(self, task: Task, peer: int) -> None:
        state, m = self._states.own[task.kind].get(task.virtual_stage), task.microbatch
        if state is None or m not in state.sending.get(peer, ()):
            raise ProtocolError(f"the send of {task} to stage {peer} was released, which is not on its way")
        state.sending[peer].remove(m)
        self._num_sending -= 1
        self.end_use(state.refs, m)

    def consume(self, task: Task, peer: int) -> None:
        """Forward only: ``peer`` (or this stage) is done with ``task``'s output."""
        waiting = self._consumers.get(task, [])
        if peer not in waiting:
            raise ProtocolError(f"stage {peer} reports {task} as consumed, which it was not waiting for")
        waiting.remove(peer)
        if not waiting:
            del self._consumers[task]

    def is_awaited(self, task: Task) -> bool:
        """Forward only: whether a stage is still to consume ``task``'s output."""
        return task in self._consumers
