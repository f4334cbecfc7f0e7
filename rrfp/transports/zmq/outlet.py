"""The sending side of one channel to one peer: a DEALER socket that only sends, and the bounded stream into it.

libzmq copies each piece, so the caller's memory is free after the last one, and libzmq holds `HIGH_WATER` pieces at
most. Cancellation must not cut a message in two, as the channel would then carry half of it for good: a send that is
cancelled after its first frame left continues in a task, on a copy of the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq

from rrfp.errors import RrfpError
from rrfp.transports.base import Channel, Message
from rrfp.transports.links.flow import HomeLoop, Window, cost_of
from rrfp.transports.wire.codec import Codec
from rrfp.transports.zmq.pieces import INLINE_BYTES, PIECE_BYTES, Piece, split_inline

#: zmq messages that libzmq holds before a sender waits: 8 MiB of large pieces.
HIGH_WATER = 8

_FLAGS = int(zmq.NOBLOCK)
_FLAGS_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class _Stream:
    """The rest of one message: the parts that libzmq does not have yet."""

    def __init__(self, header: bytes, frames: list[memoryview]) -> None:
        self._frames = frames
        inline, self._rest = split_inline([frame.nbytes for frame in frames])
        self._start: list[bytes | memoryview] | None = [header, *map(self._view, inline)] if inline else [header, b""]
        self._piece = next(self._rest, None)

    @property
    def has_started(self) -> bool:
        """Whether the receiver will see the message's start."""
        return self._start is None

    @property
    def is_done(self) -> bool:
        return self._start is None and self._piece is None

    def push(self, socket: zmq.Socket[bytes]) -> int:
        """Pass the next part to libzmq; zmq.Again if its queue is full."""
        if self._start is not None:
            send_parts(socket, self._start)
            self._start = None
            return 0
        assert self._piece is not None
        socket.send(self._view(self._piece), _FLAGS)
        size = self._piece.num_bytes
        self._piece = next(self._rest, None)
        return size

    def detach(self) -> None:
        """Copy the rest; the caller's memory is not read any more."""
        assert self._piece is not None  # else nothing is left to send
        done, rest = self._piece.frame, self._frames[self._piece.frame :]
        self._frames = [memoryview(b"")] * done + [memoryview(bytes(frame)) for frame in rest]

    def _view(self, piece: Piece) -> memoryview:
        return self._frames[piece.frame][piece.start : piece.stop]


class ZmqOutlet:
    """One channel to one peer, over its own DEALER. Used on one loop only."""

    def __init__(self, socket: zmq.Socket[bytes], codec: Codec, window: Window, home: HomeLoop) -> None:
        self.window = window
        self._socket = socket
        self._fd = int(socket.getsockopt(zmq.FD))
        self._codec = codec
        self._loop = home.loop
        self._turn = asyncio.Lock()
        self._sequence = 0
        self._blocked: asyncio.Future[None] | None = None
        self._error: RrfpError | None = None
        self._tail: asyncio.Task[None] | None = None

    async def send(self, message: Message, num_bytes: int) -> None:
        """See `OutletContract.send`. Cancelled when it has begun, it sends the rest."""
        cost = cost_of(num_bytes)
        self._codec.check_size(num_bytes)
        await self._turn.acquire()
        stream: _Stream | None = None
        acquired = False
        try:
            await self.window.acquire(cost)
            acquired = True
            stream = _Stream(*self._codec.encode(message, self._sequence))
            await self._run(stream)
        except asyncio.CancelledError:
            if stream is not None and stream.has_started:
                stream.detach()
                self._tail = asyncio.create_task(self._finish(stream), name="rrfp-zmq-send-tail")
            raise
        finally:
            started = stream is not None and stream.has_started
            if started:
                self._sequence += 1
            elif acquired:
                self.window.release(cost)
            if self._tail is None:  # else the task that sends the rest releases it
                self._turn.release()

    def send_at_once(self, message: Message, num_bytes: int) -> bool:
        """See `OutletContract.send_at_once`: if one zmq message is enough."""
        cost = cost_of(num_bytes)
        if self._turn.locked() or self._error is not None or num_bytes > INLINE_BYTES:
            return False
        self._codec.check_size(num_bytes)
        if not self.window.try_acquire(cost):
            return False
        try:
            _Stream(*self._codec.encode(message, self._sequence)).push(self._socket)
        except BaseException as error:
            self.window.release(cost)
            if isinstance(error, zmq.Again):
                return False
            raise
        self._sequence += 1
        return True

    async def _finish(self, stream: _Stream) -> None:
        try:
            with suppress(RrfpError):  # the peer is gone or this end is closed: the next send or receive raises
                await self._run(stream)
        finally:
            self._tail = None
            self._turn.release()

    async def _run(self, stream: _Stream) -> None:
        burst = 0
        while not stream.is_done:
            if burst >= PIECE_BYTES:
                burst = 0
                await asyncio.sleep(0)  # copying one piece keeps the loop busy for long enough
            self._check()
            try:
                burst += stream.push(self._socket)
            except zmq.Again:
                await self._writable()

    async def _writable(self) -> None:
        """Wait until libzmq accepts another message."""
        self._blocked = self._loop.create_future()
        self._loop.add_reader(self._fd, self._look)
        try:
            self._look()  # the descriptor is edge-triggered: a change before add_reader would be missed
            await self._blocked
        finally:
            self._blocked = None
            if self._error is None:  # else `fail` has closed the socket, and the descriptor may be another's
                self._loop.remove_reader(self._fd)

    def _look(self) -> None:
        if (
            self._blocked is not None
            and not self._blocked.done()
            and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT
        ):
            self._blocked.set_result(None)

    def post(self, header: bytes) -> None:
        """Send a frame of the link now: on control, which never blocks."""
        if self._error is None:
            send_parts(self._socket, [header, b""])

    async def post_in_turn(self, header: bytes) -> None:
        async with self._turn:
            await self._run(_Stream(header, []))

    def fail(self, error: RrfpError) -> None:
        """Free the socket; sends raise ``error``. May be called twice."""
        self.window.fail(error)
        if self._error is not None:
            return
        self._error = error
        if self._blocked is not None:
            self._loop.remove_reader(self._fd)
            if not self._blocked.done():
                self._blocked.set_result(None)  # the sender then raises the error
        self._socket.close(linger=0)

    def _check(self) -> None:
        if self._error is not None:
            raise type(self._error)(*self._error.args)


def send_parts(socket: zmq.Socket[bytes], parts: Sequence[bytes | memoryview]) -> None:
    """Send one multi-part message; zmq.Again if libzmq's queue is full."""
    # Not send_multipart: its checks take longer than sending a small message.
    for part in parts[:-1]:
        socket.send(part, _FLAGS_MORE)
    socket.send(parts[-1], _FLAGS)


def open_socket(
    context: zmq.Context[zmq.Socket[bytes]],
    identity: bytes,
    channel: Channel,
    protect: Callable[[zmq.Socket[bytes]], str],
) -> zmq.Socket[bytes]:
    """A DEALER connected to the endpoint that ``protect`` returns; closing it drops its queue."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    # Frames of the link are sent on control and must never wait; the window bounds that channel's messages.
    socket.setsockopt(zmq.SNDHWM, 0 if channel is Channel.CONTROL else HIGH_WATER)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    try:
        if (endpoint := protect(socket)).startswith("tcp://["):
            socket.setsockopt(zmq.IPV6, 1)
        socket.connect(endpoint)
    except BaseException:
        socket.close(linger=0)
        raise
    return socket
