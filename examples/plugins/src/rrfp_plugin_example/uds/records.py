"""Records on a stream of bytes: a header and the frames after it.

Each of these parts follows a prefix: whether another part of the record comes after it, and its length. The lengths let
a reader skip the rest of a bad record and go on with the next one. Knows no sockets: a `RecordReader` *asks* for bytes,
by yielding the memory that is to be filled, so that a large tensor is received straight into its own memory.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Sequence
from typing import Protocol

from rrfp.errors import FrameError
from rrfp.transports import MAX_HEADER_BYTES, BufferPool, Channel, Codec, Message, Sealed

#: Memory to fill, one piece after the other; each is filled when the generator is resumed.
Reading = Generator[memoryview, None, None]

#: The first record of a connection and its answer; consumed bytes; "I am alive"; the last record.
HELLO, WELCOME, CREDIT, BEAT, BYE = LINK_KINDS = ("hello", "welcome", "credit", "beat", "bye")

_PREFIX = struct.Struct("!?Q")
_SKIPPED_AT_ONCE = 64 << 10

#: Buffers that one system call takes.
_MAX_BUFFERS = 512


class Record:
    """A record on its way out: views of the caller's memory that the socket has not taken yet.

    Args:
        header: the first part.
        frames: the parts after it.
    """

    def __init__(self, header: bytes, frames: Sequence[memoryview] = ()) -> None:
        parts = [memoryview(header), *frames]
        self._buffers: list[memoryview] = []
        for number, part in enumerate(parts, start=1):
            self._buffers.append(memoryview(_PREFIX.pack(number < len(parts), part.nbytes)))
            if part.nbytes:
                self._buffers.append(part)
        self.has_started = False

    @property
    def is_done(self) -> bool:
        """Whether the socket has taken everything."""
        return not self._buffers

    @property
    def next_buffers(self) -> list[memoryview]:
        """What to write next, in one call."""
        return self._buffers[:_MAX_BUFFERS]

    def advance(self, num_bytes: int) -> None:
        """The socket has taken ``num_bytes`` of `next_buffers`."""
        self.has_started = True
        taken = 0
        while num_bytes and num_bytes >= self._buffers[taken].nbytes:
            num_bytes -= self._buffers[taken].nbytes
            taken += 1
        del self._buffers[:taken]
        if num_bytes:
            self._buffers[0] = self._buffers[0][num_bytes:]

    def detach(self) -> None:
        """Copy the rest, so that the caller's memory is free."""
        self._buffers = [memoryview(bytes(buffer)) for buffer in self._buffers]


class Receiver(Protocol):
    """Is called with the records of one connection."""

    def on_message(self, message: Message) -> None:
        """A complete message arrived."""

    def on_link_record(self, channel: Channel, sealed: Sealed) -> None:
        """A record of the connection itself arrived; raises FrameError if it is malformed."""

    def on_bad_record(self, error: FrameError) -> None:
        """A record was dropped."""


class RecordReader:
    """Reads the records of one connection.

    Args:
        codec: checks headers.
        pool: provides the memory of tensors.
    """

    def __init__(self, codec: Codec, pool: BufferPool) -> None:
        self._codec = codec
        self._pool = pool
        self._peer: int | None = None
        self._more = False  # parts of the current record that have not begun
        self._unread = 0  # bytes of the current part
        self._sequence = 0

    def header(self) -> Generator[memoryview, None, Sealed]:
        """Read the next header.

        Raises:
            FrameError: if its seal is wrong.
        """
        size = yield from self._next_part()
        if size > MAX_HEADER_BYTES:
            raise FrameError(self._peer, "header", f"has {size} bytes, must have at most {MAX_HEADER_BYTES}")
        header = memoryview(bytearray(size))
        yield from self._fill(header)
        return self._codec.open(header, self._peer)

    def records(self, peer: int, channel: Channel, receiver: Receiver) -> Reading:
        """Read records of ``peer`` for good, and pass them to ``receiver``."""
        self._peer = peer
        while True:
            try:
                yield from self._record(peer, channel, receiver)
            except FrameError as error:
                receiver.on_bad_record(error)
                yield from self._skip_rest()

    def _record(self, peer: int, channel: Channel, receiver: Receiver) -> Reading:
        sealed = yield from self.header()
        if sealed.kind in LINK_KINDS:
            receiver.on_link_record(channel, sealed)
            return
        announcement = self._codec.announcement(sealed)  # checks every field, max_message_bytes included
        if announcement.channel is not channel:
            raise FrameError(peer, "channel", f"is {announcement.channel}, but the connection is for {channel}")
        if announcement.sequence != self._sequence:
            raise FrameError(peer, "sequence", f"is {announcement.sequence}, must be {self._sequence}")
        frames: list[memoryview] = []
        while self._more:
            size = yield from self._next_part()
            if (size,) != announcement.sizes[len(frames) : len(frames) + 1]:  # before memory is allocated for it
                raise FrameError(peer, "frames", f"number {len(frames)} has {size} bytes, which were not announced")
            frames.append(self._pool.acquire(size))
            yield from self._fill(frames[-1])
        message = announcement.assemble(frames)  # checks the number of frames
        self._sequence += 1
        receiver.on_message(message)

    def _next_part(self) -> Generator[memoryview, None, int]:
        prefix = bytearray(_PREFIX.size)
        yield memoryview(prefix)
        self._more, self._unread = _PREFIX.unpack(prefix)
        return self._unread

    def _fill(self, memory: memoryview) -> Reading:
        if memory.nbytes:
            yield memory
        self._unread = 0

    def _skip_rest(self) -> Reading:
        waste = memoryview(bytearray(_SKIPPED_AT_ONCE))
        while self._unread or self._more:
            if not self._unread:
                yield from self._next_part()
            while self._unread:
                skipped = waste[: self._unread]
                yield skipped
                self._unread -= skipped.nbytes
