"""What the connections of one transport share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rrfp.transports.flow import HomeLoop
from rrfp.transports.shm.copier import Copier
from rrfp.transports.wire import Codec


@dataclass(frozen=True, slots=True)
class Shared:
    """See the module's docstring.

    Attributes:
        home: the loop.
        codec: of the rank.
        copier: for large messages.
        queue_bytes: the window of each channel.
        buffer: for the datagram that is read.
        register: registers the memory of a new slot with the rank's device; the handle keeps it pinned.
        make_room: see `SlotPool`.
    """

    home: HomeLoop
    codec: Codec
    copier: Copier
    queue_bytes: int
    buffer: bytearray
    register: Callable[[Tensor], object]
    make_room: Callable[[], None]
