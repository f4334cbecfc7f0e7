"""Messages between the ranks of one pipeline: the contract in `base`, and its implementations.

The names below are those that transports outside this package rely on.
"""

from rrfp.transports.base import (
    Channel,
    Message,
    MessageKind,
    Plain,
    Rendezvous,
    Transport,
    TransportContext,
    TransportStatistics,
)
from rrfp.transports.flow import HomeLoop, Inbox, Window, cost_of
from rrfp.transports.pool import BufferPool
from rrfp.transports.registry import create_transport
from rrfp.transports.rendezvous import LocalRendezvous, StoreRendezvous
from rrfp.transports.tensor_bytes import allocate, as_bytes, check_sendable, from_buffer
from rrfp.transports.wire import MAX_HEADER_BYTES, Announcement, Codec, Sealed, copy_body

__all__ = [
    "MAX_HEADER_BYTES",
    "Announcement",
    "BufferPool",
    "Channel",
    "Codec",
    "HomeLoop",
    "Inbox",
    "LocalRendezvous",
    "Message",
    "MessageKind",
    "Plain",
    "Rendezvous",
    "Sealed",
    "StoreRendezvous",
    "Transport",
    "TransportContext",
    "TransportStatistics",
    "Window",
    "allocate",
    "as_bytes",
    "check_sendable",
    "copy_body",
    "cost_of",
    "create_transport",
    "from_buffer",
]
