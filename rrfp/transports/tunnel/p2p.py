"""The contract of a P2P channel: it moves tensors between this rank and one peer, beside the base transport.

The sending end gets ready for some tensors, the message is announced over the base transport, and the tensors follow.
Transfers of each direction are numbered in the order of their announcements, by both ends alike.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol

from torch import Tensor

from rrfp.errors import RrfpError
from rrfp.transports.base import Channel, Plain
from rrfp.transports.wire.header_checks import TensorSpec


class P2PError(RuntimeError):
    """A channel failed, of which either end may be the cause."""


class Transfer(Protocol):
    """Some tensors that a channel is ready to send."""

    @property
    def fields(self) -> Plain:
        """What the other end needs beside number, dtypes and shapes; it travels with the announcement."""

    def start(self, number: int, channel: Channel) -> Awaitable[None]:
        """Send the tensors of an announced message of ``channel``, behind those of earlier transfers.

        The result is done when they are not read any more. It fails with a P2PError, an error of this process's device,
        or what `P2PChannel.end_sending` got.
        """


class P2PChannel(Protocol):
    """This rank's end. Used on one loop only. Fields come from the network: a FrameError names a malformed one."""

    def moves(self, tensor: Tensor) -> bool:
        """Whether the channel can move a tensor."""

    async def prepare(self, tensors: Sequence[Tensor]) -> Transfer:
        """Get ready to send tensors; may wait for room, which the other end makes whatever its rank does."""

    def receive(self, number: int, specs: Sequence[TensorSpec], fields: Plain) -> Awaitable[list[Tensor]]:
        """Receive the tensors of an announced transfer, whose announcement may come before that of an earlier one.

        The result are dense leaves that require no grad yet. It fails as that of `Transfer.start` does.
        """

    def refuse(self, number: int, fields: Plain) -> bool:
        """An announcement was malformed, whose tensors are on their way; whether later ones can be received."""

    def on_entry(self, fields: Plain) -> None:
        """The other end of the channel sent fields of its own."""

    async def close(self) -> None:
        """Wait until the peer needs nothing of this end any more, or sends fail; free what waits for a device."""

    def end_sending(self, error: RrfpError) -> None:
        """Fail all transfers to the peer with the first ``error``; those from it go on. May be called twice."""

    def end(self, error: RrfpError) -> None:
        """Fail all transfers with the first ``error`` and free everything else; never waits. May be called twice."""
