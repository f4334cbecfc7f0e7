"""Transports over base transports, each of which connects some of the peers, and links that stage device tensors.

The sender copies a message's device tensors to the host and sends them as CPU tensors; the body says which. The
receiver copies those to its own device; where it has none, nothing wraps its transport, and they stay on the CPU. The
copies run on streams of the rank's `DeviceCopies`, never on the loop, and beside those for other peers.

The other end of such a link may be the base transport alone. It bounds the memory: the next message of a channel is
read when the one before has been received.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from rrfp import timeouts
from rrfp.devices.copies import DeviceCopies, held_by, with_copies
from rrfp.errors import ConfigError, FrameError, PeerLostError, RrfpError, TransportClosedError, TransportError
from rrfp.transports import base as contract
from rrfp.transports.base import Channel, Deliver, Loan, Message, Transport, TransportContext, TransportStatistics
from rrfp.transports.links.flow import HomeLoop, Window
from rrfp.transports.links.linked import LinkedTransport
from rrfp.transports.tunnel.p2p import STAGED, P2PError
from rrfp.transports.wire.tensor_bytes import check_sendable, from_buffer

#: So many seconds after its start, a copy to the device is late. They last milliseconds.
LATE_S = 0.5


def check_message(message: Message, num_bytes: int, context: TransportContext) -> None:
    """A ConfigError for a message whose tensors the base transport does not see and that it would refuse."""
    if num_bytes > context.max_message_bytes:
        raise ConfigError(f"message has {num_bytes} bytes, max_message_bytes is {context.max_message_bytes}")
    for tensor in message.tensors:
        if tensor is not None:
            check_sendable(tensor, context.copies)


async def on_host(message: Message, indices: list[int], copies: DeviceCopies, peer: int, loan: Loan | None) -> Message:
    """``message`` with its device tensors in host memory, which is lent if ``loan`` is not None."""
    into = None if loan is None else _tensors_in(loan, message.tensors, indices)
    tensors = await with_copies(message.tensors, indices, partial(copies.to_host, into=into, peer=peer))
    return replace(message, tensors=tuple(tensors), body={**message.body, STAGED: indices})


def _tensors_in(loan: Loan, tensors: Sequence[Tensor | None], indices: Sequence[int]) -> list[Tensor]:
    """Tensors in lent memory like those at ``indices``."""
    sent = [(index, tensor) for index, tensor in enumerate(tensors) if tensor is not None]
    return [
        from_buffer(frame, tensor.dtype, tuple(tensor.shape), requires_grad=False)
        for (index, tensor), frame in zip(sent, loan.frames, strict=True)
        if index in indices
    ]


def staged_indices(message: Message) -> list[int]:
    """The checked indices of tensors that the sender had on a device; none if the body names none."""
    indices: Any = message.body.get(STAGED, [])
    known = [index for index, tensor in enumerate(message.tensors) if tensor is not None]
    are_whole = isinstance(indices, list) and all(type(index) is int for index in indices)
    if not are_whole or indices != [index for index in known if index in indices]:
        reason = f"is {indices!r:.80}, must be an ascending array of indices of tensors, which are {known}"
        raise FrameError(message.sender, f"body.{STAGED}", reason)
    return list(indices)


async def on_device(message: Message, indices: list[int], copies: DeviceCopies, peer: int) -> Message:
    body = {key: value for key, value in message.body.items() if key != STAGED}
    tensors = await with_copies(message.tensors, indices, partial(copies.to_device, peer=peer))
    return replace(message, tensors=tuple(tensors), body=body)


class Arrivals:
    """Messages of one peer, passed on in the order of their channels, each once it is whole."""

    # ``on_failed`` takes the channel, the bytes and the error of a message that did not become whole. Where a P2P
    # channel failed, those behind it would never end; an error of this process's device cost that message alone.

    def __init__(
        self,
        deliver: Callable[[Message, int], None],
        on_failed: Callable[[Channel, int, TransportError | P2PError], None],
    ) -> None:
        self._deliver = deliver
        self._on_failed = on_failed
        self._queues = {channel: deque[Message | asyncio.Future[Message]]() for channel in Channel}
        self.completing: set[asyncio.Future[Message]] = set()

    def is_first_pending(self, channel: Channel) -> bool:
        """Whether the next message of a channel is being completed."""
        queue = self._queues[channel]
        return bool(queue) and not isinstance(queue[0], Message)

    def add(self, message: Message) -> None:
        self._queues[message.channel].append(message)
        self._flush(message.channel)

    def add_pending(self, message: Message, num_bytes: int, completing: Awaitable[Message]) -> None:
        future = asyncio.ensure_future(completing)
        self._queues[message.channel].append(future)
        self.completing.add(future)
        future.add_done_callback(partial(self._on_completed, message, num_bytes))

    def _on_completed(self, message: Message, num_bytes: int, completed: asyncio.Future[Message]) -> None:
        self.completing.discard(completed)
        if completed.cancelled() or isinstance(error := completed.exception(), TransportClosedError | PeerLostError):
            return  # this end has ended the transfer
        channel = message.channel
        if isinstance(error, P2PError):
            self._on_failed(channel, num_bytes, error)
            return
        if error is not None:
            whose = f"tensors of {message.kind} {message.task} from rank {message.sender}"
            failure = TransportError(f"{type(error).__name__}: {error}, while {whose} were received")
            failure.__cause__ = error
            self._on_failed(channel, num_bytes, failure)
            self._queues[channel].remove(completed)
        self._flush(channel)

    def _flush(self, channel: Channel) -> None:
        queue = self._queues[channel]
        while queue:
            message = queue[0]
            if not isinstance(message, Message):
                if message in self.completing or message.exception() is not None:
                    return
                message = message.result()
            queue.popleft()
            self._deliver(message, message.num_bytes)

    def end(self) -> None:
        """Complete no more messages; copies under way end by themselves. May be called twice."""
        for completing in self.completing:
            completing.cancel()


class StagedLink:
    """The connection to ``peer`` over ``base``; see `rrfp.transports.links.linked.LinkContract`."""

    def __init__(self, peer: int, base: Transport, owner: TunnelTransport, home: HomeLoop) -> None:
        self.peer = peer
        self.base = base
        self.is_connected = True
        self.opened = asyncio.Event()
        self.opened.set()
        self.at_once = contract.sending_at_once(base)
        copies = owner.context.copies
        self._copies = None if copies is None or copies.kind in base.carries else copies
        self._owner = owner
        self._home = home
        self._arrivals = Arrivals(self._on_whole, self._on_missed)
        self.outlets = {channel: self._new_outlet(channel) for channel in Channel}
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

    def to_stage(self, message: Message) -> list[int]:
        """The indices of the tensors that pass through host memory, once all tensors can be sent."""
        if self._copies is None:
            return []
        if indices := held_by(self._copies, message.tensors):
            check_message(message, message.num_bytes, self._owner.context)
        return indices

    async def send_whole(self, message: Message) -> None:
        """Send a message by the base transport alone; cancelled while it copies, nothing."""
        copies, base, loan = self._copies, self.base, None
        if copies is None or not (indices := self.to_stage(message)):
            await base.send(self.peer, message)
            return
        if isinstance(base, contract.LendsMemory):
            sizes = [tensor.numel() * tensor.itemsize for tensor in message.tensors if tensor is not None]
            loan = base.lend(self.peer, message.channel, sizes)
        try:
            await base.send(self.peer, await on_host(message, indices, copies, self.peer, loan))
        finally:
            if loan is not None:
                loan.close()

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
        try:
            if not self._reported:
                self._add(message)
        except FrameError as error:
            self._owner.on_bad_frame(error)

    def _add(self, message: Message) -> None:
        copies, indices = self._copies, staged_indices(message)
        self._unreceived[message.channel] += 1
        if copies is not None and indices:
            completing = on_device(message, indices, copies, self.peer)
            self._arrivals.add_pending(message, message.num_bytes, completing)
        else:
            self._arrivals.add(message)

    def _on_whole(self, message: Message, num_bytes: int) -> None:
        if not self._reported:
            self._owner.on_message(message, num_bytes)
        self._report_if_idle()

    def _on_missed(self, channel: Channel, num_bytes: int, error: TransportError | P2PError) -> None:
        assert isinstance(error, TransportError)
        self.consumed(channel, num_bytes)
        self._owner.on_error(error)
        self._report_if_idle()

    def consumed(self, channel: Channel, num_bytes: int) -> None:
        self._unreceived[channel] -= 1
        self._received.set()

    # The ends.

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
        if self._loss is not None and not self._arrivals.completing:
            self._report()

    def _report(self) -> None:
        if (loss := self._loss) is not None and not self._reported:
            self.end(loss)
            self._owner.on_error(loss)

    def _fail(self, error: RrfpError) -> None:
        """Make all sends raise ``error``, unless they raise another one already."""
        self._error = self._error or error
        for outlet in self.outlets.values():
            outlet.window.fail(error)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def leave(self) -> None:
        await self._owner.leave_base(self.base)

    def end(self, error: RrfpError) -> None:
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
        async with self._turn:
            self.window.check()
            await self._link.send_whole(message)

    def send_at_once(self, message: Message, num_bytes: int) -> bool:
        """Only what the base transport can send at once."""
        link = self._link
        if link.at_once is None or self._turn.locked() or link.to_stage(message):
            return False
        return link.at_once.send_at_once(link.peer, message)


class TunnelTransport(LinkedTransport[StagedLink]):
    """Reads base transports for its links. A subclass calls `_start_bases`, `_read` and `_attach`."""

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        if context.copies is not None:
            self.carries |= {context.copies.kind}
        self._bases: tuple[Transport, ...] = ()
        self._reading: list[asyncio.Task[None]] = []
        #: Those that bound by themselves what was sent, and are read while somebody waits for a message.
        self._by_turns: tuple[Transport, ...] = ()
        self._wanted = asyncio.Event()
        self._waiting = 0
        #: What base transports brought before there were links.
        self._early: list[Message | RrfpError] = []
        #: Where the links over a base transport meet when they leave.
        self._leaving: dict[Transport, asyncio.Barrier] = {}

    async def _start_bases(self, bases: Iterable[Transport]) -> None:
        self._bases = tuple(bases)
        self._leaving = {base: asyncio.Barrier(max(1, len(base.context.peers))) for base in self._bases}
        await asyncio.gather(*(base.start() for base in self._bases))
        self._check_open()

    def _attach(self, links: Iterable[StagedLink]) -> None:
        self._links = {link.peer: link for link in links}
        early, self._early = self._early, []
        for entry in early:
            self._on_entry(entry)

    async def receive(self) -> Message:
        self._waiting += 1
        self._wanted.set()
        try:
            return await super().receive()
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._wanted.clear()

    def deliver_to(self, deliver: Deliver) -> None:
        super().deliver_to(deliver)
        self._wanted.set()

    def _read(self, base: Transport, *, by_turns: bool = False) -> None:
        """Read a base transport; ``by_turns``, only when asked and with room."""
        if by_turns:
            self._by_turns += (base,)
        if not by_turns and (direct := contract.delivering(base)) is not None:
            direct.deliver_to(self._on_entry)
        else:
            self._reading.append(asyncio.create_task(self._read_all(base, by_turns=by_turns)))

    async def _read_all(self, base: Transport, *, by_turns: bool) -> None:
        while True:
            if by_turns:
                await self._wanted.wait()
            try:
                entry: Message | RrfpError = await base.receive()
            except (PeerLostError, FrameError) as error:
                entry = error
            except TransportClosedError as error:
                if not (self._closing or self._is_closed):
                    self.on_error(error)
                return
            except Exception as error:  # of a plugin
                failure = TransportError(f"receiving failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
                self.on_error(failure)
                return
            if by_turns and isinstance(entry, Message):
                await self._links[entry.sender].room_for(entry.channel)
            self._on_entry(entry)

    def _on_entry(self, entry: Message | RrfpError) -> None:
        """A base transport brought a message, or an error that its ``receive`` would raise."""
        if self._is_closed:
            return
        if not self._links:
            self._early.append(entry)
        elif isinstance(entry, Message):
            self._links[entry.sender].on_message(entry)
        elif isinstance(entry, PeerLostError):
            self._links[entry.peer].on_lost(entry)
        elif isinstance(entry, FrameError):
            self.on_bad_frame(entry)
        else:
            self.on_error(entry)

    def statistics(self) -> TransportStatistics:
        """Only base transports see strangers, and queue what is staged."""
        own, bases = super().statistics(), {base: base.statistics() for base in self._bases}
        queued = own.queued_bytes + sum(bases[base].queued_bytes for base in self._by_turns)
        return replace(own, queued_bytes=queued, strangers=sum(each.strangers for each in bases.values()))

    async def leave_base(self, base: Transport) -> None:
        """A link has left; returns when all over this base have, and it is closed."""
        await self._leaving[base].wait()
        await base.close()

    def _free(self) -> None:
        for base in self._bases:
            base.abort()
        for reading in self._reading:
            reading.cancel()
        if self.context.copies is not None:
            self.context.copies.close()


def staged(transport: Transport, copies: DeviceCopies | None) -> Transport:
    """``transport`` itself if it carries the device's tensors, else a `StagedTransport`."""
    return transport if copies is None or copies.kind in transport.carries else StagedTransport(transport, copies)


class StagedTransport(TunnelTransport):
    """Device tensors over ``base``, which sees CPU tensors only."""

    def __init__(self, base: Transport, copies: DeviceCopies) -> None:
        super().__init__(replace(base.context, copies=copies))
        self.carries |= base.carries
        self._bases = (base,)

    async def _connect(self, home: HomeLoop, deadline_s: float) -> None:
        (base,) = self._bases
        await self._start_bases([base])
        self._attach(StagedLink(peer, base, self, home) for peer in self.context.peers)
        self._read(base, by_turns=True)
