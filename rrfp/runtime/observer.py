"""What a rank's runtime notifies to code that watches the run."""

from __future__ import annotations

from typing import Protocol

from rrfp.errors import Origin


class Observer(Protocol):
    """Called on the rank's loop or a thread that watches it. Must return at once, and raise nothing."""

    def stalled(self, text: str) -> None:
        """A rank, or a loop, has made no progress for ``stall_after`` seconds; ``text`` names the reason."""

    def aborted(self, origin: Origin) -> None:
        """The pipeline is aborted; may be called more than once."""


class Unobserved:
    """An `Observer` that does nothing."""

    def stalled(self, text: str) -> None:
        """See `Observer`."""

    def aborted(self, origin: Origin) -> None:
        """See `Observer`."""
