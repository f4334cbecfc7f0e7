"""Who still uses which output of one stage in one step: readers here, sends on their way, consumers elsewhere.

An output produced here is used by each task of another chunk here that reads it, until that completes, and by each
peer that it goes to, until the send's memory is free. A received output is used by its readers here. In a forward-only
step the consumers of a forward moreover keep its slot taken.
"""

from __future__ import annotations

from rrfp.core.graph import Graph
from rrfp.core.tasks import Kind, Mode, Task
from rrfp.errors import ProtocolError


class Outputs:
    """See the module's docstring. Owned by `Step`.

    Args:
        graph: the dependency graph.
        stage: this stage.
        mode: training or forward only.
    """

    def __init__(self, graph: Graph, stage: int, mode: Mode) -> None:
        self._graph = graph
        self._stage = stage
        self._mode = mode
        #: What each (kind, virtual stage) reads of other virtual stages, and who reads it; filled on first use.
        self._sources_of: dict[tuple[Kind, int], list[tuple[Kind, int]]] = {}
        self._readers_of: dict[tuple[Kind, int], tuple[int, list[int]]] = {}
        #: Uses left, by producer.
        self._uses: dict[Task, int] = {}
        #: Sends whose memory is still read.
        self._sends: set[tuple[Task, int]] = set()
        #: Forward only: stages (one entry a use) that are not done with a forward of this stage.
        self._consumers: dict[Task, list[int]] = {}
        #: Readers here that were not enqueued, by received output.
        self._unread: dict[Task, int] = {}
        self.peak_received = 0

    @property
    def is_settled(self) -> bool:
        """Whether no send and no consumer is awaited."""
        return not (self._sends or self._consumers)

    def receive(self, producer: Task) -> None:
        """The output of ``producer``, a task of another stage, is here."""
        here, _ = self._readers(producer)
        self._uses[producer] = self._unread[producer] = here
        self.peak_received = max(self.peak_received, len(self._unread))

    def start_reading(self, task: Task) -> list[Task]:
        """``task`` was enqueued; returns the received outputs that have no reader left to enqueue."""
        started = []
        for producer in self._sources(task):
            if producer in self._unread:
                self._unread[producer] -= 1
                if self._unread[producer] == 0:
                    del self._unread[producer]
                    started.append(producer)
        return started

    def stop_reading(self, task: Task) -> list[tuple[Task, bool]]:
        """``task`` completed; returns what it read of other virtual stages, each with whether that use was the last."""
        return [(producer, self._end_use(producer)) for producer in self._sources(task)]

    def produce(self, task: Task) -> list[int]:
        """``task`` completed; returns the peers that its output goes to."""
        here, peers = self._readers(task)
        if here or peers:
            self._uses[task] = here + len(peers)
            if self._mode is Mode.FORWARD:
                self._consumers[task] = [self._stage] * here + peers
        self._sends.update((task, peer) for peer in peers)
        return peers

    def release_send(self, task: Task, peer: int) -> bool:
        """The send of ``task``'s output to ``peer`` no longer reads its memory; returns whether that was its last use.

        Raises:
            ProtocolError: if no such send is on its way.
        """
        if (task, peer) not in self._sends:
            raise ProtocolError(f"the send of {task} to stage {peer} was released, which is not on its way")
        self._sends.discard((task, peer))
        return self._end_use(task)

    def consume(self, task: Task, peer: int) -> bool:
        """Forward only: ``peer`` (or this stage) is done with ``task``'s output; returns whether it was the last.

        Raises:
            ProtocolError: if that stage was not being waited for.
        """
        waiting = self._consumers.get(task, [])
        if peer not in waiting:
            raise ProtocolError(f"stage {peer} reports {task} as consumed, which it was not waiting for")
        waiting.remove(peer)
        if not waiting:
            del self._consumers[task]
        return not waiting

    def is_awaited(self, task: Task) -> bool:
        """Forward only: whether somebody is still to consume ``task``'s output."""
        return task in self._consumers

    def _sources(self, task: Task) -> list[Task]:
        """The tasks of other virtual stages whose outputs ``task`` reads."""
        kind, m, virtual_stage = task
        sources = self._sources_of.get((kind, virtual_stage))
        if sources is None:
            others = (i for i in self._graph.inputs(task) if i.virtual_stage != virtual_stage)
            sources = self._sources_of[kind, virtual_stage] = [(i.kind, i.virtual_stage) for i in others]
        return [Task(kind, m, v) for kind, v in sources]

    def _readers(self, producer: Task) -> tuple[int, list[int]]:
        """How many tasks of another chunk read ``producer``'s output here, and which other stages do."""
        key = (producer.kind, producer.virtual_stage)
        if key not in self._readers_of:
            consumers = self._graph.consumers(*key, self._mode)
            stages = [self._graph.placement.stage_of(v) for _, v in consumers if v != producer.virtual_stage]
            self._readers_of[key] = stages.count(self._stage), sorted({*stages} - {self._stage})
        return self._readers_of[key]

    def _end_use(self, producer: Task) -> bool:
        left = self._uses[producer] - 1
        if left:
            self._uses[producer] = left
            return False
        del self._uses[producer]
        return True
