"""Links over a base transport: one that stages device tensors in host memory, and one with a P2P channel beside it.

`StagedLink` needs nothing of the other end, which may be the base transport alone. Its memory is bounded by the base
transport, of which the next message of a channel is read when the one before has been received.

The two ends of a `TunnelLink` bound by windows of their own what was sent and not received. They have two observers of
a peer's end. The base transport reports it once, after the peer's last message and with the reason. A P2P channel only
fails. So a failed one is no loss before the base transport had `FAREWELL_TIMEOUT_S` to report that, or the peer's
farewell; and a loss that the base transport reports waits `LAST_MESSAGES_S` for tensors that still move.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from rrfp import timeouts
from rrfp.errors import ConfigError, FrameError, PeerLostError, RrfpError, TransportError
from rrfp.transports.base import Channel, Message, Plain, Transport, TransportContext, sending_at_once
from rrfp.transports.links.flow import Credits, HomeLoop, Window, cost_of, grant
from rrfp.transports.tunnel.announcements import (
    BESIDE,
    CREDIT,
    DEVICES,
    ENTRY,
    FAREWELL,
    WANT,
    TensorHeader,
    announced,
    announcement,
    check_body,
    entry_of,
    number_of,
)
from rrfp.transports.tunnel.arrivals import Arrivals
from rrfp.transports.tunnel.p2p import P2PChannel, P2PError
from rrfp.transports.tunnel.staging import Staging, failure_of, staged_indices
from rrfp.transports.wire.tensor_bytes import check_sendable

LEFT = "it closed its end"

#: So many seconds after its start, a copy to the device is late. They last milliseconds.
LATE_S = 0.5


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
        """One link has left; returns when all over this base have, and it is closed."""


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
        """Wait until ``receive`` has returned the message of ``channel`` before.

        Behind a copy that is late there is room: where the device is stuck, an abort must get through.
        """
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
        """Tensors failed to move. Which of the ends that this may mean is left to the base transport, for a while."""
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


class TunnelLink(StagedLink):
    """The connection to a peer whose end is such a link too: what ``beside`` can move does not pass ``base``.

    ``make_beside`` makes the channel for the link; None where the two exchange tensors over the base transport.
    """

    def __init__(
        self,
        peer: int,
        base: Transport,
        owner: TunnelOwner,
        home: HomeLoop,
        make_beside: Callable[[TunnelLink], P2PChannel] | None = None,
    ) -> None:
        super().__init__(peer, base, owner, home)
        self.beside = None if make_beside is None else make_beside(self)
        self._credits = Credits(owner.context.queue_bytes, self._send_credit)
        #: Counts the whole messages of each channel, as those of links' own count too.
        self._sequences = dict.fromkeys(Channel, 0)
        #: The number of the next transfer; the lock keeps announcements in the order of numbers.
        self._number = 0
        self._announcing = asyncio.Lock()
        #: Sends that have begun, and entries that wait to be sent.
        self._tasks: set[asyncio.Task[None]] = set()
        #: For sends that only know that their transfer failed.
        self._failed = asyncio.Event()
        #: The peer's farewell has come, and the error of the first transfer from it that failed.
        self._has_left = False
        self._missed: P2PError | None = None

    def _new_outlet(self, channel: Channel) -> Outlet:
        ask = partial(self.post, {WANT: [channel.value]})  # have the peer return what it has consumed
        return TunnelOutlet(self, Window(self._owner.context.queue_bytes, self._home, ask))

    def _add(self, message: Message) -> None:
        body, beside, sender = message.body, self.beside, message.sender
        if FAREWELL in body:
            self._on_farewell()
        elif CREDIT in body:
            grant(sender, CREDIT, body[CREDIT], lambda channel: self._outlets[channel].window)
        elif WANT in body:
            self._credits.want(sender, WANT, body[WANT])
        elif ENTRY not in body and BESIDE not in body:
            super()._add(message)
        elif beside is None or (BESIDE in body and message.channel is Channel.CONTROL):
            raise FrameError(sender, BESIDE if BESIDE in body else ENTRY, "comes where no tensors go beside")
        elif ENTRY in body:
            beside.on_entry(body[ENTRY])
        else:
            self._add_announced(message, beside)

    def _add_announced(self, message: Message, beside: P2PChannel) -> None:
        number, fields = number_of(message)
        try:
            header = announced(message, self._owner.context.max_message_bytes)
        except FrameError:
            if not beside.refuse(number, fields):
                self.on_failed(P2PError("an announcement was refused, so later ones cannot be matched"))
            raise
        received = beside.receive(number, header.moved, fields)
        self._arrivals.add_pending(message.channel, header.num_bytes, _assembled(header, received))

    def _on_whole(self, message: Message, num_bytes: int) -> None:
        number = self._sequences[message.channel]
        self._sequences[message.channel] += 1
        super()._on_whole(replace(message, sequence=number), num_bytes)

    def consumed(self, channel: Channel, num_bytes: int) -> None:
        """See `LinkContract.consumed`."""
        if not self._reported:
            self._credits.consumed(channel, num_bytes)

    async def announce(self, message: Message, moved: list[int]) -> Awaitable[None]:
        """Announce a message, whose tensors at the indices ``moved`` go beside; returns the end of their transfer."""
        assert self.beside is not None
        transfer = await self.beside.prepare([t for index in moved if (t := message.tensors[index]) is not None])
        async with self._announcing:
            await self.base.send(self.peer, announcement(message, self._number, moved, transfer.fields))
            self._number += 1
            return transfer.start(self._number - 1, message.channel)

    # The peer's end.

    def on_failed(self, error: P2PError) -> None:
        """A transfer from the peer failed: a message of which ``receive`` must not say nothing, farewell or not."""
        self._missed = self._missed or error
        if self._has_left:
            self._on_farewell()
        else:
            super().on_failed(error)

    def _on_farewell(self) -> None:
        self._has_left = True
        if self._missed is not None:
            self.on_lost(PeerLostError(self.peer, f"{LEFT}, but its tensors failed to arrive: {self._missed!s:.200}"))
        else:
            self._stop_timer()
            self._fail(PeerLostError(self.peer, LEFT))

    async def reason(self, error: P2PError) -> RrfpError:
        """Why a transfer to the peer failed."""
        super().on_failed(error)
        await self._failed.wait()
        assert self._error is not None
        return self._error

    def _fail(self, error: RrfpError) -> None:
        super()._fail(error)
        self._failed.set()
        if self.beside is not None:
            self.beside.end_sending(error)

    def _report(self) -> None:
        super()._report()
        if self.beside is not None and self._loss is not None:
            self.beside.end(self._loss)

    # This rank's end.

    async def leave(self) -> None:
        """See `LinkContract.leave`: the peer has received everything when it gets the farewell."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self.beside is not None:
            await self.beside.close()
        if self._error is None:
            await self._send_entry({FAREWELL: True})
        await super().leave()

    def end(self, error: RrfpError) -> None:
        """See `LinkContract.end`."""
        super().end(error)
        self._credits.close()
        if self.beside is not None:
            self.beside.end(error)

    def _send_credit(self, channel: str, cost: int, messages: int) -> None:
        self.post({CREDIT: [channel, cost, messages]})

    def post(self, body: Mapping[str, Plain]) -> None:
        """Send an entry without waiting; their order does not matter."""
        if self.at_once is None or not self.at_once.send_at_once(self.peer, entry_of(body)):
            self.run(self._send_entry(body))

    async def _send_entry(self, body: Mapping[str, Plain]) -> None:
        try:
            await self.base.send(self.peer, entry_of(body))
        except RrfpError:
            return  # the peer needs it no more

    def run(self, sending: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that `leave` waits for."""
        task: asyncio.Task[None] = asyncio.create_task(sending)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class TunnelOutlet(Outlet):
    """One channel to one peer.

    A send that is cancelled while it waits for its turn or for room has sent nothing; one that has begun goes on to its
    end, since the caller's memory is read until then. The peer makes room whatever its rank does, so that is soon.
    """

    _link: TunnelLink

    def _moved(self, message: Message, num_bytes: int) -> list[int]:
        """The indices of the tensors that go beside; a ConfigError for a message that the peer would refuse."""
        beside, context = self._link.beside, self._link.base.context
        if num_bytes > context.max_message_bytes:
            raise ConfigError(f"message has {num_bytes} bytes, max_message_bytes is {context.max_message_bytes}")
        check_body(message.body)
        if beside is None or message.channel is Channel.CONTROL:
            return []
        moved = [i for i, tensor in enumerate(message.tensors) if tensor is not None and beside.moves(tensor)]
        for tensor in message.tensors if moved else ():
            if tensor is not None:
                check_sendable(tensor, context.copies)
        return moved

    async def send(self, message: Message, num_bytes: int) -> None:
        """See `OutletContract.send`."""
        moved = self._moved(message, num_bytes)
        cost = cost_of(num_bytes)
        await self._turn.acquire()
        try:
            await self.window.acquire(cost)
        except BaseException:
            self._turn.release()
            raise
        await _to_its_end(self._link.run(self._send(message, moved, cost)))

    async def _send(self, message: Message, moved: list[int], cost: int) -> None:
        """Send a message in its turn, which ends when the next one may follow."""
        transfer: Awaitable[None] | None = None
        try:
            if moved:
                transfer = await self._link.announce(message, moved)
            else:
                await self._link.send_whole(message)
        except BaseException:
            self.window.release(cost)
            raise
        finally:
            self._turn.release()
        if transfer is not None:
            try:
                await transfer
            except P2PError as error:
                raise await self._link.reason(error) from error

    def send_at_once(self, message: Message, num_bytes: int) -> bool:
        """See `OutletContract.send_at_once`: only what the base transport can send at once."""
        cost = cost_of(num_bytes)
        if self._turn.locked() or self._moved(message, num_bytes) or not self.window.try_acquire(cost):
            return False
        if super().send_at_once(message, num_bytes):
            return True
        self.window.release(cost)
        return False


async def _assembled(header: TensorHeader, received: Awaitable[list[Tensor]]) -> Message:
    try:
        return header.assemble(await received)
    except (RrfpError, P2PError):
        raise
    except Exception as error:
        raise failure_of(error, header.message) from error


async def _to_its_end(task: asyncio.Task[None]) -> None:
    """Wait for the end of a task, also when cancelled meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # read: the caller gave up
        raise cancelled
    task.result()
