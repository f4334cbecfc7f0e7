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

import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

from rrfp.core import events as ev
from rrfp.core.event_history import EventHistory, Known
from rrfp.core.group_step import GroupMembership
from rrfp.core.hint import Hint
from rrfp.core.ready_set import ForcedOrder, ReadySet
from rrfp.core.step import HANDLERS, Instructions, Step
from rrfp.core.usage import Holding, Peaks, WaitCause
from rrfp.errors import ConfigError, HintError, ProtocolError, Sender
from rrfp.memory.admission import RULES, Limit, rule_of
from rrfp.memory.measured import MeanDurations, Measured
from rrfp.memory.rules import MemoryRule, RuleContext
from rrfp.memory.seen_sizes import SeenSizes
from rrfp.memory.size_order import followed
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Placement, TablePlacement
from rrfp.model.tasks import ENDING_KINDS, B, Kind, Mode, Task
from rrfp.model.visits import Visits


class StageView:
    """Implements `rrfp.core.hint.View` over a step."""

    __slots__ = ("_durations", "_graph", "_stage", "_step")

    def __init__(self, graph: TaskGraph, stage: int, step: Step, durations: MeanDurations) -> None:
        self._graph = graph
        self._stage = stage
        self._step = step
        self._durations = durations

    @property
    def stage(self) -> int:
        return self._stage

    @property
    def graph(self) -> TaskGraph:
        return self._graph

    @property
    def placement(self) -> Placement | TablePlacement:
        return self._graph.placement

    @property
    def mode(self) -> Mode:
        return self._step.id.mode

    @property
    def microbatches(self) -> int:
        return self._step.id.microbatches

    @property
    def forwards_here(self) -> int:
        return self._step.forwards_here

    @property
    def sizes(self) -> tuple[float, ...] | None:
        return self._step.sizes

    @property
    def size_correlation(self) -> float | None:
        return self._step.size_correlation

    @property
    def byte_rooms(self) -> tuple[float | None, ...] | None:
        return self._step.byte_rooms

    @property
    def visits(self) -> Visits:
        return self._step.visits

    @property
    def skipped(self) -> tuple[frozenset[int], ...]:
        warnings.warn("view.skipped is now view.visits.skipped", DeprecationWarning, stacklevel=2)
        return self.visits.skipped

    @property
    def slots(self) -> int | None:
        return self._step.admission.slots

    @property
    def full_at(self) -> int | None:
        return self._step.admission.full_at

    @property
    def held(self) -> int:
        return self._step.admission.held

    @property
    def held_bytes(self) -> int:
        return self._step.admission.bytes.own

    @property
    def most_bytes(self) -> int | None:
        return self._step.admission.most_bytes

    @property
    def last_kind(self) -> Kind | None:
        return self._step.last_kind

    @property
    def consumed_downstream(self) -> int | None:
        reported = self._step.consumed_by
        return sum(reported.values()) if reported else None

    def num_enqueued(self, kind: Kind, chunk: int | None = None) -> int:
        counts = self._step.enqueued[kind]
        return sum(counts) if chunk is None else counts[chunk]

    @property
    def num_enqueued_total(self) -> int:
        return self._step.num_enqueued

    def mean_seconds(self, kind: Kind, chunk: int) -> float | None:
        return self._durations.mean(kind, chunk)


#: What a peer may send one step ahead, and no more: ranks exchange reports at the end of a step, so a peer may have
#: opened the next one while this rank's caller has not. A `Consumed` cannot be: it answers an output of its own step.
_Early = ev.Arrived | ev.ReadyReported | ev.Ordered | ev.Offered | ev.Claimed | ev.Granted
_FromPeer = _Early | ev.Consumed


