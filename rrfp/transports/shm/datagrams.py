"""One message, or one frame of the link, as one datagram: a prefix, the header, and tensors where they are small.

The prefix says where the tensors are. Up to `INLINE_BYTES` they follow the header, one behind the other; larger ones
lie in a slot, whose descriptor travels with the first datagram that names it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from rrfp.errors import FrameError
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
    """The parts of a datagram."""
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
