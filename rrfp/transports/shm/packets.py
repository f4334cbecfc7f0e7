"""A connected SEQPACKET socket on the loop: whole datagrams in order, with descriptors, and an end that shows."""

from __future__ import annotations

import array
import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rrfp.errors import TransportError
from rrfp.transports.links.flow import HomeLoop
from rrfp.transports.shm.datagrams import MAX_DATAGRAM_BYTES

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
        """Call ``callback`` whenever `read` may return something."""
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
