"""Messages between the ranks of one pipeline: the contract in `base`, and its implementations.

The names below are those that transports outside this package rely on. They are loaded when first used, so that the
known transports can be listed without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rrfp.lazy_names import homes_of, lazy_names

# For type checkers: `as` marks a public name.
if TYPE_CHECKING:
    from rrfp.devices.copies import DeviceCopies as DeviceCopies
    from rrfp.devices.copies import SharesDeviceMemory as SharesDeviceMemory
    from rrfp.transports.base import Channel as Channel
    from rrfp.transports.base import DeliversMessages as DeliversMessages
    from rrfp.transports.base import LendsMemory as LendsMemory
    from rrfp.transports.base import Loan as Loan
    from rrfp.transports.base import Message as Message
    from rrfp.transports.base import MessageKind as MessageKind
    from rrfp.transports.base import Plain as Plain
    from rrfp.transports.base import Rendezvous as Rendezvous
    from rrfp.transports.base import SendsAtOnce as SendsAtOnce
    from rrfp.transports.base import Transport as Transport
    from rrfp.transports.base import TransportContext as TransportContext
    from rrfp.transports.base import TransportStatistics as TransportStatistics
    from rrfp.transports.links.flow import HomeLoop as HomeLoop
    from rrfp.transports.links.flow import Inbox as Inbox
    from rrfp.transports.links.flow import Window as Window
    from rrfp.transports.links.flow import cost_of as cost_of
    from rrfp.transports.links.pool import BufferPool as BufferPool
    from rrfp.transports.registry import create_transport as create_transport
    from rrfp.transports.rendezvous import LocalRendezvous as LocalRendezvous
    from rrfp.transports.rendezvous import StoreRendezvous as StoreRendezvous
    from rrfp.transports.secret import Secret as Secret
    from rrfp.transports.wire.announcements import Announcement as Announcement
    from rrfp.transports.wire.codec import MAX_HEADER_BYTES as MAX_HEADER_BYTES
    from rrfp.transports.wire.codec import Codec as Codec
    from rrfp.transports.wire.codec import Sealed as Sealed
    from rrfp.transports.wire.codec import copy_body as copy_body
    from rrfp.transports.wire.tensor_bytes import allocate as allocate
    from rrfp.transports.wire.tensor_bytes import as_bytes as as_bytes
    from rrfp.transports.wire.tensor_bytes import check_sendable as check_sendable
    from rrfp.transports.wire.tensor_bytes import from_buffer as from_buffer

_HOMES = homes_of(
    {
        "rrfp.devices.copies": "DeviceCopies SharesDeviceMemory",
        "rrfp.transports.base": "Channel DeliversMessages LendsMemory Loan Message MessageKind Plain Rendezvous "
        "SendsAtOnce Transport TransportContext TransportStatistics",
        "rrfp.transports.links.flow": "HomeLoop Inbox Window cost_of",
        "rrfp.transports.links.pool": "BufferPool",
        "rrfp.transports.registry": "create_transport",
        "rrfp.transports.rendezvous": "LocalRendezvous StoreRendezvous",
        "rrfp.transports.secret": "Secret",
        "rrfp.transports.wire.announcements": "Announcement",
        "rrfp.transports.wire.codec": "MAX_HEADER_BYTES Codec Sealed copy_body",
        "rrfp.transports.wire.tensor_bytes": "allocate as_bytes check_sendable from_buffer",
    }
)

__all__, __getattr__, __dir__ = lazy_names(__name__, _HOMES)
