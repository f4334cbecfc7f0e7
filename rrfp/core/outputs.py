"""Who still uses which output of one stage in one step: readers here, sends on their way, consumers elsewhere.

An output produced here is used by each task of another chunk here that reads it, until that completes, and by each
peer that it goes to, until the send's memory is free. A received output is used by its readers here. In a forward-only
step the consumers of a forward also keep its slot taken.
"""

from __future__ import annotations

from rrfp.core.task_state import RefCounts, TaskState, TaskStates
from rrfp.core.tasks import F, Mode, Task
from rrfp.errors import ProtocolError


class Outputs:
    """See the module's docstring. Owned by `rrfp.core.step.Step`."""

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
        """An output of another stage is here."""
        refs = source.refs
        refs.left[microbatch] = refs.unread[microbatch] = source.wiring(microbatch).num_readers
        self.received += 1
        if self.received > self.peak_received:
            self.peak_received = self.received
        if num_bytes:
            self._bytes_of[refs, microbatch] = num_bytes
            self.received_bytes += num_bytes
            self.peak_received_bytes = max(self.peak_received_bytes, self.received_bytes)

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

    def end_use(self, refs: RefCounts, microbatch: int) -> bool:
        """A task that read an output completed, or a send released it; returns whether that use was the last."""
        left = refs.left[microbatch] - 1
        refs.left[microbatch] = left
        return left == 0

    def produce(self, state: TaskState, task: Task) -> None:
        """``task`` completed: its output is on its way to every peer."""
        m = task.microbatch
        wiring = state.wiring(m)
        peers, num_readers = wiring.peers, wiring.num_readers
        count = num_readers + len(peers)
        state.refs.left[m] = count
        if count and self._is_forward_only:
            self._consumers[task] = [self._stage] * num_readers + [*peers]
        for peer in peers:
            state.sending[peer].add(m)
            self._num_sending += 1

    def release_send(self, task: Task, peer: int) -> bool:
        """The send of ``task``'s output to ``peer`` has released its memory; returns whether that was its last use."""
        state, m = self._states.own[task.kind].get(task.virtual_stage), task.microbatch
        if state is None or m not in state.sending.get(peer, ()):
            raise ProtocolError(f"the send of {task} to stage {peer} was released, which is not on its way")
        state.sending[peer].remove(m)
        self._num_sending -= 1
        return self.end_use(state.refs, m)

    def consume(self, task: Task, peer: int) -> bool:
        """Forward only: ``peer`` (or this stage) is done with ``task``'s output; returns whether it was the last."""
        waiting = self._consumers.get(task, [])
        if peer not in waiting:
            raise ProtocolError(f"stage {peer} reports {task} as consumed, which it was not waiting for")
        waiting.remove(peer)
        if not waiting:
            del self._consumers[task]
        return not waiting

    def is_awaited(self, task: Task) -> bool:
        """Forward only: whether a stage is still to consume ``task``'s output."""
        return task in self._consumers
