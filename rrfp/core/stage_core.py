"""The state machine of one stage: events in, instructions out, and one decision at a time.

Three rules:

1. Only `StageCore.apply` changes state, and it never starts a task. `StageCore.decide` only reads; the shell reports
   its answer back as `Enqueued`.
2. The shell applies everything that has happened before it asks for a decision.
3. Nothing in here knows time, asyncio, torch or a socket, so the simulator, the explorer and the real runtime drive the
   very same object.

An event that contradicts the state (a duplicate, a message two steps ahead, another step size) raises `ProtocolError`:
the shell aborts the pipeline with it rather than compute a wrong gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from rrfp.core import events as ev
from rrfp.core.admission import Admission, Limit
from rrfp.core.graph import Graph
from rrfp.core.hint import Hint
from rrfp.core.order_log import Group
from rrfp.core.outputs import Outputs
from rrfp.core.readiness import Ordered, Readiness
from rrfp.core.ready_set import ReadySet
from rrfp.core.step_state import Peaks, StepState, WaitCause
from rrfp.core.tasks import Kind, Mode, StepId, Task
from rrfp.core.view import MeanDurations, StageView
from rrfp.errors import ConfigError, HintError, ProtocolError

Instructions = tuple[ev.Instruction, ...]
_Early = ev.Arrived | ev.ReadyReported | ev.Ordered
_FromPeer = _Early | ev.Consumed
#: What a peer may send one step ahead. A `Consumed` cannot be: it answers an output of the step that it names.
_EARLY = (ev.Arrived, ev.ReadyReported, ev.Ordered)


class StageCore:
    """One stage of the pipeline, as pure state.

    Args:
        graph: the dependency graph of the whole pipeline.
        stage: this stage.
        hint: ranks ready tasks; one instance a stage. Not asked on a follower.
        limit: how much this stage may hold.
        group: this rank's tensor-parallel group.
        in_order: (kind, virtual stage) pairs that run in microbatch order, those of all stages.
        reserve: keep slots for the lowest microbatch when any order is forced. Only the explorer turns it off.
    """

    def __init__(
        self,
        graph: Graph,
        stage: int,
        hint: Hint,
        limit: Limit | None = None,
        *,
        group: Group | None = None,
        in_order: Collection[Ordered] = (),
        reserve: bool = True,
    ) -> None:
        self.graph = graph
        self.stage = stage
        self.hint = hint
        self.limit = limit if limit is not None else Limit()
        self.group = group if group is not None else Group()
        self._in_order = frozenset(in_order)
        self._reserve = reserve and bool(in_order)
        self._virtual_stages = graph.placement.virtual_stages(stage)
        self._chunk_of = {v: chunk for chunk, v in enumerate(self._virtual_stages)}
        self._stage_of = [graph.placement.stage_of(v) for v in range(graph.placement.num_virtual_stages)]
        self._frees_memory = {v: graph.last_kind(v, Mode.TRAIN) for v in self._virtual_stages}
        self._expected_bytes = [0] * len(self._virtual_stages)
        self._durations = MeanDurations()
        self._observe = hint.observe if type(hint).observe is not Hint.observe else None
        self._early: list[_Early] = []
        self._next_step = 0
        self._step: StepState | None = None
        self._view: StageView | None = None
        self._origin: ev.Aborted | None = None

    def apply(self, event: ev.Event) -> Instructions:
        """Take in what happened.

        Returns:
            What the shell has to do about it, in order.

        Raises:
            ProtocolError: if the event contradicts the state.
        """
        if self._origin is not None:
            return ()
        if isinstance(event, _EARLY) and event.step.number == self._next_step:
            self._early.append(event)
            return ()
        instructions = self._take_in(event)
        if isinstance(event, ev.StepOpened):
            early, self._early = self._early, []
            for message in early:
                instructions += self._take_in(message)
        return instructions

    def _take_in(self, event: ev.Event) -> Instructions:
        instructions = _HANDLERS[type(event)](self, event)
        if self._observe is not None:
            self._observe(event)
        return instructions

    def decide(self) -> ev.Run | None:
        """The task to enqueue next, or None if there is none now.

        Raises:
            HintError: if the hint's answer is not ready, or None without the right to wait.
        """
        step = self._step
        if step is None or self._origin is not None:
            return None
        if self.group.follows:
            head = step.log.head()
            return ev.Run(head) if head is not None and step.readiness.has_all(head) else None
        if not step.ready:
            return None
        assert self._view is not None
        task = self.hint.choose(step.ready, self._view)
        if task is None and self.hint.may_wait:
            return None
        if task is None or task not in step.ready:
            raise HintError(
                f"hint {type(self.hint).__name__} chose {task} on stage {self.stage}; ready are: {step.ready!r}"
            )
        return ev.Run(task)

    # What the shell may ask.

    @property
    def view(self) -> StageView:
        """The read-only view of the current step."""
        assert self._view is not None, "no step was opened"
        return self._view

    @property
    def ready(self) -> ReadySet:
        """The ready set of the current step."""
        assert self._step is not None, "no step was opened"
        return self._step.ready

    @property
    def peaks(self) -> Peaks:
        """The peaks of the current, or last, step."""
        return Peaks() if self._step is None else self._step.peaks()

    @property
    def in_flight(self) -> tuple[Task, ...]:
        """Tasks enqueued and not complete."""
        return () if self._step is None else tuple(self._step.in_flight)

    def wait_cause(self) -> WaitCause:
        """Why there is nothing to decide."""
        step = self._step
        if step is None or step.num_enqueued == step.num_tasks:
            return WaitCause.DRAINED
        if self.group.size > 1 and self._lacks_only_order(step):
            return WaitCause.ORDER
        if not step.ready and next(step.ready.gated(), None) is not None:
            return WaitCause.MEMORY
        return WaitCause.INPUT

    def awaited(self, most: int = 8) -> list[tuple[Task, tuple[Task, ...]]]:
        """Tasks that were not enqueued, each with its absent inputs; at most ``most``, lowest microbatch first."""
        step = self._step
        if step is None:
            return []
        waiting = sorted(self._unstarted(step), key=lambda task: (task.microbatch, task.kind is not Kind.F))
        return [(task, step.readiness.absent_inputs(task)) for task in waiting[:most]]

    def _unstarted(self, step: StepState) -> Iterator[Task]:
        """Tasks that were not enqueued (on a follower: that the log does not have)."""
        tasks = self.graph.tasks(self.stage, step.id.microbatches, step.id.mode)
        return (task for task in tasks if task not in step.readiness.present)

    def _lacks_only_order(self, step: StepState) -> bool:
        """Leader: a follower's report is all that some task lacks. Follower: the leader's word is."""
        if step.log.head() is not None:
            return False
        has_all, absent = step.readiness.has_all, step.readiness.absent_inputs
        return any(not absent(task) and has_all(task) is self.group.follows for task in self._unstarted(step))

    # Events.

    def _on_step_opened(self, event: ev.StepOpened) -> Instructions:
        if self._step is not None and not self._step.finished:
            raise ProtocolError(f"step {event.step} was opened while {self._step.id} is still running")
        if event.step != self._next_step:
            raise ProtocolError(f"step {event.step} was opened, expected step {self._next_step}")
        if event.microbatches < 1:
            raise ConfigError(f"microbatches is {event.microbatches}, must be at least 1")
        step = self._step = self._new_state(StepId(event.step, event.mode, event.microbatches))
        self._next_step += 1
        self._view = StageView(self.graph, self.stage, step, self._durations)
        self.hint.open_step(self._view)
        for task in step.readiness.at_start():
            step.ready.add(task)
        return ()

    def _new_state(self, step_id: StepId) -> StepState:
        chunks = len(self._virtual_stages)
        mode, count = step_id.mode, step_id.microbatches
        unfinished = {v: len(self.graph.kinds(v, mode)) * count for v in self._virtual_stages}
        admission = Admission(self.limit, chunks, reserve=self._reserve, expected_bytes=self._expected_bytes)
        return StepState(
            id=step_id,
            readiness=Readiness(
                self.graph, self.stage, count, mode, in_order=self._in_order, followers=self.group.num_followers
            ),
            admission=admission,
            ready=ReadySet(self._virtual_stages, admission),
            outputs=Outputs(self.graph, self.stage, mode),
            num_tasks=sum(unfinished.values()),
            unfinished=unfinished,
            enqueued={kind: [0] * chunks for kind in Kind},
            unreduced=set(self._virtual_stages) if mode is Mode.TRAIN else set(),
        )

    def _on_arrived(self, event: ev.Arrived) -> Instructions:
        step, producer = self._current(event), event.task
        if not step.readiness.reads(producer) or self._stage_of[producer.virtual_stage] == self.stage:
            raise ProtocolError(f"{producer} arrived, which nothing on stage {self.stage} reads in {step.id}")
        if producer in step.readiness.present:
            raise ProtocolError(f"{producer} arrived twice on stage {self.stage} in {step.id}")
        if event.consumed is not None:  # the forward and the backward channel may overtake each other
            peer = self._stage_of[producer.virtual_stage]
            step.consumed_by[peer] = max(event.consumed, step.consumed_by.get(peer, 0))
        step.outputs.receive(producer)
        ready, supplied = step.readiness.arrive(producer)
        for task in ready:
            step.ready.add(task)
        return tuple(map(ev.ReportReady, supplied)) if self.group.follows else ()

    def _on_enqueued(self, event: ev.Enqueued) -> Instructions:
        step, task = self._running(), event.task
        if self.group.follows:
            step.log.advance(task)
        if not step.ready.remove(task):
            raise ProtocolError(f"{task} was enqueued on stage {self.stage} without its inputs, or twice")
        chunk = self._chunk_of[task.virtual_stage]
        step.last_kind = task.kind
        step.num_enqueued += 1
        step.enqueued[task.kind][chunk] += 1
        step.in_flight.append(task)
        if task.kind is Kind.F:
            step.admission.take(chunk, task.microbatch)
        for producer in step.outputs.start_reading(task):
            if producer.kind is Kind.F:
                peer = self._stage_of[producer.virtual_stage]
                step.consumed_of[peer] = step.consumed_of.get(peer, 0) + 1
        if self.group.follows:
            return ()  # what depends on it was released when it was ordered
        for ready in step.readiness.enqueue(task):
            step.ready.add(ready)
        return (ev.Order(step.log.append(task), task),) if self.group.size > 1 else ()

    def _on_completed(self, event: ev.Completed) -> Instructions:
        step, task = self._running(), event.task
        if not step.in_flight or step.in_flight[0] != task:
            due = step.in_flight[0] if step.in_flight else "nothing"
            raise ProtocolError(f"{task} completed on stage {self.stage}, where the lane is at {due}")
        del step.in_flight[0]
        chunk = self._chunk_of[task.virtual_stage]
        self._durations.add(task.kind, chunk, event.seconds)
        peers = step.outputs.produce(task)
        instructions: list[ev.Instruction] = [ev.Send(task, peer, step.consumed_of.get(peer, 0)) for peer in peers]
        self._settle_memory(step, task, chunk, event.held)
        instructions += self._stop_reading(step, task)
        step.unfinished[task.virtual_stage] -= 1
        if step.id.mode is Mode.TRAIN and step.unfinished[task.virtual_stage] == 0:
            instructions.append(ev.ReduceChunk(task.virtual_stage))
        return self._and_finish(step, instructions)

    def _stop_reading(self, step: StepState, task: Task) -> list[ev.Instruction]:
        """``task`` is done with the outputs of other virtual stages that it read."""
        instructions: list[ev.Instruction] = []
        for producer, was_last in step.outputs.stop_reading(task):
            if was_last:
                instructions.append(ev.Release(producer))
            if step.id.mode is Mode.TRAIN:
                continue
            peer = self._stage_of[producer.virtual_stage]
            if peer == self.stage:
                self._consume(step, producer, peer)
            elif was_last:
                instructions.append(ev.Credit(peer, producer))
        return instructions

    def _settle_memory(self, step: StepState, task: Task, chunk: int, held: int) -> None:
        if task.kind is Kind.F:
            step.admission.forwarded(chunk)
        if step.id.mode is Mode.TRAIN and task.kind is self._frees_memory[task.virtual_stage]:
            step.admission.free(chunk, task.microbatch)
            return
        step.admission.hold(chunk, task.microbatch, held)
        if step.id.mode is Mode.FORWARD and not step.outputs.is_awaited(task):
            step.admission.free(chunk, task.microbatch)

    def _on_send_released(self, event: ev.SendReleased) -> Instructions:
        step = self._running()
        was_last = step.outputs.release_send(event.task, event.peer)
        return self._and_finish(step, [ev.Release(event.task)] if was_last else [])

    def _on_consumed(self, event: ev.Consumed) -> Instructions:
        step = self._current(event)
        self._consume(step, event.task, event.peer)
        return self._and_finish(step, [])

    def _consume(self, step: StepState, producer: Task, peer: int) -> None:
        """Forward only: ``peer`` is done with ``producer``'s output; the last to say so frees the slot."""
        if step.outputs.consume(producer, peer):
            step.admission.free(self._chunk_of[producer.virtual_stage], producer.microbatch)

    def _on_ready_reported(self, event: ev.ReadyReported) -> Instructions:
        step, task = self._current(event), event.task
        is_follower = 0 < event.rank <= self.group.num_followers
        if not is_follower or not step.readiness.expects_reports(task):
            raise ProtocolError(f"rank {event.rank} reports {task} as ready, which stage {self.stage} does not await")
        step.log.note_report(event.rank, task)
        if step.readiness.report(task):
            step.ready.add(task)
        return ()

    def _on_ordered(self, event: ev.Ordered) -> Instructions:
        step, task = self._current(event), event.task
        if not self.group.follows:
            raise ProtocolError(f"{task} was ordered on stage {self.stage}, where rank {self.group.rank} leads")
        if not step.readiness.knows(task):
            raise ProtocolError(f"{task} was ordered, which does not run on stage {self.stage} in {step.id}")
        step.log.receive(event.sequence, task)
        for ready in step.readiness.enqueue(task):
            step.ready.add(ready)
        return ()

    def _on_chunk_reduced(self, event: ev.ChunkReduced) -> Instructions:
        step, virtual_stage = self._running(), event.virtual_stage
        if virtual_stage not in step.unreduced or step.unfinished[virtual_stage]:
            raise ProtocolError(f"virtual stage {virtual_stage} was reduced on stage {self.stage}: early, or twice")
        step.unreduced.discard(virtual_stage)
        return self._and_finish(step, [])

    def _on_aborted(self, event: ev.Aborted) -> Instructions:
        self._origin = event
        return (ev.Abort(event.origin),)

    # Shared.

    def _running(self) -> StepState:
        if self._step is None or self._step.finished:
            raise ProtocolError(f"stage {self.stage} was told of a task outside any step")
        return self._step

    def _current(self, event: _FromPeer) -> StepState:
        """The step that a peer's event belongs to, which must be the running one."""
        step, sent = self._step, event.step
        if step is None or sent.number != step.id.number or step.finished:
            here = "before its first step"
            if step is not None:
                here = f"in step {step.id.number}" + (" (ended)" if step.finished else "")
            raise ProtocolError(f"a message of {sent} reached stage {self.stage} {here}")
        if sent != step.id:
            raise ProtocolError(f"stages disagree on the step: a peer is in {sent}, stage {self.stage} in {step.id}")
        return step

    def _and_finish(self, step: StepState, instructions: list[ev.Instruction]) -> Instructions:
        if step.is_done and not step.finished:
            step.finished = True
            instructions.append(ev.FinishStep(step.id))
        return tuple(instructions)


_HANDLERS: dict[type, Callable[[StageCore, Any], Instructions]] = {
    ev.StepOpened: StageCore._on_step_opened,
    ev.Arrived: StageCore._on_arrived,
    ev.Enqueued: StageCore._on_enqueued,
    ev.Completed: StageCore._on_completed,
    ev.SendReleased: StageCore._on_send_released,
    ev.Consumed: StageCore._on_consumed,
    ev.ReadyReported: StageCore._on_ready_reported,
    ev.Ordered: StageCore._on_ordered,
    ev.ChunkReduced: StageCore._on_chunk_reduced,
    ev.Aborted: StageCore._on_aborted,
}
