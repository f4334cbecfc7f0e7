"""State shared by the connections of one transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rrfp.transports.links.flow import HomeLoop
from rrfp.transports.shm.copier import Copier
from rrfp.transports.wire.codec import Codec


@dataclass(frozen=True, slots=True)
class TransportState:
    """See the module's docstring."""

    #: The loop.
    home: HomeLoop
    codec: Codec
    #: For large messages.
    copier: Copier
    #: The window of each channel.
    queue_bytes: int
    #: For the datagram that is read.
    buffer: bytearray
    #: Registers the memory of a new slot with the rank's device; the handle keeps it pinned.
    register: Callable[[Tensor], object]
    #: See `SlotPool`.
    make_room: Callable[[], None]
