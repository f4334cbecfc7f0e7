"""One step of one stage: takes in the events of that step. Knows nothing of other steps, hints or decisions.

A task of this stage goes through five states, and never back:

    waiting ------------> present -----------> ready ------------> in flight ------------> done
          last input, and        admission           Enqueued               Completed
          last report            lets it start

Only *ready* is not stored: admission changes with every slot, so the ready set asks it anew at each decision, and a
task may be ready now, blocked after the next event, and ready again. The other states are counters and queues, kept by
kind and virtual stage (`rrfp.core.task_state`), so that an event costs the same in a step of any size.

    event          refused unless                      effect                                instructions
    StepOpened     see `rrfp.core.stage_core`                                                ReduceChunk of what no
                                                                                             microbatch visits; Preview
    Arrived        read here, the first time           readers here lack one input fewer     follower: ReportReady;
                                                                                             Preview
    ReadyReported  leader awaits it, the first time    the task lacks one report fewer
    Ordered        follower, the next log entry        readers here lack one input fewer
    Previewed      of a forward here                   its expected bytes change
    Enqueued       ready (follower: next in its log)   F takes a slot, the last kind frees   leader: Order;
                                                       it; readers lack one input fewer      forward: ReportBegun
    Completed      the oldest in flight                bytes are counted; its output gets    Send to each peer; Release
                                                       users, its inputs lose one            and Credit of inputs; after
                                                                                             the last task ReduceChunk;
                                                                                             Preview
    SendReleased   that send is on its way             the output loses a user               after the last Release
    Consumed       forward only, that peer owes it     the last one frees slot and bytes
    HeldReported   leader, ordered, the first time     bytes of a follower are counted
    BegunReported  a forward that is read here         a hint may wait for it
    PauseBegun                                         the stage idles by choice
    PauseEnded                                         the next backward is not waited before
    ChunkReduced   its tasks are done, the first time  its gradients are final

FinishStep follows the event after which all tasks are done, chunks reduced, sends released and outputs consumed.
Preview is of the forwards here whose last input this was, and only under a limit on bytes.

Rules behind the table:

1. Inside the rank a task counts as done once it is *enqueued*, outside once it has *completed*. A lane runs tasks in
   order, so a reader may be enqueued behind its producer while that still runs; otherwise a device would idle between
   any two tasks. Slots pass on at the same moment for the same reason. But a tensor may leave the rank, and its bytes
   are known, only after the task has really ended.
2. On a follower a task counts as done inside as soon as it is *ordered*: whatever comes later in the log runs later.
   Its own limit still blocks a forward until a slot is free, so that D keeps its bound on every rank.
3. An output lives until its last user is done: readers here on other virtual stages, and sends. Its own virtual stage
   is none: what B needs of F there belongs to the program, and counts as held bytes instead of as an output.
4. Nothing arrives twice or out of turn without `ProtocolError`, which aborts the pipeline: a gradient that is summed
   twice would give a wrong model without a word.
5. Instructions come in the order in which they help others: sends before releases, the reduction of a chunk after its
   last send, FinishStep last.
6. A lane that runs ahead may take a forward whose inputs are still being computed here. Under a limit on bytes nothing
   can show its size before it starts, so it counts as one that no other forward is like.

Rejected: to count a task as done inside once it has completed (simpler, but a lane then holds one task at a time); and
an object for each task (a simulated step of 64 stages and 1,024 microbatches has 131,072, and the garbage collector
would walk over all of them).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from rrfp.core import events as ev
from rrfp.core.claims import Sharing
from rrfp.core.group_step import GroupMembership, GroupStep
from rrfp.core.ready_set import DrainOrder, ForcedOrder, Readiness, ReadySet
from rrfp.core.task_state import Outputs, RefCounts, TaskState, TaskStates
from rrfp.core.usage import Holding, Peaks, WaitCause
from rrfp.errors import ProtocolError
from rrfp.memory.held_bytes import Owner
from rrfp.memory.measured import MeanDurations
from rrfp.memory.rules import MemoryRule
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import KINDS, B, F, Kind, Mode, StepId, Task
from rrfp.model.visits import Visits

#: The longest wait, in mean durations of the backward that waits.
LONGEST = 2.0

#: Seconds. The beginning of a shorter forward is not reported: it ends at about the time when another rank hears of it.
SHORTEST_REPORTED_S = 0.001


class Pauses:
    """Bounded idling of one stage in one step: the one wait that a stage may choose before a backward.

    A backward that begins moments before a forward arrives delays that forward by the whole backward, and the stages
    behind run dry. So a hint may prefer to wait (`rrfp.core.hint.Hint.awaits`), within these bounds:

    - only for a forward whose beginning another stage has reported, one that takes a millisecond at least;
    - at most two mean durations of that backward, and not at all if the forward is expected later;
    - once before each backward: when the wait is over, the backward or a forward runs next.

    Durations come in events, and the shell times the wait, so no clock is needed. Reports are advice: one that is
    lost, late or repeated changes when tasks run, never whether they do, since a wait ends by itself.
    """

    __slots__ = ("_begun", "_durations", "_is_spent", "_stage", "_states", "is_on", "is_wanted", "reports_begun")

    def __init__(self, stage: int, states: TaskStates, durations: MeanDurations) -> None:
        self._stage = stage
        self._states = states
        self._durations = durations
        #: Whether the hint may prefer to wait; whether other stages hear of the forwards that begin here.
        self.is_wanted = self.reports_begun = False
        #: The forward of another stage that is running there, with its expected seconds from start to arrival.
        self._begun: tuple[Task, float] | None = None
        #: Whether the one wait before the next backward was begun, or declined.
        self._is_spent = False
        self.is_on = False

    def begun_reported(self, event: ev.BegunReported) -> tuple[()]:
        """A stage runs one task at a time, so forwards reported before have ended.

        Raises:
            ProtocolError: if no forward of this stage reads the reported one.
        """
        kind, m, virtual_stage = task = event.task
        source = self._states.read[kind].get(virtual_stage)
        if kind is not F or source is None or not 0 <= m < len(source.is_available):
            raise ProtocolError(f"{task} was reported as begun to stage {self._stage}, where no forward reads it")
        if not source.is_available[m]:  # else its output was faster
            self._begun = task, event.seconds
        return ()

    def arrive(self, task: Task) -> None:
        if self._begun is not None and self._begun[0] == task:
            self._begun = None

    def begin(self) -> tuple[()]:
        """The stage waits from now on."""
        self._is_spent = self.is_on = True
        return ()

    def end(self) -> tuple[()]:
        """The wait is over, or was declined."""
        self._is_spent, self.is_on = True, False
        return ()

    def enqueue(self, task: Task) -> None:
        """``task`` runs: another backward may be waited before once one has run."""
        self.is_on = False
        if task.kind is B:
            self._is_spent = False

    def before(self, task: Task) -> ev.Idle | None:
        """The wait that is possible before the backward ``task``."""
        if self._begun is None or (self._is_spent and not self.is_on):
            return None
        mean = self._durations.mean(B, self._states.of(task).chunk)
        return None if mean is None else ev.Idle(task, *self._begun, LONGEST * mean)

    def begun_reports(self, task: Task, state: TaskState) -> Iterator[ev.ReportBegun]:
        """Of the forward ``task`` of this stage, which begins."""
        seconds = self._durations.mean(F, state.chunk)
        if seconds is not None and seconds >= SHORTEST_REPORTED_S:
            yield from (ev.ReportBegun(task, peer, seconds) for peer in state.wiring(task.microbatch).peers)


Instructions = tuple[ev.Instruction, ...]


class Step:
    """The state of one step of one stage; the table above lists its events."""

    def __init__(
        self,
        opened: ev.StepOpened,
        visits: Visits,
        graph: TaskGraph,
        stage: int,
        admission: MemoryRule,
        *,
        group: GroupMembership,
        in_order: Collection[ForcedOrder],
        durations: MeanDurations,
    ) -> None:
        mode, count = opened.mode, opened.microbatches
        virtual_stages = graph.placement.virtual_stages(stage)
        self.id = StepId(opened.step, mode, count)
        self.visits = visits
        self.states = TaskStates(graph, stage, visits, mode)
        self.admission = admission
        self._bytes = admission.bytes
        self._previews = admission.byte_limit is not None
        self.sizes, self.size_correlation, self.byte_rooms = opened.sizes, opened.size_correlation, opened.byte_rooms
        #: What all forwards have left, where bytes are limited.
        self.left_bytes = 0
        #: By microbatch, how long its forwards and its other tasks have taken here, to compare with the sizes.
        self.seconds = ([0.0] * count, [0.0] * count)
        drain_order = None
        if admission.drains_in_order:
            drain_order = DrainOrder(virtual_stages, [graph.kinds(v, mode) for v in virtual_stages], visits)
        self.ready = ReadySet(self.states, virtual_stages, admission, visits, drain_order)
        self.readiness = Readiness(
            graph,
            self.states,
            self.ready,
            visits,
            in_order=in_order,
            followers=group.num_followers,
            is_pooled=opened.pool is not None,
        )
        self.outputs = Outputs(self.states, stage, mode)
        self.group = GroupStep(
            group,
            self.id,
            stage,
            states=self.states,
            readiness=self.readiness,
            ready=self.ready,
            admission=admission,
        )
        #: Tasks not complete, by virtual stage.
        self.unfinished = {v: len(graph.kinds(v, mode)) * len(visits.visitors(v)) for v in virtual_stages}
        #: Its forwards; where replicas share them, less those that other copies run.
        self.forwards_here = sum(len(visits.visitors(v)) for v in virtual_stages)
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
        #: By peer: the forward outputs of this stage that it has started to use, as last reported.
        self.consumed_by: dict[int, int] = {}
        self.finished = False
        self.pauses = Pauses(stage, self.states, durations)
        #: Where replicas share forwards.
        self.sharing: Sharing | None = None
        self.pool = opened.pool
        self._graph = graph
        self._stage = stage
        self._is_training = mode is Mode.TRAIN
        self._follows = group.follows
        self._leads = group.num_followers > 0
        self._durations = durations

    @property
    def peaks(self) -> Peaks:
        outputs = self.outputs
        return Peaks(self.admission.peak_held, self._bytes.peak, outputs.peak_received, outputs.peak_received_bytes)

    @property
    def holding(self) -> Holding:
        """What is held now; of a forward that the lane has not come to, nothing is."""
        outputs, held = self.outputs, self.admission.held
        if self.in_flight:
            waiting = sum(KINDS[task.kind].takes_slot for task in self.in_flight[1:])
            held += sum(map(self._gives_back, self.in_flight)) - waiting
        return Holding(held, self._bytes.own, outputs.received, outputs.received_bytes)

    def wait_cause(self) -> WaitCause:
        if self.num_enqueued == self.num_tasks:
            return WaitCause.DRAINED
        if self.pauses.is_on:
            return WaitCause.CHOICE
        if (cause := self.group.wait_cause()) is not None:
            return cause
        return WaitCause.MEMORY if self.ready.holds_any and not self.ready else WaitCause.INPUT

    def begin(self) -> Instructions:
        """What is done at once, where nothing here is visited."""
        unvisited = [v for v, count in self.unfinished.items() if not count] if self._is_training else []
        instructions: list[ev.Instruction] = [*map(ev.ReduceChunk, unvisited)]
        if self._previews:
            instructions += [ev.Preview(task) for task in self.outputs.fed_by_caller() if self._is_given(task)]
        if self.pool is not None:
            self.sharing = Sharing(self.pool, self._graph, self._stage, self.ready.positions, self.sizes)
            for forward, copy in self.sharing.keep_firsts():
                if copy != self.pool.copy:
                    instructions += self._leave(forward)
                elif not forward.virtual_stage:
                    self.readiness.grant(self.states.of(forward), forward.microbatch)
            instructions += self._claimed()
        return self._and_finish(instructions)

    def _on_arrived(self, event: ev.Arrived) -> Instructions:
        kind, m, virtual_stage = event.task
        source = self.states.read[kind].get(virtual_stage)
        if source is None or not 0 <= m < self.id.microbatches or source.is_available[m]:
            raise self._unexpected(event.task)
        if self.sharing is not None:
            self.sharing.arrive(event.task)
        if event.consumed is not None:  # the forward and the backward channel may overtake each other
            peer = source.refs.stage
            before = self.consumed_by.get(peer, 0)
            self.consumed_by[peer] = event.consumed if event.consumed > before else before
        if self.pauses.is_wanted:
            self.pauses.arrive(event.task)
        self.outputs.receive(source, m, event.num_bytes)
        self.readiness.arrive(source, m)
        if self._follows:
            return tuple(map(ev.ReportReady, self.readiness.supplied_by(source, m)))
        return tuple(map(ev.Preview, self.outputs.completed_by(source, m))) if self._previews and kind is F else ()

    def _unexpected(self, producer: Task) -> ProtocolError:
        if self.states.reads(producer):
            return ProtocolError(f"{producer} arrived twice on stage {self._stage} in {self.id}")
        return ProtocolError(f"{producer} arrived, which nothing on stage {self._stage} reads in {self.id}")

    def _on_previewed(self, event: ev.Previewed) -> Instructions:
        task = event.task
        if task.kind is not F or not self.states.knows(task):
            raise ProtocolError(f"{task} was previewed, which is no forward of stage {self._stage} in {self.id}")
        owner = (self.states.of(task).chunk, task.microbatch)
        self.admission.preview(owner, event.input_bytes, event.signature)
        return ()

    def _on_enqueued(self, event: ev.Enqueued) -> Instructions:
        task = event.task
        instructions = self.group.enqueue(task)
        kind, m, virtual_stage = task
        try:
            state = self.states.own[kind][virtual_stage]
            self.ready.remove(state, task)
        except (KeyError, ValueError):  # no task of this stage, or none that is ready
            raise ProtocolError(f"{task} was enqueued on stage {self._stage} without its inputs, or twice") from None
        self.last_kind = kind
        self.num_enqueued += 1
        self.enqueued[kind][state.chunk] += 1
        self.in_flight.append(task)
        limit = self.admission.byte_limit
        if state.takes_slot:
            if limit is not None and not self.outputs.are_here(state, m):
                limit.run_ahead((state.chunk, m), (task, self.id))
            self.admission.acquire(state.chunk, m)
        elif limit is not None:
            limit.start_backward((state.chunk, m), is_last=state.frees_memory)
        if state.frees_memory and self._is_training:
            self.admission.release_slot(m)
        self.outputs.start_reading(state, m)
        if not self._follows:  # or what depends on it was released when it was ordered
            self.readiness.enqueue(state, m)
        if self.pauses.is_wanted:
            self.pauses.enqueue(task)
        if self.pauses.reports_begun and state.takes_slot:
            return (*instructions, *self.pauses.begun_reports(task, state))
        if self.sharing is not None:
            if state.takes_slot:
                self.sharing.begin(task)
            return (*instructions, *self._claimed())
        return instructions

    def _gives_back(self, task: Task) -> bool:
        return self._is_training and self.states.of(task).frees_memory

    def _on_completed(self, event: ev.Completed) -> Instructions:
        task = event.task
        if not self.in_flight or self.in_flight[0] != task:
            due = self.in_flight[0] if self.in_flight else "nothing"
            raise ProtocolError(f"{task} completed on stage {self._stage}, where the lane is at {due}")
        del self.in_flight[0]
        kind, m, virtual_stage = task
        state, outputs = self.states.own[kind][virtual_stage], self.outputs
        wiring = state.wiring(m)
        self._durations.add(kind, state.chunk, event.seconds)
        if self.sizes is not None:
            self.seconds[kind is not F][m] += event.seconds
        outputs.produce(state, wiring, task)
        instructions: list[ev.Instruction]
        if self.sharing is None:
            consumed_of = outputs.consumed_of
            instructions = [ev.Send(task, peer, consumed_of.get(peer, 0)) for peer in wiring.peers]
        else:
            instructions = [self.sharing.send(task, peer) for peer in wiring.peers]
        self._settle_memory(state, task, event.held, event.output)
        if (event.output or self._leads) and (wiring.peers or wiring.num_readers):
            self._bytes.keep_output(task, event.output)
        for source in wiring.sources:
            outputs.end_use(source, m)
            was_last = not source.left[m]
            if was_last:
                instructions.append(self._release(Task(source.kind, m, source.virtual_stage)))
            if not self._is_training:
                instructions += self._stop_using(source, m, was_last)
        self.unfinished[virtual_stage] -= 1
        if self._is_training and not self.unfinished[virtual_stage]:
            instructions.append(ev.ReduceChunk(virtual_stage))
        if self._previews and kind is F:
            instructions += map(ev.Preview, outputs.completed_by(state, m))
        if self.sharing is not None:
            instructions += self._claimed()
        return self._and_finish(instructions)

    def _stop_using(self, source: RefCounts, microbatch: int, was_last: bool) -> Instructions:
        """Forward only: a task here is done with an output; the last user gives its producer a credit."""
        producer = Task(source.kind, microbatch, source.virtual_stage)
        if source.stage == self._stage:
            self._consume(producer, source.stage)
        elif was_last:
            return (ev.Credit(source.stage, producer),)
        return ()

    def _settle_memory(self, state: TaskState, task: Task, held: int, output: int) -> None:
        owner = (state.chunk, task.microbatch)
        if self._previews and state.takes_slot:
            self.left_bytes += held + output
        self.admission.complete(state.kind, owner, held, output, is_last=state.frees_memory and self._is_training)
        if not self._is_training and not self.outputs.is_awaited(task):
            self._free(owner)

    def _on_send_released(self, event: ev.SendReleased) -> Instructions:
        self.outputs.release_send(event.task, event.peer)
        is_used = self.states.of(event.task).refs.left[event.task.microbatch]
        instructions = [] if is_used else [self._release(event.task)]
        if self._previews and self.sharing is not None:  # there is room for more
            instructions += self._claimed()
        return self._and_finish(instructions)

    def _release(self, producer: Task) -> ev.Instruction:
        self._bytes.drop(producer)
        return ev.Release(producer)

    def _on_consumed(self, event: ev.Consumed) -> Instructions:
        self._consume(event.task, event.peer)
        return self._and_finish([])

    def _consume(self, producer: Task, peer: int) -> None:
        """Forward only: ``peer`` is done with ``producer``'s output; the last one frees the slot."""
        self.outputs.consume(producer, peer)
        if not self.outputs.is_awaited(producer):
            self._free((self.states.own[F][producer.virtual_stage].chunk, producer.microbatch))

    def _free(self, owner: Owner) -> None:
        self.admission.release_slot(owner[1])
        self.admission.free(owner)

    # Replicas share forwards.

    def _is_given(self, forward: Task) -> bool:
        """Whether what ``forward`` reads of its caller is here when the step begins."""
        return self.pool is None or self.pool.homes[forward.microbatch] == self.pool.copy

    def _claimed(self) -> Iterator[ev.Instruction]:
        assert self.sharing is not None
        for claim in self.sharing.claims_now(self.admission, is_idle=not self.ready.holds_any):
            if isinstance(claim, ev.Grant):
                self.readiness.grant(self.states.of(claim.task), claim.task.microbatch)
            yield claim

    def _on_offered(self, event: ev.Offered) -> Instructions:
        self._shares(event).offer(event)
        return tuple(self._claimed())

    def _on_claimed(self, event: ev.Claimed) -> Instructions:
        sharing = self._shares(event)
        if not sharing.claim(event):
            return ()
        grant = ev.Grant(event.task, event.copy)
        kind, m, virtual_stage = event.task
        if not virtual_stage:  # this rank is a copy of its stage
            return (grant, ev.Give(event.task, event.copy), *self._run_elsewhere(sharing, event))
        peer = self.states.own[kind][virtual_stage - 1].wiring(m).peers[0]
        return ev.Send(Task(kind, m, virtual_stage - 1), peer, copy=event.copy), grant

    def _on_granted(self, event: ev.Granted) -> Instructions:
        sharing, task = self._shares(event), event.task
        if task.kind is not F or (claims := sharing.claims.get(task.virtual_stage)) is None:
            raise ProtocolError(f"{task} was granted, which is no forward of stage {self._stage} in {self.id}")
        if event.copy != sharing.pool.copy:
            is_home = task.virtual_stage > 0 and sharing.pool.homes[task.microbatch] == sharing.pool.copy
            gives = (ev.Give(task, event.copy),) if is_home else ()
            return (*gives, *self._run_elsewhere(sharing, event))
        claims.receive(task.microbatch)
        self.readiness.grant(self.states.of(task), task.microbatch)
        return (ev.Preview(task),) if self._previews else ()

    def _run_elsewhere(self, sharing: Sharing, event: ev.Claimed | ev.Granted) -> Instructions:
        """Another copy runs the forward of ``event``, and all that is claimed with it."""
        task = event.task
        sharing.claims[task.virtual_stage].grant(task.microbatch, event.copy)
        done = self._leave(task)
        return self._and_finish([*self._claimed(), *done])

    def _leave(self, forward: Task) -> list[ev.Instruction]:
        """Nothing of ``forward``, nor of what is claimed with it, runs here."""
        assert self.sharing is not None
        _, m, first = forward
        done = list[ev.Instruction]()
        for v in self.sharing.claimed_with(first):
            kinds = [state for states in self.states.own.values() if (state := states.get(v)) is not None]
            for state in kinds:
                state.is_available[m] = True
            self.forwards_here -= 1
            self.num_tasks -= len(kinds)
            self.unfinished[v] -= len(kinds)
            if not self.unfinished[v]:
                done.append(ev.ReduceChunk(v))
        return done

    def _shares(self, event: ev.Offered | ev.Claimed | ev.Granted) -> Sharing:
        m = event.task.microbatch
        if self.sharing is None or not 0 <= m < self.id.microbatches:
            raise ProtocolError(f"stage {self._stage} received {event}, and shares no such forward in {self.id}")
        return self.sharing

    def _on_chunk_reduced(self, event: ev.ChunkReduced) -> Instructions:
        virtual_stage = event.virtual_stage
        if virtual_stage not in self.unreduced or self.unfinished[virtual_stage]:
            raise ProtocolError(f"virtual stage {virtual_stage} was reduced on stage {self._stage}: early, or twice")
        self.unreduced.discard(virtual_stage)
        return self._and_finish([])

    def _and_finish(self, instructions: list[ev.Instruction]) -> Instructions:
        if self.num_enqueued == self.num_tasks and not self.finished:
            self.finished = not self.in_flight and not self.unreduced and self.outputs.is_settled
            if self.finished:
                instructions.append(ev.FinishStep(self.id))
        return tuple(instructions)


#: The table of events; see the module's docstring.
HANDLERS: dict[type, Callable[[Step, Any], Instructions]] = {
    ev.Arrived: Step._on_arrived,
    ev.Previewed: Step._on_previewed,
    ev.Enqueued: Step._on_enqueued,
    ev.Completed: Step._on_completed,
    ev.SendReleased: Step._on_send_released,
    ev.Consumed: Step._on_consumed,
    ev.Offered: Step._on_offered,
    ev.Claimed: Step._on_claimed,
    ev.Granted: Step._on_granted,
    ev.BegunReported: lambda step, event: step.pauses.begun_reported(event),
    ev.PauseBegun: lambda step, event: step.pauses.begin(),
    ev.PauseEnded: lambda step, event: step.pauses.end(),
    ev.ReadyReported: lambda step, event: step.group.report(event),
    ev.Ordered: lambda step, event: step.group.order(event),
    ev.HeldReported: lambda step, event: step.group.hold(event),
    ev.ChunkReduced: Step._on_chunk_reduced,
}
