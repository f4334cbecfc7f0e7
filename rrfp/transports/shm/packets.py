"""Datagrams between two ranks: what is in one, and the connected SEQPACKET socket on the loop that they go through.

One message, or one frame of the link, is one datagram: a prefix, the header, and tensors where they are small. The
prefix says where the tensors are. Up to `INLINE_BYTES` they follow the header, one behind the other; larger ones lie in
a slot, whose descriptor travels with the first datagram that names it. The socket keeps datagrams whole and in order,
and its end shows.
"""

from __future__ import annotations

import array
import asyncio
import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rrfp.errors import FrameError, TransportError
from rrfp.transports.links.flow import HomeLoop
from rrfp.transports.wire.codec import MAX_HEADER_BYTES

#: Tensors of a message that travel in its datagram: two copies of so little cost less than a slot's page faults.
INLINE_BYTES = 64 << 10

#: The kernel takes 1024 parts of a datagram (UIO_MAXIOV).
_MAX_PARTS = 1024

_PREFIX = struct.Struct("=IIQQQ")

#: The largest datagram that is sent.
MAX_DATAGRAM_BYTES = _PREFIX.size + MAX_HEADER_BYTES + INLINE_BYTES

#: Of the buffer into which datagrams are read: a larger one is cut off, and refused.
BUFFER_BYTES = MAX_DATAGRAM_BYTES + 4096


class DatagramBody(NamedTuple):
    """The tensors of a datagram."""

    #: Their number.
    tensors: int = 0
    num_bytes: int = 0
    #: The number of their slot; 0: they follow the header.
    slot: int = 0
    #: Bytes of that slot.
    room: int = 0


#: Of a datagram without tensors.
NOWHERE = DatagramBody()


class Datagram(NamedTuple):
    """A datagram that was read; the views end with the buffer's next use."""

    header: memoryview
    payload: DatagramBody
    inline: memoryview


def pack(header: bytes, payload: DatagramBody = NOWHERE, inline: Sequence[memoryview] = ()) -> list[bytes | memoryview]:
    start = _PREFIX.pack(len(header), *payload) + header
    return [start, *inline] if len(inline) < _MAX_PARTS else [start, b"".join(inline)]


def unpack(peer: int | None, datagram: memoryview) -> Datagram:
    """The parts of a received datagram; a FrameError if lengths disagree."""
    size = datagram.nbytes
    if size < _PREFIX.size:
        raise FrameError(peer, "prefix", f"has {size} bytes, must have {_PREFIX.size}")
    header_bytes, *fields = _PREFIX.unpack_from(datagram)
    payload, end = DatagramBody(*fields), _PREFIX.size + header_bytes
    inline = size - end
    if inline != (0 if payload.slot else payload.num_bytes):
        raise FrameError(peer, "prefix", f"names {header_bytes} bytes of header and {payload}, but {size} arrived")
    return Datagram(datagram[_PREFIX.size : end], payload, datagram[end:])


#: Wanted for each direction of a socket; the kernel grants net.core.wmem_max at most.
_SEND_BUFFER_BYTES = 1 << 20

#: What the kernel counts beside a datagram's bytes.
_DATAGRAM_OVERHEAD = 4096

#: The kernel refuses further descriptors on their way (RLIMIT_NOFILE): a pause until the peer has read some.
_DESCRIPTORS_PAUSE_S = 0.01

_RIGHTS = (int(socket.SOL_SOCKET), int(socket.SCM_RIGHTS))
_DESCRIPTOR_BYTES = array.array("i").itemsize
_CONTROL_BYTES = socket.CMSG_SPACE(4 * _DESCRIPTOR_BYTES)

# As plain integers, since arithmetic on enumerations is slow.
_CLOEXEC, _IS_CUT, _LACKS_DESCRIPTOR = map(int, (socket.MSG_CMSG_CLOEXEC, socket.MSG_TRUNC, socket.MSG_CTRUNC))

Parts = Sequence[bytes | memoryview]


