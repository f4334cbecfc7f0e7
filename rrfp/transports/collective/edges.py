"""Edges: wires whose transfers are futures, and how a rank makes its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Sequence
from functools import partial

from torch import Tensor

from rrfp.errors import ConfigError, RrfpError, TransportClosedError, TransportError
from rrfp.transports.base import TransportContext
from rrfp.transports.collective.store import RendezvousStore
from rrfp.transports.collective.wires import Backend, EdgeName, Wire
from rrfp.transports.flow import CLOSED, HomeLoop, settle
from rrfp.transports.rendezvous import in_thread, publish_in_time


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

    def post(self, tensors: Sequence[Tensor]) -> asyncio.Future[None]:
        """Begin the next transfer, of tensors that are not empty.

        Returns:
            Done when they have been moved; fails with the backend's error, or with that passed to `end`.
        """
        future: asyncio.Future[None] = self._home.loop.create_future()
        future.add_done_callback(_read_error)
        number, self.number = self.number, self.number + 1
        if self._error is not None:
            future.set_exception(self._error)
        elif not tensors:
            future.set_result(None)
        else:
            self._pending.add(future)
            self._wire.post(number, tensors, partial(self._on_done, future))
        return future

    def skip(self) -> bool:
        """Leave the next transfer out, which the other end may have posted; whether the edge can still be used."""
        number, self.number = self.number, self.number + 1
        return self._wire.skip(number)

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


def _read_error(future: asyncio.Future[None]) -> None:
    """Mark the error as read: a sender may have been cancelled, and the loss of a peer is reported once."""
    if not future.cancelled():
        future.exception()


class EdgeMaker:
    """Makes the edges of one rank, in the same order on all ranks and off the loop. Create it on the loop.

    Args:
        context: this rank, and where ranks meet.
        backend: makes the wires.
        home: the loop.
    """

    def __init__(self, context: TransportContext, backend: Backend, home: HomeLoop) -> None:
        self._context = context
        self._backend = backend
        self._home = home
        self._lock = threading.Lock()
        self._store: RendezvousStore | None = None
        self._closed = False
        self._wires: dict[EdgeName, Wire] = {}

    async def make(self, peers: Collection[int], deadline_s: float) -> dict[EdgeName, Edge]:
        """Both edges between this rank and each of ``peers``.

        Raises:
            TransportError: if a peer does not make its end in time.
            ConfigError: if a peer has another backend.
        """
        await self._compare_backends(peers, deadline_s)
        rank = self._context.rank
        for name in sorted(edge for peer in peers for edge in (EdgeName(rank, peer), EdgeName(peer, rank))):
            self._check_open()
            timeout_s = max(deadline_s - self._home.loop.time(), 0.001)
            self._store = RendezvousStore(self._context.rendezvous, self._key(f"{name}/"), timeout_s)
            try:
                await in_thread(partial(self._connect, name, self._store, timeout_s))
            except Exception as error:
                if self._closed:
                    raise TransportClosedError(CLOSED) from error
                peer = name.target if name.source == rank else name.source
                limit_s = self._context.connect_timeout_s
                raise TransportError(f"no edge with rank {peer} within {limit_s:g} s: {error!s:.200}") from error
        self._check_open()
        wires, self._wires = self._wires, {}
        return {name: Edge(wire, self._home) for name, wire in wires.items()}

    def _check_open(self) -> None:
        if self._closed:
            raise TransportClosedError(CLOSED)

    def _key(self, name: object) -> str:
        return f"collective/{self._context.run_id}/{self._context.restart}/{name}"

    async def _compare_backends(self, peers: Collection[int], deadline_s: float) -> None:
        own, rendezvous = self._backend.name, self._context.rendezvous
        await publish_in_time(self._context, self._key(self._context.rank), own.encode())
        for peer in sorted(peers):
            try:
                value = await rendezvous.lookup(self._key(peer), max(deadline_s - self._home.loop.time(), 0.0))
            except TransportError as error:
                raise TransportError(f"rank {peer} did not connect: {error}") from error
            if value != own.encode():
                raise ConfigError(
                    f"rank {self._context.rank} moves tensors by {own}, rank {peer} by {value!r:.40}: with transport "
                    "collective all ranks must compute on devices of one kind; transport='auto' joins any"
                )

    def _connect(self, name: EdgeName, store: RendezvousStore, timeout_s: float) -> None:
        wire = self._backend.connect(name, store, timeout_s)
        with self._lock:
            if not self._closed:
                self._wires[name] = wire
                return
        wire.abort()
        raise TransportClosedError(CLOSED)

    def close(self) -> None:
        """End `make`, and free the wires that it has made and not returned. May be called twice; never waits."""
        with self._lock:
            self._closed = True
            wires, self._wires = self._wires, {}
        if self._store is not None:
            self._store.close()
        for wire in wires.values():
            wire.abort()
