"""Tensors over a process group of two ranks for each direction; announcements and everything else over `auto`.

EXPERIMENTAL. A sender announces each message with tensors, then posts their transfer; the receiver posts the receives
when it gets the announcement, in the announced order. So no transfer waits for memory or for a task. Both ends bound
what is under way by windows of ``queue_bytes`` for each peer and channel, which are taken before the announcement and
given back when ``receive`` has returned the message.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed.distributed_c10d import Store

from rrfp.errors import ConfigError, PeerLostError, RrfpError, TransportClosedError, TransportError
from rrfp.transports.auto import host_transport
from rrfp.transports.base import Message, Rendezvous, TransportContext
from rrfp.transports.carried.link import TunnelLink
from rrfp.transports.carried.transport import CarriedTransport
from rrfp.transports.carried.wires import Backend, Edge, EdgeName, Wire, read_error
from rrfp.transports.collective.gloo import GlooBackend
from rrfp.transports.collective.nccl import NcclBackend
from rrfp.transports.collective.threads import start_thread
from rrfp.transports.flow import CLOSED, HomeLoop, settle
from rrfp.transports.rendezvous import in_thread, publish_in_time
from rrfp.transports.staged import staged
from rrfp.transports.zmq.endpoint import LOOPBACK, interface_towards_master

_Result = TypeVar("_Result")


class RendezvousStore(Store):
    """A torch store over a `Rendezvous`, so that process groups meet wherever the transports do.

    Process groups ask for keys in C++, on a thread that waits; the rendezvous lives on the loop. So every call here
    runs on the loop, and `close` ends those that wait. Create it on the loop; use it on other threads, one at a time.
    """

    def __init__(self, rendezvous: Rendezvous, prefix: str, timeout_s: float) -> None:
        super().__init__()
        self._rendezvous = rendezvous
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._waiting: Future[Any] | None = None
        self._closed = threading.Event()

    def set(self, key: str, value: bytes | str) -> None:
        """Publish a value."""
        self._run(self._rendezvous.publish(self._prefix + key, value if isinstance(value, bytes) else value.encode()))

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        return self._run(self._rendezvous.lookup(self._prefix + key, self._timeout_s))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for some keys."""
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        for key in keys:
            self._run(self._rendezvous.lookup(self._prefix + key, timeout_s))

    def close(self) -> None:
        """Make the call that waits and all later ones raise; from any thread."""
        self._closed.set()
        if (waiting := self._waiting) is not None:
            waiting.cancel()

    def _run(self, call: Coroutine[Any, Any, _Result]) -> _Result:
        if self._closed.is_set():
            call.close()
            raise TransportClosedError(CLOSED)
        self._waiting = future = asyncio.run_coroutine_threadsafe(call, self._loop)
        if self._closed.is_set():
            future.cancel()
        return future.result()


class EdgeMaker:
    """Makes the edges of one rank, in the same order on all ranks and off the loop. Create it on the loop."""

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
        """Both edges between this rank and each of ``peers``."""
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
        """Tell ``peers`` which backend this rank has."""
        own, rendezvous = self._backend.name, self._context.rendezvous
        await publish_in_time(self._context, self._key(self._context.rank), own.encode())
        for peer in sorted(peers):
            try:
                value = await rendezvous.lookup(self._key(peer), max(deadline_s - self._home.loop.time(), 0.0))
            except TransportError as error:
                raise TransportError(f"rank {peer} did not connect: {error}") from error
            if value != own.encode():
                raise ConfigError(
                    f"rank {self._context.rank} moves tensors by {own}, rank {peer} by {value!r:.40}, if no other "
                    "program wrote that to the store: with transport collective all ranks must compute on devices of "
                    "one kind; transport='auto' joins any"
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


#: The kind of device between which tensors need not pass through host memory.
CUDA = "cuda"


async def choose_backend(context: TransportContext) -> Backend:
    """NCCL for a rank that computes on a CUDA device, otherwise gloo."""
    address = await _address(context)
    copies = context.copies
    if copies is None or copies.kind != CUDA:
        return GlooBackend(context.rank, address)
    if not (distributed.is_available() and distributed.is_nccl_available()):
        raise ConfigError(
            "transport is 'collective', must be another one for modules on cuda: this torch has no NCCL; 'auto' copies "
            "tensors through host memory"
        )
    index = torch.cuda.current_device() if copies.index is None else copies.index
    return NcclBackend(context.rank, torch.device(CUDA, index))


async def _address(context: TransportContext) -> str:
    """The address of the interface on which edges listen: within a host too, any user of it may connect there."""
    address = LOOPBACK if context.single_host else await in_thread(interface_towards_master)
    if context.secret is not None and not context.plain_data:
        raise ConfigError(
            f"collective would move tensors in plain text over tcp at {address}, and the job has a secret; pass "
            "data='plain' if those who can read the network may read them, or choose transport 'auto'"
        )
    if context.secret is None and not context.allow_insecure:
        raise ConfigError(
            f"collective would use tcp at {address} without authentication; pass allow_insecure=True if the network "
            "and the host are yours alone, or choose transport 'auto'"
        )
    return address


class CollectiveTransport(CarriedTransport):
    """Tensors over gloo, or NCCL between GPUs; experimental, and NCCL not run on several GPUs.

    Args:
        context: this rank, its peers and the limits. Edges join it with each of ``data_peers``.
        backend: makes the edges; by default gloo, or NCCL where the rank computes on a CUDA device.
    """

    def __init__(self, context: TransportContext, backend: Backend | None = None) -> None:
        # Other devices are staged in front of this, and edges move the host's tensors.
        copies = context.copies if context.copies is not None and context.copies.kind == CUDA else None
        super().__init__(context, staged(host_transport(replace(context, copies=copies)), copies))
        if copies is not None:
            self.carries |= {CUDA}
        self._backend = backend
        self._maker: EdgeMaker | None = None

    async def _connect(self, home: HomeLoop, deadline_s: float) -> None:
        context = self.context
        if self._backend is None:
            self._backend = await choose_backend(context)
        self._maker = EdgeMaker(context, self._backend, home)
        data_peers = context.peers if context.data_peers is None else context.data_peers
        with_edges = set(data_peers) & set(context.peers)
        await self._maker.compare_backends(with_edges, deadline_s)
        self._check_open()
        await self._carrier.start()
        self._check_open()
        self._receive_all()  # already: a peer that ends while edges are made would be waited for
        edges = await self._maker.make(with_edges, deadline_s)
        self._attach({peer: self._link(peer, edges, self._backend, home) for peer in context.peers})

    def _link(self, peer: int, edges: dict[EdgeName, Edge], backend: Backend, home: HomeLoop) -> TunnelLink:
        rank = self.context.rank
        outgoing, incoming = edges.get(EdgeName(rank, peer)), edges.get(EdgeName(peer, rank))
        return TunnelLink(peer, self, self._carrier, backend, outgoing, incoming, home)

    def _on_early(self, entry: Message | RrfpError) -> None:
        super()._on_early(entry)
        if isinstance(entry, PeerLostError) and self._maker is not None:
            self._maker.end(TransportError(f"rank {entry.peer} connected, then left: {entry.reason}"))

    def _free(self) -> None:
        if self._maker is not None:
            self._maker.end(TransportClosedError(CLOSED))
        super()._free()
        if self._backend is not None:
            self._backend.close()
