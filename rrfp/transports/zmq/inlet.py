"""The receiving side of a rank: one bound ROUTER to which every channel of every peer connects, and its monitor.

It only receives, checks the senders of frames, and assembles messages; their meaning is up to its owner.

libzmq's descriptor is edge-triggered: it fires when the socket's state changes, not while messages wait. So after it
fires, everything must be read; between two batches the loop runs.

Liveness: libzmq exchanges heartbeats on every inbound connection and closes a silent one. The monitor reports a closed
connection by file descriptor only; the greeting, whose frame carries the same descriptor, gives its peer and channel.
Messages that arrived before the end of a connection are read before the end is reported.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import zmq

from rrfp.errors import FrameError
from rrfp.transports.base import Channel, TransportContext
from rrfp.transports.links.linked import BYE, CREDIT, HELLO, WANT, WELCOME, LinkedTransport
from rrfp.transports.links.pool import BufferPool
from rrfp.transports.wire.codec import MAX_HEADER_BYTES, Codec, Sealed
from rrfp.transports.wire.header_checks import MAX_ITEMS
from rrfp.transports.zmq.endpoint import bind, unbind
from rrfp.transports.zmq.pieces import INLINE_BYTES, MAX_PART_BYTES, PIECE_BYTES, Assembly
from rrfp.transports.zmq.security import CURVE_BYTES, Security, authenticated_rank

FAREWELL = "farewell"

#: The kinds of the link's own frames; every other kind is a message's.
LINK_KINDS = (HELLO, WELCOME, CREDIT, WANT, BYE, FAREWELL)

#: A start has the header, and further parts of at most `INLINE_BYTES` together, none of them empty but the first.
_MAX_PARTS = 1 + MAX_ITEMS
_MAX_START_BYTES = MAX_HEADER_BYTES + INLINE_BYTES

#: zmq messages that libzmq holds for each connection while the loop does not read them: 256 MiB of the largest. It must
#: exceed what a window allows: behind a full queue libzmq sees no heartbeats either, and takes the peer for lost.
_HIGH_WATER = 256

#: The most that is read before the loop runs.
_BATCH_BYTES = 2 * PIECE_BYTES
_BATCH_MESSAGES = 64

_NOBLOCK = int(zmq.NOBLOCK)
_FAILED_HANDSHAKES = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_EVENTS = int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED) | _FAILED_HANDSHAKES
_EVENT = struct.Struct("=Hi")


@dataclass(slots=True)
class Route:
    """One inbound connection: a channel of a peer."""

    peer: int
    channel: Channel
    #: The message that is arriving, or None between messages.
    assembly: Assembly | None = None
    #: The number of the next message.
    sequence: int = 0
    #: a bad frame was reported, and pieces are dropped until the next message starts.
    out_of_step: bool = False


class FrameReceiver(Protocol):
    """The link with a peer."""

    def on_frame(self, channel: Channel, sealed: Sealed) -> None:
        """A frame of the link itself arrived."""

    def on_disconnected(self, channel: Channel) -> None:
        """A greeted connection ended; all its messages were reported."""


def identity_of(rank: int, channel: Channel) -> bytes:
    return f"{rank}/{channel}".encode()


def _milliseconds(seconds: float) -> int:
    """At least 1, as libzmq reads 0 as never."""
    return max(1, round(1000 * seconds))


class ZmqInlet:
    """Reads all peers' connections. Used on one loop only."""

    def __init__(
        self,
        sockets: zmq.Context[zmq.Socket[bytes]],
        codec: Codec,
        context: TransportContext,
        owner: LinkedTransport[Any],
        links: Mapping[int, FrameReceiver],
        channels: Sequence[Channel] = tuple(Channel),
        security: Security | None = None,
    ) -> None:
        self._codec = codec
        self._owner = owner
        self._links = links
        self._pool = BufferPool()
        ends = [(peer, channel) for peer in context.peers for channel in channels]
        self._routes = {identity_of(*end): Route(*end) for end in ends}
        self._open: set[int] = set()
        self._greeted: dict[int, Route] = {}
        self._ended: list[Route] = []
        self._closed = False
        self._again: asyncio.Handle | None = None
        self._loop = asyncio.get_running_loop()
        self._socket = sockets.socket(zmq.ROUTER)
        self._endpoint = ""
        self._is_guarded = security is not None
        most_bytes = MAX_PART_BYTES
        if security is not None:
            security.protect_listener(self._socket, tuple(channels))
            most_bytes += CURVE_BYTES
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, most_bytes)
        self._socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _milliseconds(context.heartbeat_s))
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _milliseconds(context.patience_s))
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(_EVENTS)
        self._readers = [int(self._socket.getsockopt(zmq.FD)), int(self._monitor.getsockopt(zmq.FD))]

    def bind(self, address: str, rank: int) -> str:
        """Listen; returns the endpoint for the peers. Errors as in `rrfp.transports.zmq.endpoint.bind`."""
        self._endpoint = endpoint = bind(self._socket, address, rank)
        self._loop.add_reader(self._readers[0], self._drain)
        self._loop.add_reader(self._readers[1], self._on_monitor)
        self._on_monitor()  # a descriptor fires only after all that came before was read
        return endpoint

    def close(self) -> None:
        """Free everything. May be called twice, also from a callback of the owner."""
        if self._closed:
            return
        self._closed = True
        for descriptor in self._readers:
            self._loop.remove_reader(descriptor)
        if self._again is not None:
            self._again.cancel()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        unbind(self._endpoint)

    def _on_monitor(self) -> None:
        self._read_monitor()
        self._drain()

    def _read_monitor(self) -> None:
        while not self._closed:
            try:
                event, value = _EVENT.unpack(self._monitor.recv_multipart(flags=_NOBLOCK)[0])
            except zmq.Again:
                return
            if event == zmq.EVENT_ACCEPTED:
                self._open.add(value)
            elif event & _FAILED_HANDSHAKES:
                self._owner.on_rejected("a connection ended in its handshake")
            else:
                self._open.discard(value)
                if (route := self._greeted.pop(value, None)) is not None:
                    self._ended.append(route)

    def _drain(self) -> None:
        """Read until the socket is empty or a batch is full."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        num_bytes = 0
        is_empty = False
        try:
            for _ in range(_BATCH_MESSAGES):
                try:
                    identity = self._socket.recv(_NOBLOCK)
                except zmq.Again:
                    is_empty = True
                    self._report_ended()
                    return
                num_bytes += self._read_rest(identity)
                if self._closed or num_bytes >= _BATCH_BYTES:
                    return
        finally:  # also behind an error, since the descriptor does not fire again for what waits
            if not (is_empty or self._closed):
                self._again = self._loop.call_soon(self._drain)

    def _report_ended(self) -> None:
        # Every connection in this list ended before the socket was empty, so none has a message left.
        ended, self._ended = self._ended, []
        for route in ended:
            self._links[route.peer].on_disconnected(route.channel)

    def _read_rest(self, identity: bytes) -> int:
        """Read and handle the parts after the identity; returns their bytes."""
        part = self._socket.recv(_NOBLOCK, copy=False)
        parts, num_bytes, is_bounded = [part], len(part), True
        while part.more:
            part = self._socket.recv(_NOBLOCK, copy=False)
            num_bytes += len(part)
            is_bounded = is_bounded and num_bytes <= _MAX_START_BYTES and len(parts) < _MAX_PARTS
            if is_bounded:
                parts.append(part)
        route = self._routes.get(identity)
        if self._is_guarded and (route is None or authenticated_rank(part) != route.peer):
            self._refuse(authenticated_rank(part), identity)
            return num_bytes
        if route is None:
            self._owner.on_rejected(f"dropped {num_bytes} bytes of an unauthenticated sender, {identity!r:.80}")
            return num_bytes
        try:
            if not is_bounded:
                raise FrameError(route.peer, "frames", f"are too many or too large: {num_bytes} bytes with the header")
            if len(parts) > 1:
                self._on_start(route, parts)
            else:
                self._on_piece(route, parts[0].buffer)
        except FrameError as error:
            self._owner.on_bad_frame(error)
        return num_bytes

    def _refuse(self, rank: int | None, identity: bytes) -> None:
        """Drop a frame under another connection's identity."""
        if rank is None:
            self._owner.on_rejected(f"dropped a frame of an unauthenticated sender, {identity!r:.80}")
        else:
            self._owner.on_bad_frame(FrameError(rank, "sender", f"is {identity!r:.80}, not a connection of its own"))

    def _on_start(self, route: Route, parts: list[zmq.Frame]) -> None:
        sealed = self._codec.open(parts[0].buffer, route.peer)
        if sealed.kind in LINK_KINDS:
            if sealed.kind == HELLO:
                self._greet(route, parts[0])
            self._links[route.peer].on_frame(route.channel, sealed)
            return
        interrupted, route.assembly = route.assembly, None
        if interrupted is not None:
            self._owner.on_bad_frame(interrupted.incomplete())
        route.out_of_step = True  # until all checks pass: after a bad start, its pieces are dropped
        announcement = self._codec.announcement(sealed)
        channel, sequence = announcement.channel, announcement.sequence
        if channel is not route.channel:
            raise FrameError(route.peer, "channel", f"is {channel}, but the connection is for {route.channel}")
        if sequence != route.sequence:
            raise FrameError(route.peer, "sequence", f"is {sequence}, must be {route.sequence}")
        assembly = Assembly(announcement, [part.buffer for part in parts[1:]], self._pool)
        route.out_of_step = False
        self._advance(route, assembly)

    def _on_piece(self, route: Route, part: memoryview) -> None:
        assembly = route.assembly
        if assembly is None:
            if route.out_of_step:
                return  # of a message that was reported already
            route.out_of_step = True
            raise FrameError(route.peer, "header", "is missing: a piece of no message")
        route.assembly = None
        route.out_of_step = True
        assembly.add(part)
        route.out_of_step = False
        self._advance(route, assembly)

    def _advance(self, route: Route, assembly: Assembly) -> None:
        if not assembly.is_complete:
            route.assembly = assembly
            return
        route.sequence += 1
        self._owner.on_message(assembly.message(), assembly.num_bytes)

    def _greet(self, route: Route, part: zmq.Frame) -> None:
        descriptor: Any = part.get(zmq.SRCFD)
        # The system reuses descriptors, so the events of earlier connections with this one must be read first. If it
        # is not open after them, the connection of this greeting has ended already.
        self._read_monitor()
        if descriptor in self._open:
            self._greeted[descriptor] = route
        else:
            self._ended.append(route)
