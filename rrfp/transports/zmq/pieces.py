"""Cutting a message into zmq messages, and assembling it again.

libzmq receives a large frame in fresh memory, which is slow, and blocks the loop while it is copied. So tensors travel
in pieces of at most `PIECE_BYTES`, each a single-part zmq message, copied one by one into memory of a `BufferPool`. The
first pieces, as long as they are small, travel with the header as further parts. Both sides derive the cut from the
announced sizes.

A multi-part zmq message thus always starts a message, and a single-part one always continues it: after bad input the
receiver resynchronises at the next start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from rrfp.errors import FrameError
from rrfp.transports.base import Message
from rrfp.transports.links.pool import BufferPool
from rrfp.transports.wire.announcements import Announcement
from rrfp.transports.wire.tensor_bytes import copy_bytes

PIECE_BYTES = 1 << 20

#: Pieces that together have at most this many bytes travel with the header.
INLINE_BYTES = 64 << 10

#: RRFP sends no larger part; libzmq closes a connection that announces one, before it allocates.
MAX_PART_BYTES = PIECE_BYTES

_NOTHING = memoryview(b"")


class Piece(NamedTuple):
    """Bytes ``start`` to ``stop`` of frame number ``frame``."""

    frame: int
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


def cut(sizes: Sequence[int]) -> Iterator[Piece]:
    """All pieces of frames of these sizes, in sending order."""
    for index, size in enumerate(sizes):
        for start in range(0, size, PIECE_BYTES):
            yield Piece(index, start, min(start + PIECE_BYTES, size))


def split_inline(sizes: Sequence[int]) -> tuple[list[Piece], Iterator[Piece]]:
    """The pieces that travel with the header, and the others."""
    if sum(sizes) <= INLINE_BYTES:
        return [Piece(index, 0, size) for index, size in enumerate(sizes) if size], iter(())
    inline: list[Piece] = []
    total = 0
    pieces = cut(sizes)
    for piece in pieces:
        total += piece.num_bytes
        if total > INLINE_BYTES:
            return inline, chain([piece], pieces)
        inline.append(piece)
    return inline, pieces


class Assembly:
    """One message that is arriving."""

    def __init__(self, announcement: Announcement, inline: Sequence[memoryview], pool: BufferPool) -> None:
        self._announcement = announcement
        sizes = announcement.sizes
        pieces, self._rest = split_inline(sizes)
        # A start without inline pieces has one empty part, so that it is multi-part.
        if [part.nbytes for part in inline] != ([piece.num_bytes for piece in pieces] or [0]):
            lengths = [part.nbytes for part in inline]
            raise self._error(f"the parts after the header have lengths {lengths!r:.80}, not the announced ones")
        self._next = next(self._rest, None)
        if self._next is None:  # each frame is one part, whose memory becomes the tensor's; an empty frame has none
            self._buffers = [_NOTHING] * len(sizes)
            for piece, part in zip(pieces, inline, strict=False):
                self._buffers[piece.frame] = part
            return
        try:
            self._buffers = [pool.acquire(size) for size in sizes]
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError
            raise self._error(f"need {sum(sizes)} bytes, which cannot be allocated: {error!s:.80}") from error
        for piece, part in zip(pieces, inline, strict=False):
            copy_bytes(self._buffers[piece.frame][piece.start : piece.stop], part)

    @property
    def num_bytes(self) -> int:
        return self._announcement.num_bytes

    @property
    def is_complete(self) -> bool:
        return self._next is None

    def add(self, part: memoryview) -> None:
        """Copy the next piece to its place; a FrameError for a wrong length."""
        piece = self._next
        if piece is None or part.nbytes != piece.num_bytes:
            wanted = 0 if piece is None else piece.num_bytes
            raise self._error(f"a piece has {part.nbytes} bytes, must have {wanted}")
        copy_bytes(self._buffers[piece.frame][piece.start : piece.stop], part)
        self._next = next(self._rest, None)

    def message(self) -> Message:
        return self._announcement.assemble(self._buffers)

    def incomplete(self) -> FrameError:
        """The error for a message that another one interrupts."""
        return self._error("the message ends before its announced length")

    def _error(self, reason: str) -> FrameError:
        return FrameError(self._announcement.sender, "frames", reason)
