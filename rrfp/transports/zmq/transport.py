"""Ranks in processes of their own, over ZeroMQ: ipc within a host, tcp between hosts.

Every rank binds one socket and publishes its address; for each channel of each peer it connects one socket that only
sends. So the three channels are connections of their own, and control never waits behind tensors. This file joins the
parts: `inlet` (receiving), `outlet` (one channel to one peer), `link` (the state of a connection),
`pieces` (cutting messages) and `endpoint` (addresses).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

import zmq

from rrfp.core import timeouts
from rrfp.errors import ConfigError, FrameError, TransportClosedError, TransportError
from rrfp.transports.base import Channel, Message, Transport, TransportContext, TransportStatistics
from rrfp.transports.flow import CLOSED, HomeLoop, Inbox
from rrfp.transports.rendezvous import publish_in_time
from rrfp.transports.wire import Codec, Sealed
from rrfp.transports.zmq.endpoint import choose_address
from rrfp.transports.zmq.inlet import Inlet, Route, identity_of
from rrfp.transports.zmq.link import Link
from rrfp.transports.zmq.outlet import Outlet, open_socket

#: Bad frames that wait to be raised; further ones are only counted, so that a sender of them cannot fill the memory.
MAX_PENDING_FRAME_ERRORS = 64


class ZmqTransport(Transport):
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
        self._codec = Codec(context)
        self._started = False
        self._closing = False
        self._closed: asyncio.Event | None = None
        self._is_closed = False
        self._zmq: zmq.Context[zmq.Socket[bytes]] | None = None
        self._home: HomeLoop | None = None
        self._inbox: Inbox | None = None
        self._inlet: Inlet | None = None
        self._links: dict[int, Link] = {}
        self._pending_errors = 0
        self._sent = self._sent_bytes = self._received = self._received_bytes = self._dropped = 0

    async def start(self) -> None:
        """Bind, publish the endpoint, and connect to every peer; see `Transport.start`."""
        if self._started or self._is_closed:
            raise TransportClosedError("a transport starts once")
        self._started = True
        context = self.context
        self._closed = asyncio.Event()
        self._home = HomeLoop()
        self._inbox = Inbox(self._home)
        self._links = {peer: Link(peer, self._codec, context.queue_bytes, self._inbox.put) for peer in context.peers}
        try:
            address = await choose_address(context, self._address)
            await self._connect(address, self._home.loop.time() + context.connect_timeout_s)
        except BaseException:
            self.abort()
            raise

    async def _connect(self, address: str, deadline_s: float) -> None:
        context, home = self.context, self._home
        assert home is not None
        self._check_open()
        self._zmq = zmq.Context()
        self._inlet = Inlet(self._zmq, self._codec, context, self)
        own_endpoint = self._inlet.bind(address, context.rank)
        await publish_in_time(context, endpoint_key(context, context.rank), own_endpoint.encode())
        for peer in context.peers:
            try:
                endpoint = await context.rendezvous.lookup(
                    endpoint_key(context, peer), max(0.0, deadline_s - home.loop.time())
                )
            except TransportError as error:
                raise TransportError(f"rank {peer} did not connect: {error}") from error
            self._check_open()
            try:
                outlets = {channel: self._outlet(endpoint.decode(), channel, home) for channel in Channel}
            except (UnicodeDecodeError, zmq.ZMQError) as error:
                raise TransportError(
                    f"cannot connect to {endpoint!r:.200}, which rank {peer} published: {error}"
                ) from error
            self._links[peer].connect(outlets)
        await self._wait_for_peers(deadline_s - home.loop.time())

    def _outlet(self, endpoint: str, channel: Channel, home: HomeLoop) -> Outlet:
        assert self._zmq is not None
        socket = open_socket(self._zmq, endpoint, identity_of(self.context.rank, channel), channel)
        return Outlet(socket, self._codec, self.context.queue_bytes, home)

    async def _wait_for_peers(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(max(timeout_s, 0.0)):
                for link in self._links.values():
                    await link.opened.wait()
        except TimeoutError:
            missing = [str(peer) for peer, link in self._links.items() if not link.opened.is_set()]
            limit_s = self.context.connect_timeout_s
            raise TransportError(f"no connection with rank {', '.join(missing)} within {limit_s:g} s") from None
        self._check_open()
        # A peer that connected and closed its end is no error here: `receive` and `send` report it.
        if lost := [str(peer) for peer, link in self._links.items() if not link.is_connected]:
            raise TransportError(f"rank {', '.join(lost)} connected, then left")

    def _check_open(self) -> Inbox:
        if self._inbox is None or self._closing or self._is_closed:
            raise TransportClosedError(CLOSED if self._started else "the transport is not started")
        return self._inbox

    async def send(self, peer: int, message: Message) -> None:
        """See `Transport.send`."""
        self._check_open()
        link = self._links.get(peer)
        outlet = None if link is None else link.outlets.get(message.channel)
        if outlet is None:
            raise ConfigError(f"peer is {peer}, must be one of: {', '.join(map(str, self.context.peers))}")
        num_bytes = message.num_bytes
        await outlet.send(message, num_bytes)
        self._sent += 1
        self._sent_bytes += num_bytes

    async def receive(self) -> Message:
        """See `Transport.receive`."""
        try:
            return await self._check_open().get()
        except FrameError:
            self._pending_errors -= 1
            raise

    async def close(self) -> None:
        """See `Transport.close`; waits `TRANSPORT_CLOSE_S` at most for the peers' answers."""
        if self._is_closed or self._inbox is None or self._closed is None:
            self.abort()
            return
        if self._closing:
            await self._closed.wait()
            return
        self._closing = True
        self._inbox.close()
        for link in self._links.values():
            for outlet in link.outlets.values():
                outlet.window.fail(TransportClosedError(CLOSED))
        try:
            # A peer that does not answer in time is silent, or has its bye and not the time to answer: in both cases
            # waiting longer delivers nothing more.
            with suppress(TimeoutError):
                leaves = asyncio.gather(*(link.leave() for link in self._links.values()))
                await asyncio.wait_for(leaves, timeouts.TRANSPORT_CLOSE_S)
        finally:
            self.abort()

    def abort(self) -> None:
        """See `Transport.abort`."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._inbox is not None:
            self._inbox.close()
        for link in self._links.values():
            link.end(TransportClosedError(CLOSED))
        if self._inlet is not None:
            self._inlet.close()
        if self._zmq is not None:
            self._zmq.destroy(linger=0)  # returns at once, as every socket is closed and drops its queue
        if self._closed is not None:
            self._closed.set()

    def statistics(self) -> TransportStatistics:
        """See `Transport.statistics`; bytes count as queued until the peer has received the message."""
        outlets = [outlet for link in self._links.values() for outlet in link.outlets.values()]
        return TransportStatistics(
            messages_sent=self._sent,
            bytes_sent=self._sent_bytes,
            messages_received=self._received,
            bytes_received=self._received_bytes,
            queued_bytes=sum(outlet.window.tensor_bytes for outlet in outlets),
            dropped_frames=self._dropped,
        )

    def on_message(self, message: Message, num_bytes: int) -> None:
        """See `Receiver.on_message`."""
        assert self._inbox is not None
        on_received = partial(self._on_received, message, num_bytes)
        self._inbox.put(message, on_received, first=message.channel is Channel.CONTROL)

    def _on_received(self, message: Message, num_bytes: int) -> None:
        self._received += 1
        self._received_bytes += num_bytes
        self._links[message.sender].consumed(message.channel, num_bytes)

    def on_link_frame(self, route: Route, sealed: Sealed) -> None:
        """See `Receiver.on_link_frame`."""
        self._links[route.peer].on_frame(route, sealed)

    def on_bad_frame(self, error: FrameError) -> None:
        """See `Receiver.on_bad_frame`."""
        self._dropped += 1
        if self._pending_errors < MAX_PENDING_FRAME_ERRORS and self._inbox is not None:
            self._pending_errors += 1
            self._inbox.put(error, first=True)

    def on_disconnected(self, peer: int, channel: Channel) -> None:
        """See `Receiver.on_disconnected`."""
        self._links[peer].on_disconnected(channel)


def endpoint_key(context: TransportContext, rank: int) -> str:
    """The key under which ``rank`` publishes its endpoint."""
    return f"zmq/{context.run_id}/{context.restart}/{rank}"
