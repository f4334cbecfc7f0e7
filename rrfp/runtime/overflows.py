"""Whether gradients have overflowed on any rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rrfp.runtime import records


@dataclass(frozen=True, slots=True)
class OverflowShare:
    """A rank's part of the answer.

    Attributes:
        overflow: whether a gradient of this rank is inf or nan.
    """

    overflow: bool

    def packed(self) -> bytes:
        """As bytes."""
        return records.pack(self)

    @classmethod
    def any_of(cls, gathered: Sequence[bytes]) -> bool:
        """Whether a rank has an overflow; a ProtocolError if a share cannot be read."""
        shares = [records.unpack(cls, data, "a share of the overflows") for data in gathered]
        return any(share.overflow for share in shares)
