"""One-way byte channels between two ranks, and the backend that makes them.

A wire is one end of a directed edge. Its two ends post transfers in the same order, and a transfer ends when both have
posted it, and all bytes have been moved. Whatever thread a backend needs is its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from rrfp.errors import RrfpError
from rrfp.transports.flow import HomeLoop, settle
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
    """Makes the wires of one rank."""

    #: Both ends of an edge have backends of one name.
    name: str

    def holds(self, tensor: Tensor) -> bool:
        """Whether a wire can move a tensor."""

    def empty(self, spec: TensorSpec) -> Tensor:
        """A dense tensor to receive into, which no stream uses."""

    def connect(self, edge: EdgeName, store: Any, timeout_s: float) -> Wire:
        """Make this rank's end of ``edge``. Waits for the other end; called on a helper thread."""

    def close(self) -> None:
        """Free what the wires share; they have ended. May be called twice."""


class Edge:
    """This rank's end of a directed edge. Used on one loop only.

    Attributes:
        turn: held while a transfer is announced and posted, so that transfers are posted in the order of announcement.
        number: of the next transfer.
    """

    def __init__(self, wire: Wire, home: HomeLoop) -> None:
        self.turn = asyncio.Lock()
        self.number = 0
        self._wire = wire
        self._home = home
        self._pending: set[asyncio.Future[None]] = set()
        self._error: RrfpError | None = None
        self._is_out_of_step = False

    def post(self, tensors: Sequence[Tensor]) -> asyncio.Future[None]:
        """Begin the next transfer, of tensors that are not empty.

        Returns:
            Done when they have been moved; fails with the backend's error, or with that passed to `end`.
        """
        future: asyncio.Future[None] = self._home.loop.create_future()
        future.add_done_callback(read_error)
        number, self.number = self.number, self.number + 1
        if self._error is not None:
            future.set_exception(self._error)
        elif self._is_out_of_step:  # the other end's next transfer is not this one: its bytes would be taken for ours
            future.set_exception(RuntimeError(f"transfer {number} comes after one that was left out"))
        elif not tensors:
            future.set_result(None)
        else:
            self._pending.add(future)
            self._wire.post(number, tensors, partial(self._on_done, future))
        return future

    def skip(self) -> bool:
        """Leave the next transfer out, which the other end may have posted."""
        number, self.number = self.number, self.number + 1
        if not self._wire.skip(number):
            self._is_out_of_step = True
        return not self._is_out_of_step

    def end(self, error: RrfpError) -> None:
        """Fail all transfers with the first ``error`` passed, and free everything. May be called twice; never waits."""
        if self._error is not None:
            return
        self._error = error
        for future in self._pending:
            if not future.done():
                future.set_exception(type(error)(*error.args))
        self._pending.clear()
        self._wire.abort()

    def _on_done(self, future: asyncio.Future[None], error: Exception | None) -> None:
        self._home.call(partial(self._settle, future, error))

    def _settle(self, future: asyncio.Future[None], error: Exception | None) -> None:
        self._pending.discard(future)
        settle(future, error)


def read_error(future: asyncio.Future[None]) -> None:
    """Mark the error as read: a sender may have been cancelled, and the loss of a peer is reported once."""
    if not future.cancelled():
        future.exception()
