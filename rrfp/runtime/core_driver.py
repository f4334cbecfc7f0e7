"""Drives the core of one rank: turns what happens into events, and the core's instructions into I/O.

There is no policy and no wire format in here. A message becomes an event in `Messenger` or in the protocol of the
group, the end of a task in `LaneExecutor`; the arbiter then decides, and a decision goes to the lane.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rrfp.arbiter.arbiter import Arbiter, PauseTimer
from rrfp.arbiter.coordination import AgreementArbiter, GroupMessage, GroupMessageKind, LeaderProtocol
from rrfp.arbiter.offers import Offers, may_offer
from rrfp.compute.program import StageProgram
from rrfp.core import events as ev
from rrfp.core.group_step import GroupMembership
from rrfp.core.stage_core import StageCore
from rrfp.core.usage import WaitCause
from rrfp.errors import ProtocolError, StageError
from rrfp.model.tasks import Kind, Task
from rrfp.runtime.context import Coordination, RankContext
from rrfp.runtime.grad_finalizer import GradientFinalizer
from rrfp.runtime.lane_executor import LaneExecutor
from rrfp.runtime.messenger import Handler, Messenger
from rrfp.runtime.steps.plan import StepPlan
from rrfp.runtime.steps.round_trips import LimitFollower
from rrfp.transports.base import Channel, Message, MessageKind

_SENT_AS = {kind: MessageKind(kind.value) for kind in GroupMessageKind}
_RECEIVED_AS = {sent_as: kind for kind, sent_as in _SENT_AS.items()}

#: The kinds of messages inside a group.
GROUP_KINDS = frozenset(_RECEIVED_AS)


#: Events after which the core decides as before them, where bytes are not limited.
_HARMLESS = frozenset[type]({ev.SendReleased, ev.ChunkReduced})


class GroupLink:
    """The way from one rank to the other members of its ``group``, which has their ranks by member."""

    def __init__(self, group: Sequence[int], post: Callable[[int, Message], None]) -> None:
        self._group = group
        self._post = post

    def send(self, member: int, message: GroupMessage) -> None:
        body = {"numbers": message.numbers}
        sent = Message(Channel.CONTROL, _SENT_AS[message.kind], message.step, message.task, body=body)
        self._post(self._group[member], sent)

    def read(self, message: Message) -> tuple[int, GroupMessage]:
        """The member that sent ``message``, and its contents; a ProtocolError if it cannot be read."""
        sender, kind = message.sender, message.kind
        numbers: Any = message.body.get("numbers")
        if sender not in self._group:
            raise ProtocolError(f"rank {sender} sent {kind.value!r}, but is not of this rank's group")
        can_be_read = isinstance(numbers, list | tuple) and all(type(number) is int for number in numbers)
        if message.step is None or not can_be_read:
            raise ProtocolError(f"rank {sender} sent {kind.value!r} with what cannot be read")
        contents = GroupMessage(_RECEIVED_AS[kind], message.step, message.task, tuple(numbers))
        return self._group.index(sender), contents


class CoreDriver:
    """Applies events of one rank to its core, and performs the instructions. Used on one loop only."""

    def __init__(self, context: RankContext, core: StageCore, program: StageProgram) -> None:
        settings = context.settings
        self.messenger = Messenger(context, self.on_event, all_replicas=settings.claims)
        self.executor = LaneExecutor(context, program, self._on_completed)
        self.gradients = GradientFinalizer(
            context, program, self.executor, self.messenger.send, settings.reduce, settings.ties
        )
        #: Set when the core has finished the step, and when the forwards of the last virtual stages here have ended.
        self.finished, self.outputs_complete = asyncio.Event(), asyncio.Event()
        self._last = frozenset(
            v for v in core.graph.placement.virtual_stages(core.stage) if not core.graph.successors[v]
        )
        self._outputs_left = 0
        self._context = context
        self.core = core
        self._program = program
        is_led = settings.coordination == "leader" and context.topology.members > 1
        lane_depth = context.lane.depth
        self._depth = settings.depth or (max(2, lane_depth) if is_led else lane_depth)
        self._pauses: PauseTimer | None = None
        #: Events that change no decision; a limit on bytes counts outputs that are on their way.
        self._harmless = _HARMLESS if core.limit.bytes is None else frozenset[type]()
        self._leader_protocol: LeaderProtocol | None = None
        self._agreement: AgreementArbiter | None = None
        #: Follows round trips, with ``limit="auto"``.
        self.follower: LimitFollower | None = None
        echoes: Mapping[MessageKind, Handler] = {}
        if settings.limits is not None:
            self.follower = LimitFollower(context.topology, settings.limits, self.messenger.post, _loop_time)
            echoes = {MessageKind.ECHO: self.follower.on_message}
        self._performers: dict[type, Callable[[Any], None]] = {
            ev.Send: self.messenger.send_soon if self.follower is None else self._send_beside_echo,
            ev.Preview: self._preview,
            ev.ReportBegun: self.messenger.report_soon,
            ev.Credit: self.messenger.credit,
            ev.Release: self._release,
            ev.ReportReady: self._order,
            ev.Order: self._order,
            ev.ReduceChunk: self._reduce_chunk,
            ev.FinishStep: self._finish_step,
        }
        self.handlers: Mapping[MessageKind, Handler] = {
            MessageKind.OUTPUT: self.messenger.on_output,
            MessageKind.CONSUMED: self.messenger.on_consumed,
            MessageKind.BEGUN: self.messenger.on_begun,
            MessageKind.TIE: self.gradients.on_message,
            **echoes,
            **self._join_group(settings.coordination),
        }

    def _join_group(self, coordination: Coordination) -> Mapping[MessageKind, Handler]:
        """Make the arbiter, and what this rank needs to run its group's order."""
        core, topology = self.core, self._context.topology
        self.arbiter: Arbiter
        if topology.members == 1:
            offers = None
            if self.executor.takes_offers and may_offer(core, self._depth):
                offers = Offers(core, self.executor, self._begun)
            self._pauses = PauseTimer(core, _loop_time, self._wake_after)
            self.arbiter = Arbiter(core, self._depth, self._dispatch, self._waiting, offers, self._pauses)
            return {}
        group = GroupMembership(topology.member, topology.members)
        link = GroupLink(topology.group, self.messenger.post)
        if coordination == "leader":
            self.arbiter = Arbiter(core, self._depth, self._dispatch, self._waiting)
            reports_bytes = core.limit.bytes is not None
            self._leader_protocol = LeaderProtocol(group, link.send, self.on_event, reports_bytes=reports_bytes)
            on_message = self._leader_protocol.on_message
        else:
            self.arbiter = self._agreement = AgreementArbiter(
                core, self._depth, self._dispatch, self._waiting, group=group, send=link.send
            )
            on_message = self._agreement.on_message
        return dict.fromkeys(GROUP_KINDS, lambda message: on_message(*link.read(message)))

    def add_performers(self, performers: Mapping[type, Callable[[Any], None]]) -> None:
        """Instructions of these types are for other parts."""
        self._performers.update(performers)

    def dispute(self) -> tuple[Task, str] | None:
        """A task that is ready and does not start because the group disagrees, and why."""
        return None if self._agreement is None else self._agreement.dispute

    def open_step(
        self,
        plan: StepPlan,
        size_correlation: float | None = None,
        byte_rooms: tuple[float | None, ...] | None = None,
    ) -> None:
        """Begin a step. A message of it that came before and makes no sense is a ProtocolError.

        ``size_correlation``, ``byte_rooms``: see `rrfp.core.events.StepOpened`.
        """
        step = plan.step
        self.finished.clear()
        self.outputs_complete.clear()
        self.gradients.open(step, plan.reduce_gradients)
        visits = plan.visits
        self._outputs_left = sum(v not in visits.skipped_by(m) for v in self._last for m in range(step.microbatches))
        if not self._outputs_left:
            self.outputs_complete.set()
        self._context.mailbox.open(visits, step.mode)
        with self.messenger.opening():
            if self._agreement is not None:
                self._agreement.open_step(step)
            limit = None
            if self.follower is not None:
                own = self._context.topology.replica
                self.follower.open(plan.given(own) if plan.homes else step.microbatches)
                limit = self.follower.microbatches
            opened = step.number, step.mode, step.microbatches, plan.sizes, size_correlation, visits, limit
            self.arbiter.kick()
            self._apply(ev.StepOpened(*opened, byte_rooms, plan.pool))

    # Events to the core, its instructions to I/O.

    def on_event(self, event: ev.Event) -> None:
        """Something happened on this rank, or on another one."""
        if self._pauses is not None and type(event) is ev.BegunReported:
            self._pauses.begun_reported(event)
        if type(event) not in self._harmless:
            self.arbiter.kick()  # first, so that the next task starts before sends begin to copy their tensors
        self._context.activity.touch()
        for instruction in self.core.apply(event):
            self._performers[type(instruction)](instruction)

    def _apply(self, event: ev.Event) -> None:
        """As `on_event`, where the arbiter decides anyway: without a kick."""
        for instruction in self.core.apply(event):
            self._performers[type(instruction)](instruction)

    def _send_beside_echo(self, send: ev.Send) -> None:
        assert self.follower is not None
        self.follower.on_send(send)
        self.messenger.send_soon(send)

    def _order(self, instruction: ev.ReportReady | ev.Order) -> None:
        step = self._context.activity.step
        if self._leader_protocol is None or step is None:
            raise ProtocolError(f"stage {self.core.stage} has no way to perform {instruction}")
        self._leader_protocol.perform(instruction, step)

    def _preview(self, preview: ev.Preview) -> None:
        """Ask the program how large a forward is, now that its inputs are here."""
        forward, program = preview.task, self._program
        inputs = self._context.mailbox.inputs(forward)
        method = "signature"
        try:
            signature = program.signature(forward, inputs)
            hash(signature)
            method = "input_bytes"
            num_bytes = program.input_bytes(forward, inputs)
        except Exception as error:  # a caller's program may raise anything; here no task would be named
            name = f"{type(program).__name__}.{method}"
            raise StageError(f"{name} of {forward} raised {type(error).__name__}: {error}") from error
        self._apply(ev.Previewed(forward, num_bytes, signature))

    def _release(self, release: ev.Release) -> None:
        self._context.mailbox.drop(release.task)

    def _reduce_chunk(self, reduce: ev.ReduceChunk) -> None:
        if self.gradients.has_work:
            self._context.supervisor.spawn(self._finalize(reduce.virtual_stage))
        else:
            self.on_event(ev.ChunkReduced(reduce.virtual_stage))

    async def _finalize(self, virtual_stage: int) -> None:
        await self.gradients.finalize(virtual_stage)
        self.on_event(ev.ChunkReduced(virtual_stage))

    def _finish_step(self, _: ev.FinishStep) -> None:
        self.finished.set()

    # Tasks on the lane.

    def _dispatch(self, task: Task) -> None:
        self.executor.enqueue(task)  # early, because the lane's thread takes some time to wake up
        self._apply(ev.Enqueued(task))  # and no kick: the arbiter, which called this, goes on deciding

    def _begun(self, task: Task) -> None:
        self._apply(ev.Enqueued(task))

    def _on_completed(self, completed: ev.Completed) -> None:
        self.arbiter.before_completion()
        if self._leader_protocol is not None and self._context.activity.step is not None:
            self._leader_protocol.on_completed(completed, self._context.activity.step)
        self.on_event(completed)
        if completed.task.kind is Kind.F and completed.task.virtual_stage in self._last:
            self._outputs_left -= 1
            if not self._outputs_left:
                self.outputs_complete.set()

    def _wake_after(self, seconds: float, pause: int) -> None:
        asyncio.get_running_loop().call_later(seconds, self._pause_over, pause)

    def _pause_over(self, pause: int) -> None:
        if self._pauses is not None and self._pauses.is_on(pause):
            self._pauses.end()
            self.arbiter.kick()

    def _waiting(self, cause: WaitCause) -> None:
        if self._context.activity.step is not None:
            self._context.recorder.waiting(cause)


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
