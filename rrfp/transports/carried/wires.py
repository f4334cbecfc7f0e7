"""What moves bytes from one rank to another: wires, and the backend that makes them.

A wire is one end of a directed edge. Its two ends post transfers in the same order, and a transfer ends when both have
posted it, and all bytes have been moved. Whatever thread a backend needs is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from rrfp.transports.header_checks import TensorSpec

Done = Callable[[Exception | None], None]
"""Takes the end of a transfer, and the error if it failed. Called once, on any thread."""


@dataclass(frozen=True, order=True, slots=True)
class EdgeName:
    """A directed edge. Ranks make their edges in ascending order, so that no two wait for each other in a circle."""

    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.source}->{self.target}"


class Wire(Protocol):
    """One end of a directed edge: the sending or the receiving one."""

    def post(self, number: int, tensors: Sequence[Tensor], done: Done) -> None:
        """Begin to send or receive some tensors, behind those posted before. Never waits.

        Args:
            number: of the transfer; the other end posts the same one.
            tensors: not empty ones. The wire refers to them until the transfer has ended; receiving ones are dense.
            done: called when all have been sent or received.
        """

    def skip(self, number: int) -> bool:
        """This end will not post transfer ``number``; whether later ones can still be posted."""

    def abort(self) -> None:
        """End the transfers under way and free everything; never waits. May be called twice."""


class Backend(Protocol):
    """Makes the wires of one rank.

    Attributes:
        name: both ends of an edge have backends of one name.
    """

    name: str

    def holds(self, tensor: Tensor) -> bool:
        """Whether a wire can move a tensor."""

    def empty(self, spec: TensorSpec) -> Tensor:
        """A dense tensor to receive into, which no stream uses."""

    def connect(self, edge: EdgeName, store: Any, timeout_s: float) -> Wire:
        """Make this rank's end of ``edge``. Waits for the other end; called on a helper thread.

        Args:
            edge: this rank is its source or its target.
            store: a torch store that only the two ends of the edge use.
            timeout_s: seconds to wait.

        Raises:
            Exception: whatever the backend raises; the message says why.
        """

    def close(self) -> None:
        """Free what the wires share; they have ended. May be called twice."""