class StageCore:
    """One stage of the pipeline, as pure state.

    The hint of a follower is never called. ``in_order`` has the (kind, virtual stage) pairs of all stages that run in
    microbatch order. ``admission`` is the memory rule in place of the limit's own: only the explorer passes one.
    """

    def __init__(
        self,
        graph: TaskGraph,
        stage: int,
        hint: Hint,
        limit: Limit | None = None,
        *,
        group: GroupMembership | None = None,
        in_order: Collection[ForcedOrder] = (),
        admission: type[MemoryRule] | None = None,
        history: EventHistory | None = None,
    ) -> None:
        self.graph = graph
        self.stage = stage
        self.hint = hint
        self.limit = limit if limit is not None else Limit()
        assert not self.limit.auto, "a core takes K of each step from StepOpened"
        self.group = group if group is not None else GroupMembership()
        self.in_order = frozenset(in_order)
        self._admission = admission
        self.history = history
        #: For a limit on bytes: by mode, since forward only a microbatch holds much less.
        self._seen_sizes = {mode: SeenSizes(graph.placement.chunks_of(stage)) for mode in Mode}
        self._durations = MeanDurations()
        self._follows = self.group.follows
        wants_events = type(hint).observe is not Hint.observe and not self._follows
        self._observe = hint.observe if wants_events else None
        self._early: list[_Early] = []
        self._next_step = 0
        self._step: Step | None = None
        self._view: StageView | None = None
        self._is_aborted = False

    def apply(self, event: ev.Event) -> Instructions:
        """Take in ``event``; returns what the shell has to do about it, in order."""
        if self._is_aborted:
            return ()
        if (history := self.history) is not None:
            if type(event) is ev.StepOpened:
                history.begin(self.known())
            history.note(event)
        if (take_in := _TAKE_IN.get(type(event))) is not None:
            return take_in(self, event)
        step = self._step
        if step is None or step.finished:
            raise ProtocolError(f"stage {self.stage} received an event of a task outside any step")
        instructions = HANDLERS[type(event)](step, event)
        if self._observe is not None:
            self._observe(event)
        return instructions

    def decide(self) -> ev.Run | ev.Idle | None:
        """The task to enqueue next, or the wait before it that the hint prefers, or None if there is no task now."""
        step = self._step
        if step is None or self._is_aborted:
            return None
        if self._follows:
            entry = step.group.next()
            return None if entry is None else ev.Run(entry)
        ready = step.ready
        if not ready:
            return None
        assert self._view is not None
        task = self.hint.choose(ready, self._view)
        if task is not None and task in ready:
            pause = step.pauses.before(task) if step.pauses.is_wanted and task.kind is B else None
            return pause if pause is not None and self.hint.awaits(task, self._view) else ev.Run(task)
        if task is None and self.hint.may_wait:
            return None
        raise HintError(f"hint {type(self.hint).__name__} chose {task} on stage {self.stage}; ready are: {ready!r}")

    # What the shell may ask.

    @property
    def step(self) -> Step | None:
        """The current, or last, step; None before the first. For `rrfp.core.waiting`, which only reads it."""
        return self._step

    @property
    def view(self) -> StageView:
        assert self._view is not None, "no step was opened"
        return self._view

    @property
    def ready(self) -> ReadySet:
        assert self._step is not None, "no step was opened"
        return self._step.ready

    @property
    def holding(self) -> Holding:
        """What is held now; nothing between two steps."""
        return Holding() if self._step is None else self._step.holding

    @property
    def peaks(self) -> Peaks:
        return Peaks() if self._step is None else self._step.peaks

    @property
    def in_flight(self) -> tuple[Task, ...]:
        return () if self._step is None else tuple(self._step.in_flight)

    @property
    def num_in_flight(self) -> int:
        return 0 if self._step is None else len(self._step.in_flight)

    @property
    def is_pausing(self) -> bool:
        return self._step is not None and self._step.pauses.is_on

    @property
    def size_correlation(self) -> float | None:
        """How closely times of the current, or last, step here follow the sizes; None: no sizes, or all are equal."""
        step = self._step
        if step is None or step.sizes is None:
            return None
        if (sharing := step.sharing) is None:
            return followed(step.sizes, *step.seconds)
        ran = sharing.whole()
        return followed(*([each[m] for m in ran] for each in (step.sizes, *step.seconds))) if ran else None

    @property
    def byte_room(self) -> float | None:
        """How many average microbatches of the current, or last, step the limit on bytes has room for; of one chunk."""
        step = self._step
        most = None if step is None else step.admission.most_bytes
        if step is None or most is None or not step.left_bytes or self.graph.placement.chunks_of(self.stage) > 1:
            return None
        ran = step.id.microbatches if step.pool is None else step.forwards_here
        return most * ran / step.left_bytes

    def measured(self) -> tuple[Measured, ...]:
        """What the tasks of this stage have shown, by virtual stage. Between steps only."""
        seen = self._seen_sizes
        return tuple(
            Measured(v, self._durations.of(chunk), seen[Mode.TRAIN].of(chunk), seen[Mode.FORWARD].of(chunk))
            for chunk, v in enumerate(self.graph.placement.virtual_stages(self.stage))
        )

    def restore(self, measured: Iterable[Measured]) -> None:
        """Go on from what an earlier run measured on the virtual stages of this stage. Between steps only."""
        by_stage = {each.virtual_stage: each for each in measured}
        own = [by_stage.get(v, Measured(v)) for v in self.graph.placement.virtual_stages(self.stage)]
        for chunk, each in enumerate(own):
            self._durations.restore(chunk, each.durations)
        self._seen_sizes[Mode.TRAIN].restore([each.training_sizes for each in own])
        self._seen_sizes[Mode.FORWARD].restore([each.evaluation_sizes for each in own])
        if self.history is not None:  # what it has of the steps before leads elsewhere now
            self.history.clear()

    def known(self) -> Known:
        """What this core knows before its next step. Between steps only."""
        has_sizes = self.limit.bytes is not None
        sizes = {str(mode): seen.to_plain() for mode, seen in self._seen_sizes.items()} if has_sizes else None
        return Known(self._next_step, self.measured(), sizes, tuple(self._early))

    def recall(self, known: Known) -> None:
        """Be as a core was that knew this: for a core that has had no event yet."""
        self.restore(known.measured)
        self._next_step, sizes = known.step, known.sizes
        if sizes is not None:
            for mode, seen in self._seen_sizes.items():
                seen.restore_plain(sizes[str(mode)])
        for event in known.early:
            self.apply(event)

    def wait_cause(self) -> WaitCause:
        return WaitCause.DRAINED if self._step is None else self._step.wait_cause()

    # Events.

    def _on_peer(self, event: _FromPeer) -> Instructions:
        step = self._step
        if step is None or step.finished or event.step != step.id:
            if event.step.number == self._next_step and not isinstance(event, ev.Consumed):
                self._early.append(event)
                return ()
            if isinstance(event, ev.Claimed) and event.step.number < self._next_step:
                return ()  # another copy was faster, and this rank has ended the step since
            raise misplaced(event, self.graph, self.stage, step)
        instructions = HANDLERS[type(event)](step, event)
        if self._observe is not None:
            self._observe(event)
        return instructions

    def _on_begun_reported(self, event: ev.BegunReported) -> Instructions:
        step = self._step
        # It travels apart from outputs, so it may come before this rank has opened the step, or after its end.
        if step is None or step.finished or event.step != step.id:
            return ()
        return HANDLERS[ev.BegunReported](step, event)

    def _on_held_reported(self, event: ev.HeldReported) -> Instructions:
        step = self._step
        if step is not None and not step.finished and event.step == step.id:
            return HANDLERS[ev.HeldReported](step, event)
        # No task waits for the last reports of a step, so the leader may have finished it meanwhile.
        ended = self._next_step - (step is not None and not step.finished)
        if event.step.number < ended:
            return ()
        raise misplaced(event, self.graph, self.stage, step)

    def _on_opened(self, event: ev.StepOpened) -> Instructions:
        self._open(event)
        if self._observe is not None:
            self._observe(event)
        assert self._step is not None
        early, self._early = self._early, []
        begun = self._step.begin()
        return (*begun, *(instruction for message in early for instruction in self._on_early(message)))

    def _on_early(self, message: _Early) -> Instructions:
        try:
            return self._on_peer(message)
        except ProtocolError as error:
            error.sender = sender_of(message, self.graph)
            raise

    def _on_aborted(self, event: ev.Aborted) -> Instructions:
        self._is_aborted = True
        if self._observe is not None:
            self._observe(event)
        return ()

    def _open(self, event: ev.StepOpened) -> None:
        if self._step is not None and not self._step.finished:
            raise ProtocolError(f"step {event.step} was opened while {self._step.id} is still running")
        if event.step != self._next_step:
            raise ProtocolError(f"step {event.step} was opened, expected step {self._next_step}")
        if event.microbatches < 1:
            raise ConfigError(f"microbatches is {event.microbatches}, must be at least 1")
        if event.pool is not None:
            self._check_pool(event)
        if event.sizes is not None and len(event.sizes) != event.microbatches:
            raise ConfigError(f"sizes has {len(event.sizes)} entries, must have {event.microbatches}, one a microbatch")
        visits = Visits(event.microbatches) if event.visits is None else event.visits
        if visits.microbatches != event.microbatches:
            raise ConfigError(f"visits are of {visits.microbatches} microbatches, must be of {event.microbatches}")
        context = RuleContext(self.graph, self.stage, visits, event.mode, bool(self.in_order))
        rule = self._admission or rule_of(self.limit.rule, context)
        visitors = [visits.visitors(v) for v in self.graph.placement.virtual_stages(self.stage)]
        limit = self.limit if event.limit is None else replace(self.limit, microbatches=event.limit)
        admission = rule(
            limit.slots(len(visitors)),
            None if self.group.follows else self.limit.bytes,  # a follower's bytes count on its leader
            visitors,
            seen=self._seen_sizes[event.mode].open_step(),
            followers=self.group.num_followers,
            sizes=event.sizes,
        )
        step = Step(
            event,
            visits,
            self.graph,
            self.stage,
            admission,
            group=self.group,
            in_order=self.in_order,
            durations=self._durations,
        )
        view = StageView(self.graph, self.stage, step, self._durations)
        order = None
        if not self.group.follows:
            self.hint.open_step(view)
            order = self._order_microbatches(step, view)
            self._let_weights_first(step)
            self._open_pauses(step, view)
        # Only now: in a step that its hint refused nothing is decided.
        self._step, self._view, self._next_step = step, view, self._next_step + 1
        if self.history is not None:
            self.history.opened(order)

    def _check_pool(self, event: ev.StepOpened) -> None:
        assert event.pool is not None
        is_chain = self.graph.is_chain and max(map(len, self.graph.predecessors)) <= 1
        drains = RULES[self.limit.rule].drains_in_order and self.graph.placement.chunks_of(self.stage) > 1
        if not is_chain or drains or self.in_order or self.group.size > 1:
            raise ConfigError(
                "pool is given, must be None but for chains without skip edges, a forced order, groups, and limits "
                "under the paper's rule for several chunks"
            )
        if event.mode is not Mode.TRAIN or len(event.pool.homes) != event.microbatches:
            raise ConfigError(f"pool is of {len(event.pool.homes)} microbatches, must be of {event.microbatches}")

    def _let_weights_first(self, step: Step) -> None:
        here = self.graph.placement.virtual_stages(self.stage)
        is_split = any(self.graph.last_kind(v, Mode.TRAIN) in ENDING_KINDS for v in here)
        # Else weight tasks may wait for others, or the hint for a backward, and neither would ever run.
        if is_split and self.group.size == 1 and not self.in_order and not self.hint.may_wait:
            step.ready.defer_backwards()

    def _open_pauses(self, step: Step, view: StageView) -> None:
        # In a group a wait would be one of all ranks: it has none.
        # Where replicas share forwards, none knows whose turn it is.
        if step.id.mode is Mode.TRAIN and self.group.size == 1 and step.pool is None:
            step.pauses.reports_begun = self.hint.reports_begun(view)
            step.pauses.is_wanted = type(self.hint).awaits is not Hint.awaits

    def _order_microbatches(self, step: Step, view: StageView) -> tuple[int, ...] | None:
        order = self.hint.microbatch_order(view)
        if step.pool is not None:
            order = step.pool.interleaved(range(step.id.microbatches) if order is None else order)
        # Where an order is forced, a microbatch started early only holds memory until the lower ones are through.
        if order is None or self.in_order:
            return None
        try:
            step.ready.order_by(order)
            return tuple(order)
        except (TypeError, ValueError) as error:
            raise HintError(f"hint {type(self.hint).__name__} orders microbatches wrongly: {error}") from None


