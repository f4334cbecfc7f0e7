"""An edge: a wire whose transfers are futures."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from rrfp.errors import RrfpError
from rrfp.transports.carried.wires import Wire
from rrfp.transports.flow import HomeLoop, settle


class Edge:
    """This rank's end of a directed edge. Used on one loop only.

    Attributes:
        turn: held while a transfer is announced and posted, so that transfers are posted in the order of announcement.
        number: of the next transfer.

    Args:
        wire: belongs to the edge from now on.
        home: the loop.
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
        """Leave the next transfer out, which the other end may have posted.

        Returns:
            Whether the edge can still be used; if not, all later transfers fail.
        """
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
