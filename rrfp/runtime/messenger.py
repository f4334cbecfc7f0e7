"""The messages of one rank: outputs and credits leave, what arrives becomes events.

It knows which message carries what, and neither what happens next nor how messages travel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rrfp.arbiter.group_messages import GroupMessage, GroupMessageKind
from rrfp.compute.mailbox import Mailbox
from rrfp.core import events as ev
from rrfp.core import timeouts
from rrfp.core.tasks import Kind
from rrfp.core.topology import Topology
from rrfp.errors import FrameError, PeerLostError, ProtocolError
from rrfp.log import get_logger
from rrfp.runtime.departures import Departures
from rrfp.runtime.stall.progress import Progress
from rrfp.runtime.supervisor import Services
from rrfp.trace.recorder import Recorder
from rrfp.transports.base import Channel, Message, MessageKind, Transport

logger = get_logger(__name__)

_CHANNELS = {Kind.F: Channel.FORWARD, Kind.B: Channel.BACKWARD}

_KINDS = {kind: MessageKind(kind.value) for kind in GroupMessageKind}
_GROUP_KINDS = {sent_as: kind for kind, sent_as in _KINDS.items()}


class Courier:
    """Sends and receives for one rank.

    Args:
        place: where the rank is.
        transport: the way to the peers.
        mailbox: holds the tensors that are sent, and files those that arrive.
        progress: told of every message of a step.
        recorder: told of every tensor message.
        services: run what is posted.
        tell: takes events to the core.
    """

    def __init__(
        self,
        place: Topology,
        transport: Transport,
        mailbox: Mailbox,
        progress: Progress,
        recorder: Recorder,
        services: Services,
        tell: Callable[[ev.Event], None],
    ) -> None:
        #: Peers that left in order; that they are gone is no error then.
        self.departures = Departures()
        #: Where tensors go, by stage, and where they come from; and the ranks of the group.
        self._ranks = [place.rank_of(stage) for stage in range(place.stages)]
        self._stages = {rank: stage for stage, rank in enumerate(self._ranks)}
        self._group = place.group
        self._transport = transport
        self._mailbox = mailbox
        self._progress = progress
        self._recorder = recorder
        self._services = services
        self._tell = tell

    async def pump(self, take: Callable[[Message], None]) -> None:
        """Receive for ever; never gated on memory, so that nothing a peer waits for can be stuck behind this rank."""
        while True:
            try:
                message = await self._transport.receive()
            except FrameError as error:
                if error.peer is not None:
                    raise
                logger.warning("dropped: %s", error, field=error.field)
                continue
            except PeerLostError as error:
                if error.peer in self.departures:
                    continue
                raise
            take(message)

    def post(self, peer: int, message: Message) -> None:
        """Queue a control message without waiting."""
        self._services.spawn(self._post(peer, message))

    def credit(self, credit: ev.Credit) -> None:
        """Tell a peer that its output was used up."""
        self._progress.sent += 1
        self.post(
            self._ranks[credit.peer],
            Message(Channel.CONTROL, MessageKind.CONSUMED, self._progress.step, credit.task),
        )

    async def send(self, send: ev.Send) -> None:
        """Send a task's output, and report when its memory is free."""
        task = send.task
        tensors, body = self._mailbox.pack(task, send.peer)
        body["consumed"] = send.consumed
        message = Message(_CHANNELS[task.kind], MessageKind.OUTPUT, self._progress.step, task, tensors, body)
        self._progress.sent += 1
        self._recorder.sent(send.peer, task, message.num_bytes)
        await self._hand_over(self._ranks[send.peer], message)
        self._tell(ev.SendReleased(task, send.peer))

    async def send_to(self, stage: int, message: Message) -> None:
        """Send a message of the step to the rank of ``stage``; returns when its memory is no longer read."""
        self._progress.sent += 1
        await self._hand_over(self._ranks[stage], message)

    def file(self, message: Message) -> None:
        """An OUTPUT or CONSUMED arrived.

        Raises:
            ProtocolError: if it makes no sense.
        """
        task, step, sender = message.task, message.step, message.sender
        if task is None or step is None:
            raise ProtocolError(f"rank {sender} sent a {message.kind} message without a task or a step")
        self._progress.received += 1
        stage = self._stages.get(sender)
        if stage is None:
            raise ProtocolError(f"rank {sender} sent {task}: a rank of another replica, or another member of its group")
        if message.kind is MessageKind.CONSUMED:
            self._tell(ev.Consumed(step, stage, task))
            return
        consumed = message.body.get("consumed")
        self._mailbox.unpack(task, message.tensors, message.body)
        self._recorder.arrived(stage, task, message.num_bytes)
        self._tell(ev.Arrived(step, task, message.num_bytes, consumed if isinstance(consumed, int) else None))

    def send_to_member(self, member: int, group_message: GroupMessage) -> None:
        """Send ``group_message`` to ``member`` of this rank's group."""
        self._progress.sent += 1
        body = {"numbers": group_message.numbers}
        message = Message(
            Channel.CONTROL, _KINDS[group_message.kind], group_message.step, group_message.task, body=body
        )
        self.post(self._group[member], message)

    def heard(self, message: Message) -> tuple[int, GroupMessage]:
        """Which member of the group sent a message, and what it says.

        Raises:
            ProtocolError: if it makes no sense.
        """
        numbers: Any = message.body.get("numbers")
        self._progress.received += 1
        if message.sender not in self._group:
            raise ProtocolError(f"rank {message.sender} sent {message.kind.value!r}, but is not of this rank's group")
        can_be_read = isinstance(numbers, list | tuple) and all(type(number) is int for number in numbers)
        if message.step is None or not can_be_read:
            raise ProtocolError(f"rank {message.sender} sent {message.kind.value!r} with what cannot be read")
        return self._group.index(message.sender), GroupMessage(
            _GROUP_KINDS[message.kind], message.step, message.task, tuple(numbers)
        )

    async def _post(self, peer: int, message: Message) -> None:
        try:
            await self._hand_over(peer, message)
        except PeerLostError:
            if peer not in self.departures:
                raise

    async def _hand_over(self, peer: int, message: Message) -> None:
        """Send, and where the peer is gone, let `pump` say why.

        Its last words (an abort that names the origin, or that it left in order) may lie unread in the inbox, and for a
        peer that is lost ``receive`` raises as well.
        """
        try:
            await self._transport.send(peer, message)
        except PeerLostError:
            if peer not in self.departures and not self._services.stopping:
                await asyncio.sleep(timeouts.LAST_WORDS_S)
            raise
