"""Ranks in processes of their own, over ZeroMQ: ipc within a host, tcp between hosts.

Every rank binds one socket and publishes its address; for each channel of each peer it connects one socket that only
sends. So the three channels are connections of their own, and control never waits behind data.

A link greets (hello on every channel, then welcome back), is open, and leaves in order (bye on every channel, farewell
back) or is lost. Connecting a zmq socket succeeds before the peer listens, so only a frame that arrives shows that a
channel is open: hence a greeting on each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import zmq

from rrfp import timeouts
from rrfp.errors import PeerLostError, RrfpError, TransportError
from rrfp.log import get_logger
from rrfp.transports.base import Channel, TransportContext
from rrfp.transports.links.flow import HomeLoop, Window
from rrfp.transports.links.linked import BYE, HELLO, LEFT, WANT, WELCOME, GreetedLink, LinkedTransport
from rrfp.transports.rendezvous import by_peer, publish_in_time
from rrfp.transports.wire.codec import Codec, Sealed
from rrfp.transports.zmq.endpoint import IPC, choose_address
from rrfp.transports.zmq.inlet import FAREWELL, ZmqInlet, identity_of
from rrfp.transports.zmq.outlet import ZmqOutlet, open_socket
from rrfp.transports.zmq.security import ALL_CHANNELS, Gate, Published, Security


class ZmqLink(GreetedLink[ZmqOutlet]):
    """The connection to one peer. Used on one loop only."""

    def __init__(self, peer: int, codec: Codec, queue_bytes: int, on_lost: Callable[[PeerLostError], None]) -> None:
        super().__init__(peer, queue_bytes)
        self.delivered = asyncio.Event()
        self._codec = codec
        self._on_lost = on_lost
        self._greeted: set[Channel] = set()
        self._ended: set[Channel] = set()
        self._grace: asyncio.TimerHandle | None = None
        self._welcomed = False

    def connect(self, outlets: dict[Channel, ZmqOutlet]) -> None:
        self.outlets = outlets
        for channel, outlet in outlets.items():
            outlet.post(self._codec.seal(HELLO, channel.value))
        self._welcome()

    def _welcome(self) -> None:
        if self.outlets and len(self._greeted) == len(Channel):
            self._post(WELCOME)
            self._open()

    def _open(self) -> None:
        if self._welcomed and self.outlets and len(self._greeted) == len(Channel):
            self.is_connected = True
            self.opened.set()

    def _post(self, kind: str, *fields: object) -> None:
        if self.outlets:
            self.outlets[Channel.CONTROL].post(self._codec.seal(kind, *fields))

    def ask(self, channel: Channel) -> None:
        """Have the peer return what it has consumed: a sender waits."""
        self._post(WANT, channel.value)

    def on_frame(self, channel: Channel, sealed: Sealed) -> None:
        if sealed.kind == HELLO:
            if channel not in self._greeted:
                self._greeted.add(channel)
                self._welcome()
        elif sealed.kind == WELCOME:
            self._welcomed = True
            self._open()
        elif sealed.kind == FAREWELL:
            self.delivered.set()
        else:
            super().on_frame(channel, sealed)

    def _on_left(self) -> None:
        self._post(FAREWELL)
        super()._on_left()

    def on_disconnected(self, channel: Channel) -> None:
        """An inbound connection ended, after all its frames were handled."""
        self._ended.add(channel)
        if self._has_left:
            if len(self._ended) == len(Channel):
                self.end(PeerLostError(self.peer, LEFT))
        elif len(self._ended) == len(Channel):
            self._lose()
        elif self._grace is None:
            # The three connections of a process that dies end one by one, and the last may still carry the abort that
            # names the cause: it is read before the loss is reported.
            self._fail_sends(PeerLostError(self.peer, f"its {channel} connection ended"))
            self._grace = asyncio.get_running_loop().call_later(timeouts.BREAK_GRACE_S, self._lose)

    def _lose(self) -> None:
        if self._is_over:
            return
        error = PeerLostError(self.peer, "its connection ended or fell silent")
        self.end(error)
        self._on_lost(error)

    def end(self, error: RrfpError) -> None:
        """Free all resources; sends raise the first ``error`` passed. May be called twice."""
        self._is_over = True
        self.opened.set()
        self.delivered.set()
        if self._grace is not None:
            self._grace.cancel()
        self._credits.close()
        self._fail_sends(error)

    def _fail_sends(self, error: RrfpError) -> None:
        for outlet in self.outlets.values():
            outlet.fail(error)

    async def leave(self) -> None:
        """Deliver the accepted messages, send bye and wait for farewell."""
        if self._is_over or self._has_left:
            return
        with suppress(RrfpError):
            for outlet in self.outlets.values():
                await outlet.post_in_turn(self._codec.seal(BYE))
            await self.delivered.wait()


_log = get_logger(__name__)


class ZmqTransport(LinkedTransport[ZmqLink]):
    """Between processes: ipc within a host, tcp between hosts.

    Args:
        context: this rank, its peers and the limits.
        address: the address to bind: ``"ipc"``, or an IP address or host name of this machine. By default ipc when all
            ranks are on this host, else that of the interface towards MASTER_ADDR.
    """

    def __init__(
        self, context: TransportContext, address: str | None = None, whole: LinkedTransport[Any] | None = None
    ) -> None:
        super().__init__(context, whole)
        self._address = address
        self._zmq: zmq.Context[zmq.Socket[bytes]] | None = None
        self._gate: Gate | None = None
        self._inlets: list[ZmqInlet] = []

    async def _connect(self, home: HomeLoop, deadline_s: float) -> None:
        context, on_lost = self.context, self._whole.on_error
        self._links = {peer: ZmqLink(peer, self._codec, context.queue_bytes, on_lost) for peer in context.peers}
        security = Security(context)
        address = await choose_address(context, self._address)
        self._check_open()
        self._zmq = zmq.Context()
        self._gate = Gate(self._zmq, self._whole.on_rejected)
        security.admit_passwords(self._gate)
        endpoints = self._listen(address, security)
        await publish_in_time(context, endpoint_key(context, context.rank), security.publish(endpoints))
        published = await by_peer(context.peers, lambda peer: self._look_up(peer, security, deadline_s))
        self._check_open()
        self._gate.close_list()
        for peer, each in published.items():
            try:
                outlets = {channel: self._outlet(peer, each, channel, security, home) for channel in Channel}
            except zmq.ZMQError as error:
                raise TransportError(
                    f"cannot connect to {each.endpoint.encode()!r:.200}, which rank {peer} or another program wrote "
                    f"to the store: {error}"
                ) from error
            self._links[peer].connect(outlets)

    def _listen(self, address: str, security: Security) -> list[str]:
        """Bind the listeners; returns their endpoints."""
        assert self._zmq is not None
        context, is_tcp = self.context, address != IPC
        for channels in security.listeners if is_tcp else (ALL_CHANNELS,):
            protection = security if is_tcp else None
            inlet = ZmqInlet(self._zmq, self._codec, context, self._whole, self._links, channels, protection)
            self._inlets.append(inlet)
        if len(self._inlets) > 1:
            _log.warning("rank %d exchanges tensors in plain text over tcp, as data='plain' asks", context.rank)
        return [inlet.bind(address, context.rank) for inlet in self._inlets]

    async def _look_up(self, peer: int, security: Security, deadline_s: float) -> Published:
        """What a peer published, once it is checked and the peer may connect."""
        published = security.check(peer, await self._endpoint_of(peer, endpoint_key(self.context, peer), deadline_s))
        assert self._gate is not None
        security.admit(peer, published, self._gate)
        return published

    def _outlet(
        self, peer: int, published: Published, channel: Channel, security: Security, home: HomeLoop
    ) -> ZmqOutlet:
        assert self._zmq is not None
        identity = identity_of(self.context.rank, channel)
        protect = partial(security.protect_outlet, peer=peer, published=published, channel=channel)
        socket = open_socket(self._zmq, identity, channel, protect)
        window = Window(self.context.queue_bytes, home, partial(self._links[peer].ask, channel))
        return ZmqOutlet(socket, self._codec, window, home)

    def _free(self) -> None:
        for inlet in self._inlets:
            inlet.close()
        if self._gate is not None:
            self._gate.close()
        if self._zmq is not None:
            self._zmq.destroy(linger=0)  # returns at once, as every socket is closed and drops its queue


def endpoint_key(context: TransportContext, rank: int) -> str:
    return f"zmq/{context.run_id}/{context.restart}/{rank}"
