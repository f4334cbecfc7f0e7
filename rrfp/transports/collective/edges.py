"""How a rank makes its edges."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Sequence
from functools import partial

from rrfp.errors import ConfigError, RrfpError, TransportClosedError, TransportError
from rrfp.transports.base import TransportContext
from rrfp.transports.carried.edge import Edge, read_error
from rrfp.transports.carried.wires import Backend, EdgeName, Wire
from rrfp.transports.collective.store import RendezvousStore
from rrfp.transports.collective.threads import start_thread
from rrfp.transports.flow import CLOSED, HomeLoop, settle
from rrfp.transports.rendezvous import in_thread, publish_in_time


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
        #: Fails with the first error passed to `end`.
        self._ended: asyncio.Future[None] = home.loop.create_future()
        self._ended.add_done_callback(read_error)

    async def make(self, peers: Collection[int], deadline_s: float) -> dict[EdgeName, Edge]:
        """Both edges between this rank and each of ``peers``.

        Raises:
            TransportError: if a peer does not make its end in time.
            RrfpError: the error passed to `end` meanwhile.
        """
        rank = self._context.rank
        names = sorted(edge for peer in peers for edge in (EdgeName(rank, peer), EdgeName(peer, rank)))
        making = asyncio.create_task(self._make(names, deadline_s))
        try:
            await asyncio.wait({making, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                self._ended.result()
            making.result()
        finally:
            making.cancel()
        wires, self._wires = self._wires, {}
        return {name: Edge(wire, self._home) for name, wire in wires.items()}

    async def _make(self, names: Sequence[EdgeName], deadline_s: float) -> None:
        for name in names:
            timeout_s = max(deadline_s - self._home.loop.time(), 0.001)
            self._store = RendezvousStore(self._context.rendezvous, self._key(f"{name}/"), timeout_s)
            try:
                # A backend that connects may take no notice of its time limit, as gloo does when the other end died.
                async with asyncio.timeout_at(deadline_s):
                    await in_thread(partial(self._connect, name, self._store, timeout_s), start_thread)
            except Exception as error:
                peer = name.target if name.source == self._context.rank else name.source
                limit_s = self._context.connect_timeout_s
                reason = f"{error!s:.200}" or "its end did not come"
                raise TransportError(f"no edge with rank {peer} within {limit_s:g} s: {reason}") from error

    def _key(self, name: object) -> str:
        return f"collective/{self._context.run_id}/{self._context.restart}/{name}"

    async def compare_backends(self, peers: Collection[int], deadline_s: float) -> None:
        """Tell ``peers`` which backend this rank has.

        Raises:
            TransportError: if a peer does not tell its own in time.
            ConfigError: if a peer has another one.
        """
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

    def end(self, error: RrfpError) -> None:
        """Have `make` raise ``error``, and free the wires that it has made and not returned.

        May be called twice; never waits, also for a backend that is connecting.
        """
        with self._lock:
            self._closed = True
            wires, self._wires = self._wires, {}
        settle(self._ended, error)
        if self._store is not None:
            self._store.close()
        for wire in wires.values():
            wire.abort()
