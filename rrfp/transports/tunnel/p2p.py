"""The contract of a P2P channel: it moves tensors between this rank and one peer, beside the base transport.

The sending end gets ready for some tensors, the message is announced over the base transport, and the tensors follow.
Transfers of each direction are numbered in the order of their announcements, by both ends alike.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from rrfp.errors import RrfpError
from rrfp.transports.base import Channel, Plain
from rrfp.transports.wire.header_checks import TensorSpec


class P2PError(RuntimeError):
    """A channel failed, of which either end may be the cause."""


class Transfer(NamedTuple):
    """Some tensors that a channel is ready to send."""

    #: What travels with the announcement, beside number, dtypes and shapes.
    fields: Plain
    #: Sends the tensors of the message that was announced with this number, on this channel; done when they are not
    #: read any more. It fails with a P2PError, an error of this process's device, or what `P2PChannel.end_sending` got.
    start: Callable[[int, Channel], Awaitable[None]]


class P2PChannel(Protocol):
    """This rank's end, used on one loop. A FrameError names malformed fields."""

    def moves(self, tensor: Tensor) -> bool:
        """Whether the channel can move a tensor."""

    async def prepare(self, tensors: Sequence[Tensor]) -> Transfer:
        """Get ready to send; the other end makes room whatever its rank does."""

    def receive(self, number: int, specs: Sequence[TensorSpec], fields: Plain) -> Awaitable[list[Tensor]]:
        """Receive announced tensors, as dense leaves that require no grad yet; fails as `Transfer.start` does."""
        # Announcements come in any order: those of a later transfer may be faster.

    def refuse(self, number: int, fields: Plain) -> None:
        """An announcement was malformed; later ones can be received, or the link hears of a failure."""

    def on_entry(self, fields: Plain) -> None:
        """The other end of the channel sent fields of its own."""

    async def close(self) -> None:
        """Wait until the peer needs this end no more, or sends fail; then free it."""

    def end_sending(self, error: RrfpError) -> None:
        """Fail all transfers to the peer; those from it go on. May be called twice."""

    def end(self, error: RrfpError) -> None:
        """Fail all transfers and free everything, without waiting. May be called twice."""
