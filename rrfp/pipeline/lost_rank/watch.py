"""The watch that the ranks that are left keep over one another, over the rendezvous.

Torch waits minutes for a rank that dies while groups are made, and an error in a group names a connection, not a rank.
So each rank writes a sign into the rendezvous every second, from the decision until it leaves, and watches the next
rank in a ring. If that rank falls silent, its watcher tells all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from rrfp import timeouts
from rrfp.errors import Origin, PipelineAborted, TransportError
from rrfp.model.topology import Topology
from rrfp.pipeline.lost_rank.roll_call import RollCall
from rrfp.runtime.abort import describe, failure_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sign:
    """Says that a rank is there; its last one, that it leaves."""

    #: Whom it has looked after, and how many signs of that it has seen: its own watcher goes on there. -1: it stays.
    next: int = -1
    seen: int = 0


class SurvivorWatch:
    """Of the rank at ``topology``, one of ``ranks``; see the module's docstring. Methods are called on the loop.

    ``store_rank`` is the rank on whose host the store is, where that is known.
    """

    def __init__(
        self, roll_call: RollCall, ranks: Sequence[int], topology: Topology, store_rank: int | None = None
    ) -> None:
        self._roll_call = roll_call
        self._store_rank = store_rank
        self._topology = topology
        #: Whom it looks after, and how many signs of that it has seen.
        self._next = ranks[(ranks.index(topology.rank) + 1) % len(ranks)]
        self._seen = 0
        #: The loss that was found.
        self._loss: asyncio.Future[Origin] = asyncio.get_running_loop().create_future()
        self._leaves = asyncio.Event()
        self._signing = asyncio.create_task(self._sign())
        self._watching = [asyncio.create_task(self._watched(each)) for each in (self._look_after, self._listen)]

    @property
    def origin(self) -> Origin | None:
        """The loss that was found. May be called on any thread."""
        return self._loss.result() if self._loss.done() and not self._loss.cancelled() else None

    async def loss(self) -> PipelineAborted:
        """Wait until one is found."""
        return PipelineAborted(await asyncio.shield(self._loss))

    async def soon(self) -> Origin | None:
        """The loss behind an error that names none, once it is found; None if there is none."""
        await asyncio.wait({self._loss}, timeout=2 * timeouts.ROLL_CALL_S)
        return self.origin

    async def unless_lost(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` returns; a PipelineAborted that names a rank, once one is lost."""
        working = asyncio.create_task(work)
        either: tuple[asyncio.Future[Any], ...] = (working, self._loss)
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise await self.loss()
            try:
                return working.result()
            except (TransportError, TimeoutError):  # of the store
                if (origin := await self.soon()) is None:
                    raise
                raise PipelineAborted(origin) from None
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def leave(self) -> None:
        """This rank needs no other any more."""
        if self.origin is not None and self._store_rank == self._topology.rank:
            await asyncio.sleep(timeouts.NOTIFY_S)  # its process may host the store, where the others read the loss
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        self._leaves.set()
        await asyncio.wait({self._signing})

    async def _sign(self) -> None:
        """Say that this rank is there, until it leaves."""
        own, count = self._topology.rank, 0
        while not self._leaves.is_set():
            with suppress(Exception):  # of the store, which those that look notice
                await self._roll_call.publish(f"sign/{own}/{count}", Sign())
                count += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(timeouts.SIGN_S):
                    await self._leaves.wait()
        with suppress(Exception):
            await self._roll_call.publish(f"sign/{own}/{count}", Sign(self._next, self._seen))

    async def _watched(self, watch: Callable[[], Coroutine[Any, Any, Origin | None]]) -> None:
        """A store that fails is a loss too, of its host."""
        try:
            origin = await watch()
        except Exception as error:
            origin, host = failure_of(error, self._topology).origin, self._store_rank
            if host is not None and host != self._topology.rank and isinstance(error, TransportError | TimeoutError):
                origin = self._roll_call.aborted(host, f"its host had the store; {describe(error)}").origin
        if origin is not None and not self._loss.done():
            self._loss.set_result(origin)

    async def _look_after(self) -> Origin | None:
        """Watch the next rank: return its loss, published to the others, or None once all have left."""
        missed = 0
        # Why are looks counted, and not seconds? After a stop of this process all others would count as lost.
        while missed * timeouts.SIGN_S < timeouts.ROLL_CALL_S:
            if self._next == self._topology.rank:
                return None
            sign = await self._roll_call.look(f"sign/{self._next}/{self._seen}", timeouts.SIGN_S, Sign)
            missed = missed + 1 if sign is None else 0
            if sign is not None:
                self._next, self._seen = (self._next, self._seen + 1) if sign.next < 0 else (sign.next, sign.seen)
        loss = self._roll_call.aborted(self._next, "ended or fell silent after the loss of another rank").origin
        await self._roll_call.publish("loss", loss)
        return loss

    async def _listen(self) -> Origin | None:
        """The loss that another rank has found."""
        while True:
            loss: Origin | None = await self._roll_call.look("loss", timeouts.SURVIVORS_S, Origin)
            if loss is not None:
                return loss
