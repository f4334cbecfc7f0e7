"""The state of all tasks of one stage in one step, laid out by kind and virtual stage.

One `TaskState` holds all microbatches of one kind on one virtual stage. It knows its wiring (which others read its
outputs here, what it reads, which stages its outputs go to) and keeps a few counters for each microbatch. So an event
costs one look-up and some array entries, however many tasks there are. Each field has one writer: `TaskStates`, which
wires it up, or one of `rrfp.core.readiness`, `rrfp.core.outputs` and `rrfp.core.ready_set`.
"""

from __future__ import annotations

from collections.abc import Iterator

from rrfp.core.graph import Graph
from rrfp.core.tasks import Kind, Mode, Task

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


class TaskState:
    """All microbatches of one kind on one virtual stage: tasks of this stage, or outputs of others that it reads."""

    __slots__ = (
        "chunk",
        "frees_memory",
        "is_available",
        "is_ordered",
        "kind",
        "missing",
        "missing_remote",
        "num_readers",
        "num_remote",
        "peers",
        "queue",
        "readers",
        "refs",
        "sending",
        "sources",
        "unreported",
        "virtual_stage",
    )

    def __init__(self, kind: Kind, virtual_stage: int, stage: int, microbatches: int, most_refs: int) -> None:
        # Wiring, fixed once it is made.
        self.kind = kind
        self.virtual_stage = virtual_stage
        #: Those of this stage that read its outputs; how many of them are of another virtual stage.
        self.readers: list[TaskState] = []
        self.num_readers = 0
        #: The rest of the wiring is of tasks that run on this stage. The local chunk.
        self.chunk = -1
        #: What its tasks read of other virtual stages; how much of it runs on other stages. Only the counts: without
        #: cycles a step is freed as soon as it is dropped.
        self.sources: list[RefCounts] = []
        self.num_remote = 0
        #: Stages that its outputs go to.
        self.peers: tuple[int, ...] = ()
        #: Training: whether a microbatch holds nothing on the virtual stage after this kind.
        self.frees_memory = False
        # Written by `Readiness`.
        #: By microbatch: whether the output is at hand, since it arrived or was enqueued here.
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

    def task(self, microbatch: int) -> Task:
        """The task of ``microbatch``."""
        return Task(self.kind, microbatch, self.virtual_stage)


class TaskStates:
    """Every `TaskState` of one stage in one step, wired up."""

    def __init__(self, graph: Graph, stage: int, microbatches: int, mode: Mode) -> None:
        self._graph = graph
        self._microbatches = microbatches
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
                state.peers = tuple(sorted({graph.stage_of[v] for _, v in consumers} - {stage}))
                state.sending = {peer: set() for peer in state.peers}
        for state in self:
            for task in graph.inputs(state.task(0)):
                self._connect(self._source(task), state)

    def __iter__(self) -> Iterator[TaskState]:
        """What runs here."""
        for states in self.own.values():
            yield from states.values()

    def of(self, task: Task) -> TaskState:
        """The state that has ``task``, which runs on this stage."""
        return self.own[task.kind][task.virtual_stage]

    def reads(self, producer: Task) -> bool:
        """Whether ``producer`` runs on another stage and some task here reads its output."""
        return producer.virtual_stage in self.read[producer.kind] and 0 <= producer.microbatch < self._microbatches

    def knows(self, task: Task) -> bool:
        """Whether ``task`` runs on this stage in this step."""
        return task.virtual_stage in self.own[task.kind] and 0 <= task.microbatch < self._microbatches

    def _source(self, task: Task) -> TaskState:
        kind, _, virtual_stage = task
        source = self.own[kind].get(virtual_stage) or self.read[kind].get(virtual_stage)
        if source is None:
            source = self.read[kind][virtual_stage] = self._state(kind, virtual_stage)
        return source

    def _state(self, kind: Kind, virtual_stage: int) -> TaskState:
        most_refs = len(self._graph.consumers(kind, virtual_stage, self._mode))
        return TaskState(kind, virtual_stage, self._graph.stage_of[virtual_stage], self._microbatches, most_refs)

    def _connect(self, source: TaskState, reader: TaskState) -> None:
        source.readers.append(reader)
        if source.virtual_stage != reader.virtual_stage:
            source.num_readers += 1
            reader.sources.append(source.refs)
            reader.num_remote += source.refs.stage != reader.refs.stage
