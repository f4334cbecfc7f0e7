"""Ranks in processes of their own, over ZeroMQ: ipc within a host, tcp between hosts.

Every rank binds one socket and publishes its address; for each channel of each peer it connects one socket that only
sends. So the three channels are connections of their own, and control never waits behind tensors. This file joins the
parts: `inlet` (receiving), `outlet` (one channel to one peer), `link` (the state of a connection),
`pieces` (cutting messages), `endpoint` (addresses), `security` (keys and what a rank publishes) and `gate` (which
connections it accepts).
"""

from __future__ import annotations

import asyncio
from functools import partial

import zmq

from rrfp.errors import TransportError
from rrfp.log import get_logger
from rrfp.transports.base import Channel, TransportContext
from rrfp.transports.links.flow import HomeLoop, Window
from rrfp.transports.links.linked import LinkedTransport
from rrfp.transports.rendezvous import publish_in_time
from rrfp.transports.wire.codec import Sealed
from rrfp.transports.zmq.endpoint import IPC, choose_address
from rrfp.transports.zmq.gate import Gate
from rrfp.transports.zmq.inlet import Route, ZmqInlet, identity_of
from rrfp.transports.zmq.link import ZmqLink
from rrfp.transports.zmq.outlet import ZmqOutlet, open_socket
from rrfp.transports.zmq.security import ALL_CHANNELS, Published, Security

_log = get_logger(__name__)


class ZmqTransport(LinkedTransport[ZmqLink]):
    """Between processes: ipc within a host, tcp between hosts.

    Cancelling a `send` after its first frame left copies the rest and sends it in the background.

    Args:
        context: this rank, its peers and the limits.
        address: the address to bind: ``"ipc"``, or an IP address or host name of this machine. By default ipc when all
            ranks are on this host, else that of the interface towards MASTER_ADDR.
    """

    def __init__(self, context: TransportContext, address: str | None = None) -> None:
        super().__init__(context)
        self._address = address
        self._zmq: zmq.Context[zmq.Socket[bytes]] | None = None
        self._gate: Gate | None = None
        self._inlets: list[ZmqInlet] = []

    async def _connect(self, home: HomeLoop, deadline_s: float) -> None:
        context = self.context
        self._links = {peer: ZmqLink(peer, self._codec, context.queue_bytes, self.on_lost) for peer in context.peers}
        security = Security(context)
        address = await choose_address(context, self._address)
        self._check_open()
        self._zmq = zmq.Context()
        self._gate = Gate(self._zmq, self.on_rejected)
        security.admit_passwords(self._gate)
        endpoints = self._listen(address, security)
        await publish_in_time(context, endpoint_key(context, context.rank), security.publish(endpoints))
        looks = [asyncio.create_task(self._look_up(peer, security, deadline_s)) for peer in context.peers]
        try:
            published = dict(zip(context.peers, await asyncio.gather(*looks), strict=True))
        finally:
            for look in looks:
                look.cancel()  # those that are left behind an error
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
            inlet = ZmqInlet(self._zmq, self._codec, context, self, channels, security if is_tcp else None)
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

    def on_link_frame(self, route: Route, sealed: Sealed) -> None:
        """See `Receiver.on_link_frame`."""
        self._links[route.peer].on_frame(route, sealed)

    def on_disconnected(self, peer: int, channel: Channel) -> None:
        """See `Receiver.on_disconnected`."""
        self._links[peer].on_disconnected(channel)


def endpoint_key(context: TransportContext, rank: int) -> str:
    """The key under which ``rank`` publishes its endpoint."""
    return f"zmq/{context.run_id}/{context.restart}/{rank}"
