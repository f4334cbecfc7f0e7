"""The state of one peer: three connections, a window each, credit, heartbeats, and how it ends.

Greeting (hello and welcome on each connection) -> open -> left in order (bye on each) or lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from rrfp.errors import FrameError, PeerLostError, RrfpError
from rrfp.transports import Channel, Codec, HomeLoop, Message, Sealed, TransportContext, Window, cost_of
from rrfp_plugin_example.uds.connection import Connection
from rrfp_plugin_example.uds.records import BEAT, BYE, CREDIT, WELCOME, Record


class Owner(Protocol):
    """The transport, to which a peer reports."""

    def on_message(self, message: Message) -> None:
        """A complete message arrived."""

    def on_bad_record(self, error: FrameError) -> None:
        """A record was dropped."""

    def on_lost(self, error: PeerLostError) -> None:
        """The peer is lost; all its messages were reported."""


class _Outlet:
    """One channel to the peer: the senders' turn, the window and the number of the next message."""

    def __init__(self, limit: int, home: HomeLoop) -> None:
        self.turn = asyncio.Lock()
        self.window = Window(limit, home)
        self.sequence = 0


class Peer:
    """See the module's docstring. Used on one loop only.

    Args:
        rank: the peer's.
        context: of this rank.
        codec: writes headers.
        home: the loop.
        owner: is called with messages and losses.

    Attributes:
        opened: set when all connections are open, or when the peer is gone.
        is_open: all connections are open, or were.
        is_lost: it died or fell silent.
    """

    def __init__(self, rank: int, context: TransportContext, codec: Codec, home: HomeLoop, owner: Owner) -> None:
        self.rank = rank
        self.opened = asyncio.Event()
        self.is_open = False
        self.is_lost = False
        self._context = context
        self._codec = codec
        self._loop = home.loop
        self._owner = owner
        self._outlets = {channel: _Outlet(context.queue_bytes, home) for channel in Channel}
        self._connections: dict[Channel, Connection] = {}
        self._greeted: set[Channel] = set()
        self._byes: set[Channel] = set()
        self._ended: set[Channel] = set()
        self._is_over = False
        self._heartbeat: asyncio.TimerHandle | None = None

    @property
    def queued_bytes(self) -> int:
        """Tensor bytes that the peer has not consumed."""
        return sum(outlet.window.tensor_bytes for outlet in self._outlets.values())

    def has(self, channel: Channel) -> bool:
        """Whether ``channel`` has its connection."""
        return channel in self._connections

    def attach(self, channel: Channel, connection: Connection, greeting: str, *, greeted: bool) -> None:
        """Take over a connection, and send ``greeting`` on it; ``greeted``: the peer's own greeting was read."""
        self._connections[channel] = connection
        connection.post(Record(self._codec.seal(greeting, channel.value)))
        if greeted:
            self._greet(channel)

    def _greet(self, channel: Channel) -> None:
        self._greeted.add(channel)
        if len(self._greeted) == len(Channel) and not self.is_open:
            self.is_open = True
            self.opened.set()
            self._beat()

    async def send(self, message: Message) -> None:
        """See `Transport.send`."""
        num_bytes = message.num_bytes
        self._codec.check_size(num_bytes)
        outlet, cost = self._outlets[message.channel], cost_of(num_bytes)
        async with outlet.turn:
            await outlet.window.acquire(cost)
            record: Record | None = None
            try:
                record = Record(*self._codec.encode(message, outlet.sequence))
                await self._connections[message.channel].write(record)
            finally:
                if record is not None and record.has_started:
                    outlet.sequence += 1
                else:
                    outlet.window.release(cost)

    def consumed(self, channel: Channel, num_bytes: int) -> None:
        """``receive`` returned a message: its bytes become room in the peer's window."""
        self._post(CREDIT, channel.value, cost_of(num_bytes))

    def _post(self, kind: str, *fields: object) -> None:
        self._connections[Channel.CONTROL].post(Record(self._codec.seal(kind, *fields)))

    def on_message(self, message: Message) -> None:
        """See `Receiver.on_message`."""
        self._owner.on_message(message)

    def on_bad_record(self, error: FrameError) -> None:
        """See `Receiver.on_bad_record`."""
        self._owner.on_bad_record(error)

    def on_link_record(self, channel: Channel, sealed: Sealed) -> None:
        """See `Receiver.on_link_record`."""
        if sealed.kind == WELCOME:
            self._greet(channel)
        elif sealed.kind == CREDIT:
            self._on_credit(sealed)
        elif sealed.kind == BYE:
            self._byes.add(channel)
            self.refuse_sends(PeerLostError(self.rank, "it closed its end"))

    def _on_credit(self, sealed: Sealed) -> None:
        match sealed.fields:
            case [str(name), int(cost)] if name in tuple(Channel) and cost >= 0:
                self._outlets[Channel(name)].window.release(cost)
            case fields:
                raise FrameError(self.rank, "credit", f"is {fields!r:.80}, must be a channel and its bytes")

    def ender(self, channel: Channel) -> Callable[[str], None]:
        """What to call when the connection of ``channel`` has ended."""
        return lambda reason: self._on_end(channel, reason)

    def _on_end(self, channel: Channel, reason: str) -> None:
        self._ended.add(channel)
        in_order = channel in self._byes
        if not in_order:
            # The peer is lost: what its other connections had delivered is read to the end before the loss is reported.
            self.refuse_sends(PeerLostError(self.rank, reason))
            for connection in self._connections.values():
                connection.shut()
        if len(self._ended) < len(self._connections):
            return
        if in_order and len(self._byes) == len(Channel):
            self.end(PeerLostError(self.rank, "it closed its end"))
        else:
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        if not self._is_over:
            self.is_lost = True
            error = PeerLostError(self.rank, reason)
            self.end(error)
            self._owner.on_lost(error)

    def _beat(self) -> None:
        """Tell the peer that this rank lives, and look for its own heartbeat."""
        patience_s = self._context.patience_s
        if self._silence_s() > patience_s:
            # The loop may itself have stood still for so long: look at what has arrived meanwhile.
            for connection in tuple(self._connections.values()):
                connection.read()
        if self._is_over:
            return
        if self._silence_s() > patience_s:
            self._lose(f"it was silent for {patience_s:g} s")
            return
        if self._connections[Channel.CONTROL].is_idle:
            self._post(BEAT)
        self._heartbeat = self._loop.call_later(self._context.heartbeat_s, self._beat)

    def _silence_s(self) -> float:
        if len(self._ended) == len(Channel):
            return 0.0
        return self._loop.time() - max(connection.last_read for connection in self._connections.values())

    def refuse_sends(self, error: RrfpError) -> None:
        """Make waiting and later `send` raise ``error``; a message that is being written is written to its end."""
        for outlet in self._outlets.values():
            outlet.window.fail(error)

    async def leave(self) -> None:
        """Write everything that was accepted, then bye; returns at once when the peer is gone."""
        with suppress(RrfpError):  # it is lost, or has left as well: in both cases no rank waits for the rest
            for channel, outlet in self._outlets.items():
                async with outlet.turn:
                    if self._is_over:
                        return
                    await self._connections[channel].write(Record(self._codec.seal(BYE)))

    def end(self, error: RrfpError) -> None:
        """Free everything at once; waiting and later `send` raise ``error``. May be called twice."""
        self._is_over = True
        self.opened.set()
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        self.refuse_sends(error)
        for connection in self._connections.values():
            connection.close(error)