class Packet(NamedTuple):
    """A datagram that was read."""

    #: Its bytes in the buffer; 0: the peer's end was closed, and all its datagrams were read.
    size: int
    #: The one that came along, now this process's.
    descriptor: int | None
    #: The buffer was too small for it.
    is_cut: bool
    #: This process may have no more descriptors, so that the kernel kept it.
    lacks_descriptor: bool


class PacketSocket:
    """Whole datagrams in order. Used on one loop, by one sender at a time."""

    def __init__(self, sock: socket.socket, home: HomeLoop) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        granted = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        if granted < (needed := MAX_DATAGRAM_BYTES + _DATAGRAM_OVERHEAD):
            sock.close()
            raise TransportError(f"Unix sockets send {granted} bytes at once here, must be {needed}: net.core.wmem_max")
        self._sock = sock
        self._loop = home.loop
        self._descriptor = sock.fileno()
        self._posted: deque[bytes] = deque()
        self._room: asyncio.Future[None] | None = None
        self._is_waiting = False
        self._closed = False

    def on_readable(self, callback: Callable[[], None]) -> None:
        self._loop.add_reader(self._descriptor, callback)

    def read(self, buffer: bytearray) -> Packet | None:
        """The next datagram, or None while there is none."""
        while True:
            try:
                size, control, flags, _ = self._sock.recvmsg_into([buffer], _CONTROL_BYTES, _CLOEXEC)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                continue  # the peer did not read everything before its end; what it sent is still to be read
            descriptor = _only_descriptor(control) if control else None
            return Packet(size, descriptor, bool(flags & _IS_CUT), bool(flags & _LACKS_DESCRIPTOR))

    def post(self, parts: Parts) -> None:
        """Send a datagram as soon as there is room. Never waits."""
        if self._closed:
            return
        try:
            if not self._posted and self._push(parts, None):
                return
        except OSError:
            return  # the peer is gone, as `read` shows
        self._posted.append(b"".join(parts))
        self._await_room()

    def push(self, parts: Parts, descriptor: int | None = None) -> bool:
        """Send a datagram if there is room now; an OSError as in `send`."""
        return not self._posted and self._push(parts, descriptor)

    async def send(self, parts: Parts, descriptor: int | None = None) -> None:
        """Send a datagram once there is room; an OSError if an end is closed."""
        while not self.push(parts, descriptor):
            self._room = self._loop.create_future()
            self._await_room()
            try:
                await self._room
            finally:
                self._room = None

    def _push(self, parts: Parts, descriptor: int | None) -> bool:
        rights = [] if descriptor is None else [(*_RIGHTS, array.array("i", [descriptor]))]
        try:
            self._sock.sendmsg(parts, rights)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            self._loop.call_later(_DESCRIPTORS_PAUSE_S, self._on_room)
            self._is_waiting = True
            return False
        return True

    def _await_room(self) -> None:
        if not self._is_waiting:
            self._is_waiting = True
            self._loop.add_writer(self._descriptor, self._on_room)

    def _on_room(self) -> None:
        if self._closed:
            return
        self._loop.remove_writer(self._descriptor)
        self._is_waiting = False
        try:
            while self._posted and self._push([self._posted[0]], None):
                self._posted.popleft()
        except OSError:
            self._posted.clear()
        if self._posted:
            self._await_room()
        elif self._room is not None and not self._room.done():
            self._room.set_result(None)

    def close(self) -> None:
        """Close the socket; a waiting `send` raises. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_writer(self._descriptor)
        self._sock.close()
        self._posted.clear()
        if self._room is not None and not self._room.done():
            self._room.set_result(None)  # the next look at the closed socket raises


def _only_descriptor(control: list[tuple[int, int, bytes]]) -> int | None:
    """The one descriptor of a datagram; closes others, which RRFP never sends."""
    received = array.array("i")
    for level, kind, data in control:
        if (level, kind) == _RIGHTS:
            received.frombytes(data[: len(data) - len(data) % _DESCRIPTOR_BYTES])
    for descriptor in received[1:]:
        os.close(descriptor)
    return received[0] if received else None
