"""One connected socket on one event loop: records out, bytes in.

Why neither asyncio's streams nor its ``sock_`` calls? Streams copy every byte twice, and a cancelled ``sock_sendall``
does not tell how much it has sent, which a transport must know: a message that is cut in two would ruin the channel.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from rrfp.errors import RrfpError
from rrfp_plugin_example.uds.records import Reading, Record

#: The most that is read or written before the loop runs.
_BURST_BYTES = 1 << 20


class Connection:
    """Writes records in order, and fills the memory that a reader asks for.

    Args:
        connected: a connected stream socket that does not block; the connection owns it.
        reading: asks for memory to fill; see `RecordReader`.
        on_end: called once when the other end has ended, after all its bytes were read, with the reason.

    Attributes:
        last_read: when bytes arrived last, in seconds of the loop's clock.
    """

    def __init__(self, connected: socket.socket, reading: Reading, on_end: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = connected
        self._reading = reading
        self._wanted = next(reading)
        self._on_end = on_end
        self._outgoing: deque[tuple[Record, asyncio.Future[None] | None]] = deque()
        self._is_closed = False
        self._is_broken = False  # nothing can be written any more
        self._has_ended = False
        self.last_read = self._loop.time()
        self._loop.add_reader(connected, self.read)

    def read(self) -> None:
        """Read what has arrived, a burst at most; the loop calls again while there is more."""
        budget = _BURST_BYTES
        while budget > 0 and not (self._has_ended or self._is_closed):
            try:
                count = self._socket.recv_into(self._wanted)
            except BlockingIOError:
                return
            except OSError as error:
                self._end(f"its connection broke: {error}")
                return
            if not count:
                self._end("its connection ended")
                return
            budget -= count
            self.last_read = self._loop.time()
            self._wanted = self._wanted[count:]
            if not self._wanted.nbytes:
                self._wanted = next(self._reading)

    def _end(self, reason: str) -> None:
        self._has_ended = True
        self._loop.remove_reader(self._socket)
        self._on_end(reason)

    def post(self, record: Record) -> None:
        """Write ``record`` behind all others, as soon as the socket takes it. Nothing if the other end is gone."""
        if not (self._is_closed or self._is_broken):
            self._put(record, None)

    async def write(self, record: Record) -> None:
        """Write ``record`` behind all others; returns when the kernel has a copy of everything.

        Cancelled, it writes the rest of a record that has begun from a copy, and nothing of one that has not.

        Raises:
            RrfpError: the error passed to `close`.
        """
        written: asyncio.Future[None] = self._loop.create_future()
        self._put(record, written)
        try:
            await written
        except asyncio.CancelledError:
            if record.has_started:
                record.detach()
            else:
                with suppress(ValueError):  # closed at the same moment
                    self._outgoing.remove((record, written))
            raise

    @property
    def is_idle(self) -> bool:
        """Whether the socket has taken everything so far."""
        return not self._outgoing

    def _put(self, record: Record, written: asyncio.Future[None] | None) -> None:
        self._outgoing.append((record, written))
        if len(self._outgoing) == 1:
            self._flush()
            if self._outgoing and not self._is_broken:
                self._loop.add_writer(self._socket, self._on_writable)

    def _on_writable(self) -> None:
        self._flush()
        if not self._outgoing:
            self._loop.remove_writer(self._socket)

    def _flush(self) -> None:
        budget = _BURST_BYTES
        while self._outgoing and budget > 0:
            record, written = self._outgoing[0]
            try:
                count = self._socket.sendmsg(record.next_buffers)
            except BlockingIOError:
                return
            except OSError:
                self._break()
                return
            budget -= count
            record.advance(count)
            if record.is_done:
                self._outgoing.popleft()
                if written is not None and not written.done():
                    written.set_result(None)

    def _break(self) -> None:
        # What the other end had sent is still read; then `_on_end` names the loss, and `close` fails the writers.
        self._is_broken = True
        self._loop.remove_writer(self._socket)
        self.shut()

    def shut(self) -> None:
        """Let nothing more in or out. What has arrived is still read, then the connection ends."""
        if not self._is_closed:
            with suppress(OSError):  # the other end is gone already
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self, error: RrfpError) -> None:
        """Free the socket at once; waiting writers raise ``error``. May be called twice, also while it reads."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        outgoing, self._outgoing = self._outgoing, deque()
        for _, written in outgoing:
            if written is not None and not written.done():
                written.set_exception(type(error)(*error.args))
