"""A rank's one failure: whoever waits here ends with it, all others hear of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rrfp.core.tasks import Task
from rrfp.core.topology import Topology
from rrfp.errors import RrfpError
from rrfp.runtime.departures import spread_abort
from rrfp.runtime.failure import Failure, failure_of
from rrfp.transports.base import Transport

T = TypeVar("T")


class Lifeline:
    """See the module's docstring. All methods are called on the rank's loop.

    Args:
        place: where the rank is.
        transport: the way to the peers.
        stop: ends everything here, without waiting for the lane; called once, with the failure.
    """

    def __init__(self, place: Topology, transport: Transport, stop: Callable[[Failure], None]) -> None:
        #: Why the rank ended; None while it lives.
        self.failure: Failure | None = None
        self._place = place
        self._transport = transport
        self._stop = stop
        #: What the caller waits for: the start, or a step.
        self._current: asyncio.Task[Any] | None = None
        self._spreading: asyncio.Task[None] | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether the caller waits for something."""
        return self._current is not None

    def check(self) -> None:
        """Raise the failure, if there is one.

        Raises:
            PipelineAborted: naming its origin.
        """
        if self.failure is not None:
            raise self.failure.error()

    def tell(self) -> None:
        """Raise the failure, if there is one of which no call has told the caller. Errors as in `check`."""
        if self.failure is not None and not self.failure.told:
            raise self.failure.error()

    async def unless_aborted(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        """Wait for ``coroutine``, in a task of its own so that a failure can end it wherever it waits.

        Raises:
            PipelineAborted: if any rank has failed, or fails meanwhile; what ``coroutine`` raises is a failure too.
        """
        if self.failure is not None:
            coroutine.close()
            raise self.failure.error()
        self._current = waiting = asyncio.create_task(coroutine, name=f"rrfp-rank-{self._place.rank}")
        try:
            return await waiting
        except asyncio.CancelledError:
            if self.failure is None:
                self.fail(RrfpError(f"{what} was cancelled by its caller"))
                raise
        except Exception as error:
            self.fail(error)
        finally:
            self._current = None
        assert self.failure is not None
        raise self.failure.error()

    def fail(self, error: BaseException, task: Task | None = None) -> None:
        """End the pipeline on every rank because of ``error`` on this one. Only the first failure counts."""
        self.abort(failure_of(error, self._place, task))

    def abort(self, failure: Failure) -> None:
        """Stop everything here, and tell the peers."""
        if self.failure is not None:
            return
        self.failure = failure
        if self._current is not None:
            self._current.cancel()
        self._stop(failure)
        self._spreading = asyncio.create_task(spread_abort(self._transport, failure.origin))

    async def end(self) -> None:
        """Free the transport: in order, or once the peers were told of the failure."""
        if self._spreading is None:
            await self._transport.close()
        else:
            await self._spreading
