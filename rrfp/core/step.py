"""One step of one stage: takes in the events of that step. Knows nothing of other steps, hints or decisions.

An event that contradicts the state raises `ProtocolError`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from rrfp.core import events as ev
from rrfp.core.admission import Admission
from rrfp.core.durations import MeanDurations
from rrfp.core.graph import Graph
from rrfp.core.order_log import Group, OrderLog
from rrfp.core.outputs import Outputs
from rrfp.core.progress import Peaks, WaitCause
from rrfp.core.readiness import ForcedOrder, Readiness
from rrfp.core.ready_set import ReadySet
from rrfp.core.service import ServiceOrder
from rrfp.core.tasks import Kind, Mode, StepId, Task
from rrfp.errors import ProtocolError

Instructions = tuple[ev.Instruction, ...]


class Step:
    """See the module's docstring.

    Args:
        step_id: which step.
        graph: the dependency graph.
        stage: this stage.
        admission: what the stage holds, and may hold.
        group: this rank's tensor-parallel group.
        in_order: (kind, virtual stage) pairs that run in microbatch order.
        durations: where measured durations are added.
        sizes: of the microbatches, where known.
    """

    def __init__(
        self,
        step_id: StepId,
        graph: Graph,
        stage: int,
        admission: Admission,
        *,
        group: Group,
        in_order: Collection[ForcedOrder],
        durations: MeanDurations,
        sizes: tuple[float, ...] | None = None,
    ) -> None:
        mode, count = step_id.mode, step_id.microbatches
        virtual_stages = graph.placement.virtual_stages(stage)
        self.id = step_id
        self.readiness = Readiness(graph, stage, count, mode, in_order=in_order, followers=group.num_followers)
        self.admission = admission
        self.sizes = sizes
        kinds = [graph.kinds(v, mode) for v in virtual_stages]
        self.ready = ReadySet(virtual_stages, admission, count, ServiceOrder(virtual_stages, kinds, count))
        self.outputs = Outputs(graph, stage, mode)
        self.log = OrderLog()
        #: Tasks not complete, by virtual stage.
        self.unfinished = {v: len(graph.kinds(v, mode)) * count for v in virtual_stages}
        #: Tasks of this stage in the step, and how many were enqueued.
        self.num_tasks = sum(self.unfinished.values())
        self.num_enqueued = 0
        #: Enqueued tasks by kind and local chunk.
        self.enqueued = {kind: [0] * len(virtual_stages) for kind in Kind}
        #: Enqueued and not complete, in lane order.
        self.in_flight: list[Task] = []
        self.last_kind: Kind | None = None
        #: Virtual stages whose gradients are not final.
        self.unreduced = set(virtual_stages) if mode is Mode.TRAIN else set()
        #: By peer: its forward outputs that this stage has started to use, and the same the other way as last reported.
        self.consumed_of: dict[int, int] = {}
        self.consumed_by: dict[int, int] = {}
        self.finished = False
        #: By (peer, kind): the number that its next output must have, where outputs are numbered.
        self._next_sequence: dict[tuple[int, Kind], int] = {}
        self._graph = graph
        self._stage = stage
        self._group = group
        self._durations = durations
        self._chunk_of = {v: chunk for chunk, v in enumerate(virtual_stages)}
        self._stage_of = [graph.placement.stage_of(v) for v in range(graph.placement.num_virtual_stages)]
        self._frees_memory = {v: graph.last_kind(v, Mode.TRAIN) for v in virtual_stages}
        for task in self.readiness.at_start():
            self.ready.add(task)

    def handle(self, event: ev.Event) -> Instructions:
        """Take in an event of this step."""
        return _HANDLERS[type(event)](self, event)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do or to wait for."""
        return (
            self.num_enqueued == self.num_tasks
            and not self.in_flight
            and not self.unreduced
            and self.outputs.is_settled
        )

    @property
    def peaks(self) -> Peaks:
        """The peaks so far."""
        return Peaks(self.admission.peak_held, self.admission.peak_bytes, self.outputs.peak_received)

    def wait_cause(self) -> WaitCause:
        """Why there is nothing to decide."""
        if self.num_enqueued == self.num_tasks:
            return WaitCause.DRAINED
        if self._group.size > 1 and self._lacks_only_order():
            return WaitCause.ORDER
        if not self.ready and next(self.ready.gated(), None) is not None:
            return WaitCause.MEMORY
        return WaitCause.INPUT

    def awaited(self, most: int = 8) -> list[tuple[Task, tuple[Task, ...]]]:
        """Tasks that were not enqueued, each with its absent inputs; at most ``most``, lowest microbatch first."""
        waiting = sorted(self._unstarted(), key=lambda task: (task.microbatch, task.kind is not Kind.F))
        return [(task, self.readiness.absent_inputs(task)) for task in waiting[:most]]

    def _unstarted(self) -> Iterator[Task]:
        """Tasks that were not enqueued (on a follower: that the log does not have)."""
        tasks = self._graph.tasks(self._stage, self.id.microbatches, self.id.mode)
        return (task for task in tasks if task not in self.readiness.present)

    def _lacks_only_order(self) -> bool:
        """Leader: a follower's report is all that some task lacks. Follower: the leader's word is."""
        if self.log.head() is not None:
            return False
        has_all, absent = self.readiness.has_all, self.readiness.absent_inputs
        return any(not absent(task) and has_all(task) is self._group.follows for task in self._unstarted())

    def _on_arrived(self, event: ev.Arrived) -> Instructions:
        producer = event.task
        if not self.readiness.reads(producer) or self._stage_of[producer.virtual_stage] == self._stage:
            raise ProtocolError(f"{producer} arrived, which nothing on stage {self._stage} reads in {self.id}")
        if producer in self.readiness.present:
            raise ProtocolError(f"{producer} arrived twice on stage {self._stage} in {self.id}")
        self._check_sequence(event)
        if event.consumed is not None:  # the forward and the backward channel may overtake each other
            peer = self._stage_of[producer.virtual_stage]
            self.consumed_by[peer] = max(event.consumed, self.consumed_by.get(peer, 0))
        self.outputs.receive(producer)
        ready, supplied = self.readiness.arrive(producer)
        for task in ready:
            self.ready.add(task)
        return tuple(map(ev.ReportReady, supplied)) if self._group.follows else ()

    def _check_sequence(self, event: ev.Arrived) -> None:
        if event.sequence is None:
            return
        channel = (self._stage_of[event.task.virtual_stage], event.task.kind)
        expected = self._next_sequence.get(channel, 0)
        if event.sequence != expected:
            what = "arrived twice or late" if event.sequence < expected else "arrived before another, or that was lost"
            raise ProtocolError(
                f"{event.task} from stage {channel[0]} {what}: it is message {event.sequence} of its channel in "
                f"{self.id}, message {expected} is due on stage {self._stage}"
            )
        self._next_sequence[channel] = expected + 1

    def _on_enqueued(self, event: ev.Enqueued) -> Instructions:
        task = event.task
        if self._group.follows:
            self.log.advance(task)
        if not self.ready.remove(task):
            raise ProtocolError(f"{task} was enqueued on stage {self._stage} without its inputs, or twice")
        chunk = self._chunk_of[task.virtual_stage]
        self.last_kind = task.kind
        self.num_enqueued += 1
        self.enqueued[task.kind][chunk] += 1
        self.in_flight.append(task)
        if task.kind is Kind.F:
            self.admission.take(chunk, task.microbatch)
        for producer in self.outputs.start_reading(task):
            if producer.kind is Kind.F:
                peer = self._stage_of[producer.virtual_stage]
                self.consumed_of[peer] = self.consumed_of.get(peer, 0) + 1
        if self._group.follows:
            return ()  # what depends on it was released when it was ordered
        for ready in self.readiness.enqueue(task):
            self.ready.add(ready)
        return (ev.Order(self.log.append(task), task),) if self._group.size > 1 else ()

    def _on_completed(self, event: ev.Completed) -> Instructions:
        task = event.task
        if not self.in_flight or self.in_flight[0] != task:
            due = self.in_flight[0] if self.in_flight else "nothing"
            raise ProtocolError(f"{task} completed on stage {self._stage}, where the lane is at {due}")
        del self.in_flight[0]
        chunk = self._chunk_of[task.virtual_stage]
        self._durations.add(task.kind, chunk, event.seconds)
        peers = self.outputs.produce(task)
        instructions: list[ev.Instruction] = [ev.Send(task, peer, self.consumed_of.get(peer, 0)) for peer in peers]
        self._settle_memory(task, chunk, event.held)
        instructions += self._stop_reading(task)
        self.unfinished[task.virtual_stage] -= 1
        if self.id.mode is Mode.TRAIN and self.unfinished[task.virtual_stage] == 0:
            instructions.append(ev.ReduceChunk(task.virtual_stage))
        return self._and_finish(instructions)

    def _stop_reading(self, task: Task) -> list[ev.Instruction]:
        """``task`` is done with the outputs of other virtual stages that it read."""
        instructions: list[ev.Instruction] = []
        for producer, was_last in self.outputs.stop_reading(task):
            if was_last:
                instructions.append(ev.Release(producer))
            if self.id.mode is Mode.TRAIN:
                continue
            peer = self._stage_of[producer.virtual_stage]
            if peer == self._stage:
                self._consume(producer, peer)
            elif was_last:
                instructions.append(ev.Credit(peer, producer))
        return instructions

    def _settle_memory(self, task: Task, chunk: int, held: int) -> None:
        if task.kind is Kind.F:
            self.admission.forwarded(chunk)
        if self.id.mode is Mode.TRAIN and task.kind is self._frees_memory[task.virtual_stage]:
            self.admission.free(chunk, task.microbatch)
            return
        self.admission.hold(chunk, task.microbatch, held)
        if self.id.mode is Mode.FORWARD and not self.outputs.is_awaited(task):
            self.admission.free(chunk, task.microbatch)

    def _on_send_released(self, event: ev.SendReleased) -> Instructions:
        was_last = self.outputs.release_send(event.task, event.peer)
        return self._and_finish([ev.Release(event.task)] if was_last else [])

    def _on_consumed(self, event: ev.Consumed) -> Instructions:
        self._consume(event.task, event.peer)
        return self._and_finish([])

    def _consume(self, producer: Task, peer: int) -> None:
        """Forward only: ``peer`` is done with ``producer``'s output; the last to say so frees the slot."""
        if self.outputs.consume(producer, peer):
            self.admission.free(self._chunk_of[producer.virtual_stage], producer.microbatch)

    def _on_ready_reported(self, event: ev.ReadyReported) -> Instructions:
        task = event.task
        is_follower = 0 < event.rank <= self._group.num_followers
        if not is_follower or not self.readiness.expects_reports(task):
            raise ProtocolError(f"rank {event.rank} reports {task} as ready, which stage {self._stage} does not await")
        self.log.note_report(event.rank, task)
        if self.readiness.report(task):
            self.ready.add(task)
        return ()

    def _on_ordered(self, event: ev.Ordered) -> Instructions:
        task = event.task
        if not self._group.follows:
            raise ProtocolError(f"{task} was ordered on stage {self._stage}, where rank {self._group.rank} leads")
        if not self.readiness.knows(task):
            raise ProtocolError(f"{task} was ordered, which does not run on stage {self._stage} in {self.id}")
        self.log.receive(event.sequence, task)
        for ready in self.readiness.enqueue(task):
            self.ready.add(ready)
        return ()

    def _on_chunk_reduced(self, event: ev.ChunkReduced) -> Instructions:
        virtual_stage = event.virtual_stage
        if virtual_stage not in self.unreduced or self.unfinished[virtual_stage]:
            raise ProtocolError(f"virtual stage {virtual_stage} was reduced on stage {self._stage}: early, or twice")
        self.unreduced.discard(virtual_stage)
        return self._and_finish([])

    def _and_finish(self, instructions: list[ev.Instruction]) -> Instructions:
        if self.is_done and not self.finished:
            self.finished = True
            instructions.append(ev.FinishStep(self.id))
        return tuple(instructions)


_HANDLERS: dict[type, Callable[[Step, Any], Instructions]] = {
    ev.Arrived: Step._on_arrived,
    ev.Enqueued: Step._on_enqueued,
    ev.Completed: Step._on_completed,
    ev.SendReleased: Step._on_send_released,
    ev.Consumed: Step._on_consumed,
    ev.ReadyReported: Step._on_ready_reported,
    ev.Ordered: Step._on_ordered,
    ev.ChunkReduced: Step._on_chunk_reduced,
}
