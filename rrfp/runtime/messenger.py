"""The messages of one rank: each that arrives goes to the handler of its kind, outputs and credits leave.

The messenger knows the contents of tensor messages and credits, but neither their consequences nor how they travel.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rrfp import timeouts
from rrfp.core import events as ev
from rrfp.errors import FrameError, PeerLostError, ProtocolError, RrfpError
from rrfp.log import RateLimitedLog, get_logger
from rrfp.model.tasks import SENT_TO, Side, StepId, Task
from rrfp.runtime.context import RankContext
from rrfp.runtime.supervisor import failure_on_loop
from rrfp.transports.base import Channel, Message, MessageKind, delivering, sending_at_once

logger = get_logger(__name__)

#: Takes a message that arrived; raises ProtocolError if it makes no sense.
Handler = Callable[[Message], None]

#: What makes a message of the step.
Sending = ev.Send | ev.ReportBegun | ev.Offer | ev.Claim | ev.Grant

_CHANNELS = {kind: Channel.FORWARD if side is Side.AFTER else Channel.BACKWARD for kind, side in SENT_TO.items()}


class Messenger:
    """Sends and receives for one rank; ``on_event`` takes events to the core.

    ``all_replicas``: whether outputs may come from any replica.
    """

    def __init__(
        self, context: RankContext, on_event: Callable[[ev.Event], None], *, all_replicas: bool = False
    ) -> None:
        self.sent = 0
        self.received = 0
        topology = context.topology
        #: Where tensors go, by stage, and where they come from.
        self._ranks = [topology.rank_of(stage) for stage in range(topology.stages)]
        self._stages = {rank: stage for stage, rank in enumerate(self._ranks)}
        if all_replicas:
            self._stages = {rank: topology.place_of(rank).stage for rank in range(topology.world)}
        self._topology = topology
        self._transport = context.transport
        self._at_once = sending_at_once(context.transport)
        self._mailbox = context.mailbox
        self._closed_peers = context.closed_peers
        self._activity = context.activity
        self._recorder = context.recorder
        self._supervisor = context.supervisor
        self._fail = context.fail
        self._on_event = on_event
        self._has_left = False
        #: The part that takes each kind of message.
        self._handlers: Mapping[MessageKind, Handler] = {}
        #: Gets the error that ends receiving.
        self._failed: asyncio.Future[None] | None = None
        #: Frames of no rank of this run.
        self._foreign = RateLimitedLog(logger)
        #: What leaves in the loop's next turn.
        self._leaving: list[tuple[Callable[[Any], None], Sending]] = []
        #: By peer and channel, the messages that wait in coroutines of their own: later ones queue behind them.
        self._waiting: Counter[tuple[int, Channel]] = Counter()

    async def receive_all(self, handlers: Mapping[MessageKind, Handler]) -> None:
        """Receive forever; never gated on memory, so that nothing a peer waits for can be stuck behind this rank."""
        self._handlers = handlers
        self._failed = failed = asyncio.get_running_loop().create_future()
        if (transport := delivering(self._transport)) is not None:
            transport.deliver_to(self._deliver)
            await failed
        while not failed.done():
            try:
                entry: Message | RrfpError = await self._transport.receive()
            except (FrameError, PeerLostError) as error:
                entry = error
            self._deliver(entry)
        await failed

    def _deliver(self, entry: Message | RrfpError) -> None:
        """Take what arrived; some transports call it where they read a message."""
        if self._failed is None or self._failed.done():
            return
        try:
            if isinstance(entry, RrfpError):
                self._on_error(entry)
            elif not self._has_left:
                if entry.step is not None:
                    self.received += 1
                self._handlers.get(entry.kind, self._refuse)(entry)
        except ProtocolError as error:
            self._failed.set_exception(self._naming(entry.sender, error) if isinstance(entry, Message) else error)
        except StopIteration as error:  # which no future may carry; in a coroutine it would be this error too
            failure = RuntimeError("plugged-in code raised StopIteration")
            failure.__cause__ = error
            self._failed.set_exception(failure)
        except BaseException as error:
            self._failed.set_exception(failure_on_loop(error) or error)

    def _on_error(self, error: RrfpError) -> None:
        """Raise what ``receive`` raised, unless this rank can go on."""
        if self._has_left:
            return
        if isinstance(error, FrameError) and error.peer is None:
            self._foreign.add(f"dropped: {error}")
        elif not (isinstance(error, PeerLostError) and error.peer in self._closed_peers):
            raise error

    @contextmanager
    def opening(self) -> Iterator[None]:
        """In here a step opens, and messages that came before it are taken in; errors as in `receive_all`."""
        try:
            yield
        except ProtocolError as error:
            if error.sender is None:
                raise
            kind, index = error.sender
            rank = self._ranks[index] if kind == "stage" else self._topology.group[index]
            raise self._naming(rank, error)  # noqa: B904 - it has its cause

    def on_output(self, message: Message) -> None:
        self._on_event(self.received_output(message))

    def received_output(self, message: Message) -> ev.Arrived:
        """The arrival of an OUTPUT, whose tensors are in the mailbox then."""
        step, task, stage = self._subject(message)
        consumed = message.body.get("consumed")
        num_bytes = message.num_bytes
        self._mailbox.unpack(task, message.tensors, message.body)
        self._recorder.arrived(stage, task, num_bytes)
        return ev.Arrived(step, task, num_bytes, consumed if isinstance(consumed, int) else None)

    def on_consumed(self, message: Message) -> None:
        step, task, stage = self._subject(message)
        self._on_event(ev.Consumed(step, stage, task))

    def on_begun(self, message: Message) -> None:
        step, task, _ = self._subject(message)
        seconds = message.body.get("seconds")
        if not isinstance(seconds, float) or not 0 <= seconds < math.inf:
            raise ProtocolError(f"rank {message.sender} reported {task} for {seconds!r} s, must be a float >= 0")
        self._on_event(ev.BegunReported(step, task, seconds))

    def leave(self, own: Message) -> None:
        """Notify all peers that this rank leaves in order. What they make of it concerns it no more."""
        self._has_left = True
        for peer in self._transport.context.peers:
            self.post(peer, own)

    def post(self, peer: int, message: Message) -> None:
        """Queue a control message without waiting."""
        self._count(message)
        if not self._send_at_once(peer, message):
            self._send_later(peer, message)

    def credit(self, credit: ev.Credit) -> None:
        """Notify a peer that its output was consumed."""
        message = Message(Channel.CONTROL, MessageKind.CONSUMED, self._activity.step, credit.task)
        self.post(self._ranks[credit.peer], message)

    def send_soon(self, send: ev.Send) -> None:
        """Send a task's output, and report when its memory is free."""
        self.soon(self._send_output, send)

    def report_soon(self, report: ev.ReportBegun) -> None:
        """Notify a peer of a forward that has begun."""
        self.soon(self._send_begun, report)

    def soon(self, perform: Callable[[Any], None], instruction: Sending) -> None:
        """Let ``perform`` send in the loop's next turn, in the order of calls.

        That is behind the arbiter's turn, so that the next task starts before tensors are copied.
        """
        if not self._leaving:
            asyncio.get_running_loop().call_soon(self._send_leaving)
        self._leaving.append((perform, instruction))

    def _send_leaving(self) -> None:
        leaving, self._leaving = self._leaving, []
        for perform, instruction in leaving:
            if self._supervisor.stopping:
                return
            try:
                perform(instruction)
            except BaseException as error:  # in this callback SystemExit of a hint that observes would end the loop
                self._fail(failure_on_loop(error) or error, instruction.task)

    def _send_begun(self, report: ev.ReportBegun) -> None:
        body = {"seconds": report.seconds}
        message = Message(Channel.CONTROL, MessageKind.BEGUN, self._activity.step, report.task, body=body)
        self.post(self._ranks[report.peer], message)

    def _send_output(self, send: ev.Send) -> None:
        task = send.task
        tensors, body = self._mailbox.pack(task, send.peer)
        body["consumed"] = send.consumed
        message = Message(_CHANNELS[task.kind], MessageKind.OUTPUT, self._activity.step, task, tensors, body)
        self._recorder.sent(send.peer, task, message.num_bytes)
        self._count(message)
        peer = self._ranks[send.peer] if send.copy is None else self._topology.rank_of(send.peer, send.copy)
        if self._send_at_once(peer, message):
            self._on_event(ev.SendReleased(task, send.peer))
        else:
            self._send_later(peer, message, send)

    def _send_at_once(self, peer: int, message: Message) -> bool:
        """Whether a message has left, because neither it nor one before it had to wait for anything."""
        if self._at_once is None or self._waiting.get((peer, message.channel)) or self._supervisor.stopping:
            return False
        return self._at_once.send_at_once(peer, message)

    def _send_later(self, peer: int, message: Message, send: ev.Send | None = None) -> None:
        """Send a message that has to wait; ``send`` is the instruction, of an output."""
        self._waiting[peer, message.channel] += 1
        self._supervisor.spawn(self._wait_and_send(peer, message, send), None if send is None else send.task)

    async def _wait_and_send(self, peer: int, message: Message, send: ev.Send | None) -> None:
        try:
            await self._hand_over(peer, message)
            if send is not None:
                self._on_event(ev.SendReleased(send.task, send.peer))
        except PeerLostError:
            if send is not None or peer not in self._closed_peers:
                raise
        finally:
            self._waiting[peer, message.channel] -= 1

    async def send(self, stage: int, message: Message) -> None:
        """Send a message of the step to the rank of ``stage``; returns when its memory is no longer read."""
        await self.send_to(self._ranks[stage], message)

    async def send_to(self, rank: int, message: Message) -> None:
        self._count(message)
        await self._hand_over(rank, message)

    def _count(self, message: Message) -> None:
        if message.step is not None:
            self.sent += 1

    def _subject(self, message: Message) -> tuple[StepId, Task, int]:
        """The step and the task that a message is about, and the stage that it comes from."""
        task, step, sender = message.task, message.step, message.sender
        if task is None or step is None:
            raise ProtocolError(f"rank {sender} sent a {message.kind} message without a task or a step")
        stage = self._stages.get(sender)
        if stage is None:
            raise ProtocolError(f"rank {sender} sent {task}: a rank of another replica, or another member of its group")
        return step, task, stage

    def _refuse(self, message: Message) -> None:
        rank = self._topology.rank
        raise ProtocolError(f"rank {message.sender} sent a {message.kind} message that rank {rank} cannot use")

    def _naming(self, sender: int, error: ProtocolError) -> ProtocolError:
        """``error``, which names the rank ``sender`` where its stage has several."""
        if self._topology.world == self._topology.stages:
            return error
        named = ProtocolError(f"{error} (reported by {self._topology.name_of(sender)})")
        named.__cause__, named.is_of_callers = error, error.is_of_callers
        return named

    async def _hand_over(self, peer: int, message: Message) -> None:
        """Send, and where the peer is gone, let `receive_all` find out why.

        Its last messages (an abort that names the origin, or that it left in order) may lie unread in the inbox, and
        for a peer that is lost ``receive`` raises as well.
        """
        try:
            await self._transport.send(peer, message)
        except PeerLostError:
            if peer not in self._closed_peers and not self._supervisor.stopping:
                await asyncio.sleep(timeouts.FAREWELL_TIMEOUT_S)
            raise
