"""Memory that a transport lends before ``send``, so that a device's tensors are copied once: an option."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from rrfp.transports.base import Channel


class Loan(Protocol):
    """Memory of a transport that one message's tensors may lie in; see `LendsMemory`."""

    @property
    def frames(self) -> Sequence[memoryview]:
        """One for each tensor, in order, writable and aligned to 64 bytes."""

    def close(self) -> None:
        """Give the memory back unless ``send`` has accepted it. It may still be written to. May be called twice."""


@runtime_checkable
class LendsMemory(Protocol):
    """A transport that need not copy tensors which lie in its own memory: an option, for copies from a device."""

    def lend(self, peer: int, channel: Channel, sizes: Sequence[int]) -> Loan | None:
        """Memory for the tensors of the next message of a peer and channel. At most one loan is open for each.

        ``send`` recognises tensors that lie in it, and copies the others beside them.

        Args:
            peer: one of the context's peers.
            channel: of the message.
            sizes: bytes of each tensor that is not None.

        Returns:
            The loan; None if the message would not lie in such memory, or ``send`` would refuse it.
        """
