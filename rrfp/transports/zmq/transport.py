"""Ranks in processes of their own, over ZeroMQ: ipc within a host, tcp between hosts.

Every rank binds one socket and publishes its address; for each channel of each peer it connects one socket that only
sends. So the three channels are connections of their own, and control never waits behind tensors. This file joins the
parts: `inlet` (receiving), `outlet` (one channel to one peer), `link` (the state of a connection),
`pieces` (cutting messages) and `endpoint` (addresses).
"""

from __future__ import annotations

from functools import partial

import zmq

from rrfp.errors import TransportError
from rrfp.transports.base import Channel, TransportContext
from rrfp.transports.flow import HomeLoop, Window
from rrfp.transports.linked import LinkedTransport
from rrfp.transports.rendezvous import publish_in_time
from rrfp.transports.wire import Sealed
from rrfp.transports.zmq.endpoint import choose_address
from rrfp.transports.zmq.inlet import Inlet, Route, identity_of
from rrfp.transports.zmq.link import Link
from rrfp.transports.zmq.outlet import Outlet, open_socket


class ZmqTransport(LinkedTransport[Link]):
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
        self._inlet: Inlet | None = None

    async def _connect(self, home: HomeLoop, deadline_s: float) -> None:
        context = self.context
        self._links = {peer: Link(peer, self._codec, context.queue_bytes, self.on_lost) for peer in context.peers}
        address = await choose_address(context, self._address)
        self._check_open()
        self._zmq = zmq.Context()
        self._inlet = Inlet(self._zmq, self._codec, context, self)
        own_endpoint = self._inlet.bind(address, context.rank)
        await publish_in_time(context, endpoint_key(context, context.rank), own_endpoint.encode())
        for peer in context.peers:
            endpoint = await self._endpoint_of(peer, endpoint_key(context, peer), deadline_s)
            try:
                outlets = {channel: self._outlet(peer, endpoint.decode(), channel, home) for channel in Channel}
            except (UnicodeDecodeError, zmq.ZMQError) as error:
                raise TransportError(
                    f"cannot connect to {endpoint!r:.200}, which rank {peer} published: {error}"
                ) from error
            self._links[peer].connect(outlets)

    def _outlet(self, peer: int, endpoint: str, channel: Channel, home: HomeLoop) -> Outlet:
        assert self._zmq is not None
        socket = open_socket(self._zmq, endpoint, identity_of(self.context.rank, channel), channel)
        window = Window(self.context.queue_bytes, home, partial(self._links[peer].ask, channel))
        return Outlet(socket, self._codec, window, home)

    def _free(self) -> None:
        if self._inlet is not None:
            self._inlet.close()
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
