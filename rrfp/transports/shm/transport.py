"""Ranks in processes of one host: headers over Unix sockets, tensors in shared memory.

Of two ranks, the higher one connects three sockets to the lower one, one for each channel; each carries its channel
both ways. There are no threads for input and output: the loop reads and writes.

Memory: tensors that arrived and were not received yet are bounded by the peers' windows, ``queue_bytes`` a channel.
Those that were received belong to the receiver. Beyond the most that was in use at once, free slots have `IDLE_BYTES`
at most. A slot has up to 12.5% and a page more than its tensors, each of which takes a multiple of 64 bytes.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from rrfp import timeouts
from rrfp.errors import ConfigError, FrameError, RrfpError, TransportClosedError, TransportError
from rrfp.plain import shown
from rrfp.transports.base import Channel, TransportContext
from rrfp.transports.links.flow import HomeLoop
from rrfp.transports.links.linked import HELLO, LinkedTransport
from rrfp.transports.rendezvous import publish_in_time
from rrfp.transports.shm.endpoint import Connected, Listener, connect
from rrfp.transports.shm.link import ShmLink
from rrfp.transports.shm.liveness import PeerLiveness
from rrfp.transports.shm.packets import BUFFER_BYTES, PacketSocket, unpack
from rrfp.transports.shm.slot_pool import IDLE_S, SlotLoan, SlotPool, drop_surplus
from rrfp.transports.shm.slots import with_limit
from rrfp.transports.shm.state import Copier, TransportState
from rrfp.transports.wire.codec import Codec
from rrfp.transports.wire.header_checks import HeaderChecks

#: Takes a greeted connection: rank, channel, socket and process. Raises a FrameError if that channel has one already.
OnGreeted = Callable[[int, Channel, PacketSocket, int], None]


class PendingConnections:
    """Reads the greetings of accepted connections; closes those that greet wrongly."""

    def __init__(
        self,
        codec: Codec,
        home: HomeLoop,
        buffer: bytearray,
        on_greeted: OnGreeted,
        on_rejected: Callable[[str], None],
    ) -> None:
        self._codec = codec
        self._home = home
        self._buffer = buffer
        self._on_greeted = on_greeted
        self._on_rejected = on_rejected
        self._waiting: dict[PacketSocket, int] = {}

    def add(self, connected: Connected) -> None:
        packets = PacketSocket(connected.sock, self._home)
        self._waiting[packets] = connected.process
        packets.on_readable(partial(self._read, packets))

    def _read(self, packets: PacketSocket) -> None:
        packet = packets.read(self._buffer)
        if packet is None:
            return
        process = self._waiting.pop(packets)
        try:
            if packet.descriptor is not None:
                os.close(packet.descriptor)
            if packet.size == 0:
                raise TransportError("it ended before its greeting")
            sealed = self._codec.open(unpack(None, memoryview(self._buffer)[: packet.size]).header)
            if sealed.kind != HELLO:
                raise FrameError(sealed.sender, "kind", f"is {shown(sealed.kind)}, must be {HELLO!r}")
            check = HeaderChecks(sealed.sender)
            (name,) = check.array("hello", sealed.fields, 1)
            self._on_greeted(sealed.sender, check.choice("hello.channel", name, Channel), packets, process)
        except RrfpError as error:
            packets.close()
            self._on_rejected(f"a connection from process {process} was refused: {error}")

    def close(self) -> None:
        """Close all that have not greeted. May be called twice."""
        for packets in self._waiting:
            packets.close()
        self._waiting.clear()


#: No fault of the peer.
_OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})


class ShmTransport(LinkedTransport[ShmLink]):
    """Between processes of one user on one Linux host, in common network and pid namespaces."""

    def __init__(self, context: TransportContext, whole: LinkedTransport[Any] | None = None) -> None:
        super().__init__(context, whole)
        if sys.platform != "linux":
            raise ConfigError(f"transport shm needs Linux, this is {sys.platform}; use transport zmq")
        self._copier: Copier | None = None
        self._listener: Listener | None = None
        self._pending: PendingConnections | None = None
        self._watch: PeerLiveness | None = None
        self._trimming: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Listen, publish the address, and connect to every peer; see `Transport.start`."""
        await super().start()
        assert self._listener is not None
        assert self._pending is not None
        self._listener.close()
        self._pending.close()

    async def _connect(self, home: HomeLoop, deadline_s: float) -> None:
        context, whole, queue_bytes = self.context, self._whole, self.context.queue_bytes
        self._copier = Copier(home, f"rrfp-shm-copies-{context.rank}")
        register = (lambda memory: None) if context.copies is None else context.copies.register
        buffer = bytearray(BUFFER_BYTES)
        make_room = self._make_room
        shared = TransportState(whole, home, self._codec, self._copier, queue_bytes, buffer, register, make_room)
        self._links = {peer: ShmLink(peer, shared) for peer in context.peers}
        self._watch = PeerLiveness(home, context.heartbeat_s, context.patience_s)
        self._pending = PendingConnections(self._codec, home, shared.buffer, self._on_greeted, whole.on_rejected)
        self._listener = Listener(context.rank, home, self._pending.add, whole.on_rejected)
        await publish_in_time(context, address_key(context, context.rank), self._listener.address.encode())
        for peer in context.peers:
            if peer < context.rank:
                address = await self._endpoint_of(peer, address_key(context, peer), deadline_s)
                await self._connect_to(peer, address, home, deadline_s)
        self._trim(home.loop)

    async def _connect_to(self, peer: int, address: bytes, home: HomeLoop, deadline_s: float) -> None:
        for channel in Channel:
            try:
                while (connected := connect(address.decode())) is None and home.loop.time() < deadline_s:
                    await asyncio.sleep(timeouts.LAST_PAUSE_S)
                    self._check_open()
            except TransportClosedError:
                raise
            except (OSError, TransportError, ValueError) as error:
                if isinstance(error, OSError) and error.errno in _OWN_LIMITS:
                    raise TransportError(f"cannot connect to rank {peer}: {with_limit(error)}") from error
                raise TransportError(
                    f"cannot connect to {address!r:.200}, which rank {peer} or another program wrote to the store: "
                    f"{error}; shm joins processes of one host and network namespace, zmq all others"
                ) from error
            if connected is None:
                limit_s = self.context.connect_timeout_s
                raise TransportError(f"rank {peer} accepted no connection within {limit_s:g} s")
            packets = PacketSocket(connected.sock, home)
            try:
                self._attach(peer, channel, packets, connected.process, accepted=False)
            except BaseException:
                packets.close()
                raise

    def _on_greeted(self, peer: int, channel: Channel, packets: PacketSocket, process: int) -> None:
        if peer < self.context.rank or self._links[peer].has(channel):
            raise FrameError(peer, "hello", f"for channel {channel} is not expected")
        self._attach(peer, channel, packets, process, accepted=True)

    def _attach(self, peer: int, channel: Channel, packets: PacketSocket, process: int, *, accepted: bool) -> None:
        assert self._watch is not None
        link = self._links[peer]
        if link.process is None:
            self._watch.watch(peer, process, link.lose)
        elif link.process != process:
            raise FrameError(peer, "hello", f"comes from process {process}, the others came from {link.process}")
        link.attach(channel, packets, process, accepted=accepted)

    def _trim(self, loop: asyncio.AbstractEventLoop) -> None:
        """Drop what is surplus of the free slots, now and then."""
        self._trimming = loop.call_later(IDLE_S, self._trim, loop)
        drop_surplus(self._pools(), loop.time() - IDLE_S)

    def _make_room(self) -> None:
        drop_surplus(self._pools())

    def _pools(self) -> list[SlotPool]:
        return [outlet.pool for link in self._links.values() for outlet in link.outlets.values()]

    def lend(self, peer: int, channel: Channel, sizes: Sequence[int]) -> SlotLoan | None:
        link = None if self._closing or self._is_closed else self._links.get(peer)
        outlet = None if link is None else link.outlets.get(channel)
        return None if outlet is None else outlet.lend(sizes)

    def _free(self) -> None:
        parts: Iterable[Copier | Listener | PendingConnections | PeerLiveness | None] = (
            *(self._listener, self._pending, self._watch, self._copier),
        )
        for part in parts:
            if part is not None:
                part.close()
        if self._trimming is not None:
            self._trimming.cancel()


def address_key(context: TransportContext, rank: int) -> str:
    return f"shm/{context.run_id}/{context.restart}/{rank}"
