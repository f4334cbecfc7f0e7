"""Links with a P2P channel: tensors that it can move go beside the base transport.

Both ends bound by windows of their own what was sent and not received. They have two observers of a peer's end. The
base transport reports it once, after the peer's last message and with the reason. A P2P channel only fails. So a failed
one is no loss before the base transport had `FAREWELL_TIMEOUT_S` to report that, or the peer's farewell; and a loss
that the base transport reports waits `LAST_MESSAGES_S` for tensors that still move.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from rrfp import timeouts
from rrfp.errors import FrameError, PeerLostError, RrfpError, TransportError
from rrfp.transports.base import Channel, Message, Plain, Transport
from rrfp.transports.links.flow import Credits, HomeLoop, Window, background, cost_of, grant, to_its_end
from rrfp.transports.links.linked import LEFT
from rrfp.transports.tunnel.p2p import (
    BESIDE,
    CREDIT,
    ENTRY,
    FAREWELL,
    WANT,
    P2PChannel,
    P2PError,
    announced,
    announcement,
    check_body,
    entry_of,
    number_of,
)
from rrfp.transports.tunnel.transport import Outlet, StagedLink, TunnelTransport, check_message


class TunnelLink(StagedLink):
    """A link with a P2P channel, made by ``make_beside``; None if ``base`` brings all."""

    def __init__(
        self,
        peer: int,
        base: Transport,
        owner: TunnelTransport,
        home: HomeLoop,
        make_beside: Callable[[TunnelLink], P2PChannel] | None = None,
    ) -> None:
        super().__init__(peer, base, owner, home)
        self.beside = None if make_beside is None else make_beside(self)
        self._credits = Credits(owner.context.queue_bytes, lambda *credit: self.post({CREDIT: list(credit)}))
        #: Counts the whole messages of each channel, as those of links' own count too.
        self._sequences = dict.fromkeys(Channel, 0)
        #: The number of the next transfer; the lock keeps announcements in the order of numbers.
        self._number = 0
        self._announcing = asyncio.Lock()
        #: Sends that have begun, and entries that wait to be sent.
        self._tasks: set[asyncio.Task[None]] = set()
        #: The peer's farewell has come, and the error of the first transfer that failed.
        self._has_left = False
        self._missed: P2PError | None = None

    def _new_outlet(self, channel: Channel) -> Outlet:
        ask = partial(self.post, {WANT: [channel.value]})  # have the peer return what it has consumed
        return TunnelOutlet(self, Window(self._owner.context.queue_bytes, self._home, ask))

    def _add(self, message: Message) -> None:
        body, beside, sender = message.body, self.beside, message.sender
        if FAREWELL in body:
            self._has_left = True
            self._on_left()
        elif CREDIT in body:
            grant(sender, CREDIT, body[CREDIT], lambda channel: self.outlets[channel].window)
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
            beside.refuse(number, fields)
            raise
        received = beside.receive(number, header.moved, fields)
        self._arrivals.add_pending(message, header.num_bytes, header.assemble(received))

    def _on_whole(self, message: Message, num_bytes: int) -> None:
        number = self._sequences[message.channel]
        self._sequences[message.channel] += 1
        super()._on_whole(replace(message, sequence=number), num_bytes)

    def consumed(self, channel: Channel, num_bytes: int) -> None:
        self._credits.consumed(channel, num_bytes)

    async def announce(self, message: Message, moved: list[int]) -> Awaitable[None]:
        """Announce a message whose tensors at ``moved`` go beside; returns their end."""
        assert self.beside is not None
        transfer = await self.beside.prepare([t for index in moved if (t := message.tensors[index]) is not None])
        async with self._announcing:
            await self.base.send(self.peer, announcement(message, self._number, moved, transfer.fields))
            self._number += 1
            return transfer.start(self._number - 1, message.channel)

    # The ends.

    def _on_missed(self, channel: Channel, num_bytes: int, error: TransportError | P2PError) -> None:
        if isinstance(error, P2PError):
            self.on_failed(error)
        else:
            super()._on_missed(channel, num_bytes, error)

    def on_failed(self, error: P2PError) -> RrfpError:
        """Tensors failed to move. Returns the loss; the base transport may have another reason, or report one yet."""
        self._missed = self._missed or error
        lost = PeerLostError(self.peer, f"its tensors failed to arrive, or those for it: {error!s:.200}")
        if self._has_left:
            self._on_left()
        elif self._loss is not None:
            self._report_if_idle()
        elif self._error is None and self._timer is None:
            self._timer = self._home.loop.call_later(timeouts.FAREWELL_TIMEOUT_S, self.on_lost, lost)
        return self._error or lost

    def _on_left(self) -> None:
        """In order, so it holds for delivered what failed."""
        if self._missed is not None:
            self.on_lost(PeerLostError(self.peer, f"{LEFT}, but its tensors failed to arrive: {self._missed!s:.200}"))
        else:
            self._fail(PeerLostError(self.peer, LEFT))

    def _fail(self, error: RrfpError) -> None:
        super()._fail(error)
        if self.beside is not None:
            self.beside.end_sending(error)

    async def leave(self) -> None:
        """The peer has received everything when it gets the farewell."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self.beside is not None:
            await self.beside.close()
        if self._error is None:
            await self._send_entry({FAREWELL: True})
        await super().leave()

    def end(self, error: RrfpError) -> None:
        super().end(error)
        self._credits.close()
        if self.beside is not None:
            self.beside.end(error)

    def post(self, body: Mapping[str, Plain]) -> None:
        """Send an entry without waiting; their order does not matter."""
        if self.at_once is None or not self.at_once.send_at_once(self.peer, entry_of(body)):
            self.run(self._send_entry(body))

    async def _send_entry(self, body: Mapping[str, Plain]) -> None:
        with suppress(RrfpError):  # the peer needs it no more
            await self.base.send(self.peer, entry_of(body))

    def run(self, sending: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that `leave` waits for."""
        task = background(sending)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class TunnelOutlet(Outlet):
    """One channel to one peer."""

    # A send that is cancelled while it waits for its turn or for room has sent nothing; one that has begun goes on to
    # its end, as the caller's memory is read until then. The peer makes room whatever its rank does, so that is soon.

    _link: TunnelLink

    def _moved(self, message: Message, num_bytes: int) -> list[int]:
        """The indices of tensors that go beside; a ConfigError for a bad message."""
        beside, context = self._link.beside, self._link.base.context
        moved: list[int] = []
        check_body(message.body)
        if beside is not None and message.channel is not Channel.CONTROL:
            moved = [i for i, tensor in enumerate(message.tensors) if tensor is not None and beside.moves(tensor)]
        if moved or num_bytes > context.max_message_bytes:
            check_message(message, num_bytes, context)
        return moved

    async def send(self, message: Message, num_bytes: int) -> None:
        moved = self._moved(message, num_bytes)
        cost = cost_of(num_bytes)
        await self._turn.acquire()
        try:
            await self.window.acquire(cost)
        except BaseException:
            self._turn.release()
            raise
        await to_its_end(self._link.run(self._send(message, moved, cost)))

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
                raise self._link.on_failed(error) from error

    def send_at_once(self, message: Message, num_bytes: int) -> bool:
        cost = cost_of(num_bytes)
        if self._turn.locked() or self._moved(message, num_bytes) or not self.window.try_acquire(cost):
            return False
        if super().send_at_once(message, num_bytes):
            return True
        self.window.release(cost)
        return False