#: Events that are not simply the step's.
_TAKE_IN: dict[type, Callable[[StageCore, Any], Instructions]] = {
    ev.StepOpened: StageCore._on_opened,
    ev.Arrived: StageCore._on_peer,
    ev.ReadyReported: StageCore._on_peer,
    ev.Ordered: StageCore._on_peer,
    ev.Consumed: StageCore._on_peer,
    ev.Offered: StageCore._on_peer,
    ev.Claimed: StageCore._on_peer,
    ev.Granted: StageCore._on_peer,
    ev.BegunReported: StageCore._on_begun_reported,
    ev.HeldReported: StageCore._on_held_reported,
    ev.Aborted: StageCore._on_aborted,
}


#: What comes from other ranks.
FromRank = _FromPeer | ev.HeldReported


def sender_of(event: FromRank, graph: TaskGraph) -> Sender:
    """The stage, or the member of this rank's group, that ``event`` comes from."""
    if isinstance(event, ev.Arrived):
        return "stage", graph.placement.stage_of(event.task.virtual_stage)
    if isinstance(event, ev.Consumed):
        return "stage", event.peer
    if isinstance(event, ev.Claimed):
        return "stage", graph.placement.stage_of(event.task.virtual_stage)
    if isinstance(event, ev.Offered | ev.Granted):
        return "stage", graph.placement.stage_of(max(0, event.task.virtual_stage - 1))
    return "member", 0 if isinstance(event, ev.Ordered) else event.member


def misplaced(event: FromRank, graph: TaskGraph, stage: int, step: Step | None) -> ProtocolError:
    """What is wrong with an event that does not belong to ``step``, the last one that ``stage`` opened."""
    sent, sender = event.step, _described(sender_of(event, graph))
    if step is not None and sent.number == step.id.number and not step.finished:
        where = f"{sender} is in {sent}, stage {stage} in {step.id}"
        error = ProtocolError(f"stages disagree on the step: {where}; all ranks must make the same calls in order")
        error.is_of_callers = True
        return error
    here = "before its first step"
    if step is not None:
        here = f"in step {step.id.number}" + (" (ended)" if step.finished else "")
    return ProtocolError(f"{event.task} from {sender}, a message of {sent}, reached stage {stage} {here}")


def _described(sender: Sender) -> str:
    kind, index = sender
    if kind == "stage":
        return f"stage {index}"
    return f"member {index} of the group" if index else "the group's leader"
