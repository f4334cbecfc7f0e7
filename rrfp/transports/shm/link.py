"""The state of the connection to one peer, and its three channels.

Connecting (three sockets, each greeted) -> open -> left in order (bye on every channel) or lost. Everything that a
process sent before its end lies in this rank's sockets already, also its bye or the abort that names a cause. So when
one socket ends, all are read to their end, and then the rank knows whether the peer left or died.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from rrfp.errors import FrameError, PeerLostError, RrfpError
from rrfp.transports.base import Channel
from rrfp.transports.links.flow import Credits, Window, apply_credit
from rrfp.transports.shm.datagrams import pack
from rrfp.transports.shm.inlet import BYE, CREDIT, HELLO, LOST, WANT, WELCOME, ShmInlet, ShmReceiver
from rrfp.transports.shm.outlet import ShmOutlet
from rrfp.transports.shm.packets import PacketSocket
from rrfp.transports.shm.shared import TransportState
from rrfp.transports.wire.codec import Sealed
from rrfp.transports.wire.header_checks import HeaderChecks

#: Datagrams that are read of one channel before the loop runs.
_BATCH = 32


class LinkOwner(ShmReceiver, Protocol):
    """The owner of links: also learns of their ends."""

    def on_lost(self, error: PeerLostError) -> None:
        """A peer is lost, and its last message was reported."""


@dataclass(slots=True)
class _Connection:
    """One channel: its socket, and what arrives."""

    packets: PacketSocket
    inlet: ShmInlet
    has_ended: bool = False


class ShmLink:
    """The connection to one peer. Used on one loop only."""

    def __init__(self, peer: int, shared: TransportState, owner: LinkOwner) -> None:
        self.peer = peer
        self.process: int | None = None
        self.is_connected = False
        self.opened = asyncio.Event()
        self._shared = shared
        self._owner = owner
        self.outlets: dict[Channel, ShmOutlet] = {}
        self._connections: dict[Channel, _Connection] = {}
        self._welcomed: set[Channel] = set()
        self._byes: set[Channel] = set()
        self._credits = Credits(shared.queue_bytes, partial(self._post, Channel.CONTROL, CREDIT))
        self._is_over = False

    def attach(self, channel: Channel, packets: PacketSocket, process: int, *, accepted: bool) -> None:
        """Add the socket of a channel, which greets: with a hello, or a welcome if it was ``accepted``."""
        if self._is_over:  # the peer ended between two of its sockets
            packets.close()
            return
        shared = self._shared
        self.process = process
        outlet = ShmOutlet(self.peer, packets, shared, partial(self._post, Channel.CONTROL, WANT, channel.value))
        self.outlets = {**self.outlets, channel: outlet}  # a new one: `statistics` may be reading it in another thread
        self._connections[channel] = _Connection(packets, ShmInlet(self.peer, channel, shared, self._owner))
        packets.on_readable(partial(self._read, channel))
        if accepted:
            self._post(channel, WELCOME)
            self._on_welcome(channel)
        else:
            self._post(channel, HELLO, channel.value)

    def has(self, channel: Channel) -> bool:
        """Whether the channel has a socket."""
        return channel in self._connections

    def _on_welcome(self, channel: Channel) -> None:
        self._welcomed.add(channel)
        if len(self._welcomed) == len(Channel):
            self.is_connected = True
            self.opened.set()

    def _post(self, channel: Channel, kind: str, *fields: object) -> None:
        self._connections[channel].packets.post(pack(self._shared.codec.seal(kind, *fields)))

    def _read(self, channel: Channel) -> None:
        if self._read_batch(self._connections[channel], _BATCH):
            self.lose("its connection ended")

    def _read_batch(self, connection: _Connection, most: int | None = None) -> bool:
        """Read a channel until it is empty, has ended or ``most`` datagrams were read; whether it ended now."""
        buffer = self._shared.buffer
        view = memoryview(buffer)
        while not (self._is_over or connection.has_ended or most == 0):
            packet = connection.packets.read(buffer)
            if packet is None:
                return False
            if packet.size == 0:
                connection.has_ended = True
                return True
            connection.inlet.accept(packet, view)
            most = None if most is None else most - 1
        return False

    def on_frame(self, channel: Channel, sealed: Sealed) -> None:
        """Handle a frame of the link itself; a FrameError if a field is malformed."""
        if sealed.kind == WELCOME:
            self._on_welcome(channel)
        elif sealed.kind == CREDIT:
            apply_credit(sealed, self._window)
        elif sealed.kind == WANT:
            self._credits.want(sealed.sender, WANT, sealed.fields)
        elif sealed.kind == LOST:
            check = HeaderChecks(self.peer)
            (slot,) = check.array("lost", sealed.fields, 1)
            self.outlets[channel].pool.take_back(check.integer("lost.slot", slot, least=1))
        elif sealed.kind == BYE:
            self._byes.add(channel)
            if len(self._byes) == len(Channel):
                for outlet in self.outlets.values():
                    outlet.window.fail(self._left())

    def _window(self, channel: Channel) -> Window:
        outlet = self.outlets.get(channel)
        if outlet is None:
            raise FrameError(self.peer, "credit", "comes before the greeting")
        return outlet.window

    def _left(self) -> PeerLostError:
        return PeerLostError(self.peer, "it closed its end")

    def consumed(self, channel: Channel, num_bytes: int) -> None:
        """``receive`` returned a message of ``channel``: its bytes become credit for the sender."""
        if not self._is_over:
            self._credits.consumed(channel, num_bytes)

    def on_message_lost(self, channel: Channel, num_bytes: int, slot: int) -> None:
        """A message cannot be received here: its bytes become credit, and its sender forgets its slot."""
        self.consumed(channel, num_bytes)
        if slot:
            self._post(channel, LOST, slot)

    def lose(self, reason: str) -> None:
        """The peer has ended, or is silent: read what it sent, then report it, unless it left in order."""
        for connection in self._connections.values():
            self._read_batch(connection)
        if self._is_over:
            return
        if len(self._byes) == len(Channel):
            self.end(self._left())
            return
        error = PeerLostError(self.peer, reason)
        self.end(error)
        self._owner.on_lost(error)

    def end(self, error: RrfpError) -> None:
        """Free all resources; sends raise the first ``error`` passed. May be called twice."""
        self._is_over = True
        self.opened.set()
        self._credits.close()
        for outlet in self.outlets.values():
            outlet.fail(error)
        for connection in self._connections.values():
            connection.packets.close()
            connection.inlet.close()

    async def leave(self) -> None:
        """Send bye behind the accepted messages; returns when they are in the peer's sockets, or it is gone."""
        with suppress(RrfpError):
            for outlet in self.outlets.values():
                await outlet.post_in_turn(self._shared.codec.seal(BYE))
