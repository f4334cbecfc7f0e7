"""Links that stage: device tensors over a base transport that carries CPU tensors only.

The sender copies a message's device tensors to the host and sends them as CPU tensors; the body names the device of
each. The receiver copies those to its own device; where it has none, nothing wraps its transport, and they stay on the
CPU. The copies run on streams of the rank's `DeviceCopies`, never on the loop, and beside those for other peers.

The other end may be the base transport alone. It bounds the memory: the next message of a channel is read when the one
before has been received.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from torch import Tensor

from rrfp import timeouts
from rrfp.devices.copies import DeviceCopies, held_by, with_copies
from rrfp.errors import ConfigError, FrameError, PeerLostError, RrfpError, TransportClosedError, TransportError
from rrfp.transports.base import Channel, LendsMemory, Loan, Message, Transport, TransportContext, sending_at_once
from rrfp.transports.links.flow import HomeLoop, Window
from rrfp.transports.tunnel.announcements import DEVICES
from rrfp.transports.tunnel.p2p import P2PError
from rrfp.transports.wire.tensor_bytes import check_sendable, from_buffer

#: So many seconds after its start, a copy to the device is late. They last milliseconds.
LATE_S = 0.5

_MAX_KIND_LENGTH = 32


class Staging:
    """Copies for messages to and from ``peer`` over ``base``, which sees CPU tensors only."""

    def __init__(self, peer: int, base: Transport, copies: DeviceCopies) -> None:
        self._peer = peer
        self._base = base
        self._copies = copies

    def to_copy(self, message: Message) -> list[int]:
        """The indices of device tensors, once all tensors can be sent."""
        indices = held_by(self._copies, message.tensors)
        if not indices:
            return indices
        if (num_bytes := message.num_bytes) > (limit := self._base.context.max_message_bytes):
            raise ConfigError(f"message has {num_bytes} bytes, max_message_bytes is {limit}")
        for tensor in message.tensors:
            if tensor is not None:
                check_sendable(tensor, self._copies)
        return indices

    async def send(self, message: Message, indices: list[int]) -> None:
        """Send a message with device tensors at ``indices``; cancelled, nothing."""
        loan = self._lend(message.channel, message.tensors)
        try:
            await self._base.send(self._peer, await self._on_host(message, indices, loan))
        finally:
            if loan is not None:
                loan.close()

    def _lend(self, channel: Channel, tensors: Sequence[Tensor | None]) -> Loan | None:
        """Memory of the base transport for a message, if it lends any."""
        if not isinstance(self._base, LendsMemory):
            return None
        sizes = [tensor.numel() * tensor.itemsize for tensor in tensors if tensor is not None]
        return self._base.lend(self._peer, channel, sizes)

    async def _on_host(self, message: Message, indices: list[int], loan: Loan | None) -> Message:
        """``message`` with its device tensors in host memory, and their devices named."""
        devices = [None if tensor is None else "cpu" for tensor in message.tensors]
        for index in indices:
            devices[index] = self._copies.kind
        into = None if loan is None else _tensors_in(loan, message.tensors, indices)
        to_host = partial(self._copies.to_host, into=into, peer=self._peer)
        tensors = await with_copies(message.tensors, indices, to_host)
        return replace(message, tensors=tuple(tensors), body={**message.body, DEVICES: devices})

    async def on_device(self, message: Message, indices: list[int]) -> Message:
        """A received message with its tensors at ``indices`` on the device."""
        body = {key: value for key, value in message.body.items() if key != DEVICES}
        to_device = partial(self._copies.to_device, peer=self._peer)
        try:
            tensors = await with_copies(message.tensors, indices, to_device)
        except RrfpError:
            raise
        except Exception as error:
            raise failure_of(error, message) from error
        return replace(message, tensors=tuple(tensors), body=body)


def failure_of(error: Exception, message: Message) -> TransportError:
    """The error for tensors that could not be copied to this device."""
    sender = f"rank {message.sender}"
    text = (
        f"{type(error).__name__}: {error}, while tensors of {message.kind} {message.task} from {sender} were received"
    )
    return TransportError(text)


def _tensors_in(loan: Loan, tensors: Sequence[Tensor | None], indices: Sequence[int]) -> list[Tensor]:
    """Tensors in lent memory like those at ``indices``."""
    frames = iter(loan.frames)
    made = []
    for index, tensor in enumerate(tensors):
        if tensor is None:
            continue
        frame = next(frames)
        if index in indices:
            made.append(from_buffer(frame, tensor.dtype, tuple(tensor.shape), requires_grad=False))
    return made


def staged_indices(message: Message) -> list[int]:
    """The indices of tensors that the sender had on a device, checked."""
    devices = message.body[DEVICES]
    sender, tensors = message.sender, message.tensors
    if not isinstance(devices, list) or len(devices) != len(tensors):
        raise FrameError(sender, f"body.{DEVICES}", f"is {devices!r:.80}, must be an array of {len(tensors)}")
    for index, (device, tensor) in enumerate(zip(devices, tensors, strict=True)):
        field = f"body.{DEVICES}[{index}]"
        if tensor is None:
            if device is not None:
                raise FrameError(sender, field, f"is {device!r:.80}, must be null like the tensor")
        elif not isinstance(device, str) or not 0 < len(device) <= _MAX_KIND_LENGTH:
            raise FrameError(sender, field, f"is {device!r:.80}, must be the type of a device")
    return [index for index, device in enumerate(devices) if device not in (None, "cpu")]


@dataclass(slots=True, eq=False)
class _Arriving:
    """A message, None while tensors are missing; and the bytes of its tensors."""

    message: Message | None
    num_bytes: int


class Arrivals:
    """Messages of one peer, passed on in the order of their channels, each once it is whole."""

    # ``on_dropped`` takes the channel of a message that an error of this process's device cost, its bytes and the
    # error; ``on_failed`` that of a P2P channel, which may have cost a message: those behind it wait for ever.

    def __init__(
        self,
        deliver: Callable[[Message, int], None],
        on_dropped: Callable[[Channel, int, TransportError], None],
        on_failed: Callable[[P2PError], None],
    ) -> None:
        self._deliver = deliver
        self._on_dropped = on_dropped
        self._on_failed = on_failed
        self._queues: dict[Channel, deque[_Arriving]] = {channel: deque() for channel in Channel}
        self._completing: set[asyncio.Future[Message]] = set()

    @property
    def pending(self) -> int:
        """How many messages are being completed."""
        return len(self._completing)

    def is_first_pending(self, channel: Channel) -> bool:
        """Whether the next message of a channel is being completed."""
        queue = self._queues[channel]
        return bool(queue) and queue[0].message is None

    def add(self, message: Message) -> None:
        """A whole message arrived."""
        self._queues[message.channel].append(_Arriving(message, message.num_bytes))
        self._flush(message.channel)

    def add_pending(self, channel: Channel, num_bytes: int, completing: Awaitable[Message]) -> None:
        """A message arrived, and will be whole."""
        arriving = _Arriving(None, num_bytes)
        self._queues[channel].append(arriving)
        task = asyncio.ensure_future(completing)
        self._completing.add(task)
        task.add_done_callback(partial(self._on_completed, channel, arriving))

    def _on_completed(self, channel: Channel, arriving: _Arriving, completed: asyncio.Future[Message]) -> None:
        self._completing.discard(completed)
        if completed.cancelled():
            return
        error = completed.exception()
        if error is None:
            arriving.message = completed.result()
            self._flush(channel)
        elif isinstance(error, TransportClosedError | PeerLostError):  # this end has ended the transfer
            return
        elif isinstance(error, P2PError):
            self._on_failed(error)
        else:
            assert isinstance(error, TransportError)
            self._on_dropped(channel, arriving.num_bytes, error)
            self._queues[channel].remove(arriving)
            self._flush(channel)

    def _flush(self, channel: Channel) -> None:
        queue = self._queues[channel]
        while queue and (message := queue[0].message) is not None:
            self._deliver(message, queue.popleft().num_bytes)

    def end(self) -> None:
        """Complete no more messages; copies under way end by themselves. May be called twice."""
        for completing in self._completing:
            completing.cancel()


class TunnelOwner(Protocol):
    """The transport, to which links report."""

    context: TransportContext

    def on_message(self, message: Message, num_bytes: int) -> None:
        """A whole message arrived."""

    def on_bad_frame(self, error: TransportError) -> None:
        """A message of the base transport was dropped."""

    def on_lost(self, error: PeerLostError) -> None:
        """The peer is lost, and its last message was reported."""

    def on_failure(self, error: RrfpError) -> None:
        """An error of this end: ``receive`` raises it."""

    async def leave_base(self, base: Transport) -> None:
        """A link has left; returns when all over this base have."""


class StagedLink:
    """The connection to ``peer`` over ``base``; see `rrfp.transports.links.linked.LinkContract`."""

    def __init__(self, peer: int, base: Transport, owner: TunnelOwner, home: HomeLoop) -> None:
        self.peer = peer
        self.base = base
        self.is_connected = True
        self.opened = asyncio.Event()
        self.opened.set()
        self.at_once = sending_at_once(base)
        copies = owner.context.copies
        self.staging = None if copies is None or copies.kind in base.carries else Staging(peer, base, copies)
        self._owner = owner
        self._home = home
        self._arrivals = Arrivals(self._on_whole, self._on_dropped, self.on_failed)
        self._outlets = {channel: self._new_outlet(channel) for channel in Channel}
        #: By channel, messages that were passed on or are being completed, and that ``receive`` has not returned.
        self._unreceived = dict.fromkeys(Channel, 0)
        self._received = asyncio.Event()
        #: Why sends fail.
        self._error: RrfpError | None = None
        #: The loss to be reported, once messages that are being completed have ended or their time is up.
        self._loss: PeerLostError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reported = False

    def _new_outlet(self, channel: Channel) -> Outlet:
        # The base transport bounds what is sent; this window only carries the error of sends.
        return Outlet(self, Window(sys.maxsize, self._home))

    @property
    def outlets(self) -> Mapping[Channel, Outlet]:
        """One for each channel."""
        return self._outlets

    def to_stage(self, message: Message) -> list[int]:
        """The indices of the tensors that pass through host memory."""
        return [] if self.staging is None else self.staging.to_copy(message)

    async def send_whole(self, message: Message) -> None:
        """Send a message by the base transport alone."""
        if self.staging is not None and (indices := self.to_stage(message)):
            await self.staging.send(message, indices)
        else:
            await self.base.send(self.peer, message)

    async def room_for(self, channel: Channel) -> None:
        """Wait until ``receive`` has returned the message of ``channel`` before."""
        # Behind a copy that is late there is room: where the device is stuck, an abort must get through.
        while self._unreceived[channel]:
            self._received.clear()
            try:
                async with asyncio.timeout(LATE_S if self._arrivals.is_first_pending(channel) else None):
                    await self._received.wait()
            except TimeoutError:
                return

    def on_message(self, message: Message) -> None:
        """The base transport brought a message."""
        try:
            if not self._reported:
                self._add(message)
        except FrameError as error:
            self._owner.on_bad_frame(error)

    def _add(self, message: Message) -> None:
        staging, indices = self.staging, staged_indices(message) if DEVICES in message.body else []
        self._unreceived[message.channel] += 1
        if staging is not None and indices:
            self._arrivals.add_pending(message.channel, message.num_bytes, staging.on_device(message, indices))
        else:
            self._arrivals.add(message)

    def _on_whole(self, message: Message, num_bytes: int) -> None:
        if not self._reported:
            self._owner.on_message(message, num_bytes)
        self._report_if_idle()

    def _on_dropped(self, channel: Channel, num_bytes: int, error: TransportError) -> None:
        self.consumed(channel, num_bytes)
        self._owner.on_failure(error)
        self._report_if_idle()

    def consumed(self, channel: Channel, num_bytes: int) -> None:
        """See `LinkContract.consumed`."""
        self._unreceived[channel] -= 1
        self._received.set()

    # The peer's end.

    def on_lost(self, error: PeerLostError) -> None:
        """The base transport lost the peer; all that it brought was passed to `on_message`."""
        if self._loss is not None or self._reported:
            return
        self._loss = error
        self._fail(error)
        self._stop_timer()
        self._timer = self._home.loop.call_later(timeouts.LAST_MESSAGES_S, self._report)
        self._report_if_idle()

    def _report_if_idle(self) -> None:
        if self._loss is not None and not self._arrivals.pending:
            self._report()

    def _report(self) -> None:
        self._stop_timer()
        if self._loss is not None and not self._reported:
            self._reported = True
            self._owner.on_lost(self._loss)

    def on_failed(self, error: P2PError) -> None:
        """Tensors failed to move; the base transport may say which end failed."""
        if self._loss is not None:
            self._report_if_idle()
        elif self._error is None and self._timer is None:
            lost = PeerLostError(self.peer, f"its tensors failed to arrive, or those for it: {error!s:.200}")
            self._timer = self._home.loop.call_later(timeouts.FAREWELL_TIMEOUT_S, self.on_lost, lost)

    def _fail(self, error: RrfpError) -> None:
        """Make all sends raise ``error``, unless they raise another one already."""
        self._error = self._error or error
        for outlet in self._outlets.values():
            outlet.window.fail(error)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # This rank's end.

    async def leave(self) -> None:
        """See `LinkContract.leave`."""
        await self._owner.leave_base(self.base)

    def end(self, error: RrfpError) -> None:
        """See `LinkContract.end`."""
        self._stop_timer()
        self._reported = True
        self._fail(error)
        self._arrivals.end()


class Outlet:
    """One channel to one peer; see `rrfp.transports.links.linked.OutletContract`."""

    def __init__(self, link: StagedLink, window: Window) -> None:
        self.window = window
        self._link = link
        self._turn = asyncio.Lock()

    async def send(self, message: Message, num_bytes: int) -> None:
        """See `OutletContract.send`. Cancelled while it copies, it has sent nothing."""
        async with self._turn:
            self.window.check()
            await self._link.send_whole(message)

    def send_at_once(self, message: Message, num_bytes: int) -> bool:
        """See `OutletContract.send_at_once`: only what the base transport can send at once."""
        link = self._link
        if link.at_once is None or self._turn.locked() or link.to_stage(message):
            return False
        return link.at_once.send_at_once(link.peer, message)
