"""Tensors over a process group of two ranks for each direction; announcements and everything else over `auto`.

EXPERIMENTAL. A sender announces each message with tensors, then posts their transfer; the receiver posts the receives
when it gets the announcement, in the announced order. So no transfer waits for memory or for a task. Both ends bound
what is under way by windows of ``queue_bytes`` for each peer and channel, which are taken before the announcement and
given back when ``receive`` has returned the message.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rrfp.errors import FrameError, PeerLostError, RrfpError, TransportClosedError
from rrfp.transports.auto import auto_transport
from rrfp.transports.base import Message, Transport, TransportContext
from rrfp.transports.collective.backends import CUDA, choose_backend
from rrfp.transports.collective.edges import Edge, EdgeMaker
from rrfp.transports.collective.link import Link
from rrfp.transports.collective.wires import Backend, EdgeName
from rrfp.transports.direct import delivering
from rrfp.transports.flow import HomeLoop
from rrfp.transports.linked import LinkedTransport
from rrfp.transports.staged import staged


class CollectiveTransport(LinkedTransport[Link]):
    """Tensors over gloo, or NCCL between GPUs; experimental, and NCCL not run on several GPUs.

    Args:
        context: this rank, its peers and the limits. Edges join it with each of ``data_peers``.
        backend: makes the edges; by default gloo, or NCCL where the rank computes on a CUDA device.
    """

    def __init__(self, context: TransportContext, backend: Backend | None = None) -> None:
        super().__init__(context)
        self._backend = backend
        copies = context.copies
        if copies is not None and copies.kind == CUDA:
            self.carries |= {CUDA}  # other devices are staged in front of this, and edges move the host's tensors
        else:
            copies = None
        self._carrier: Transport = staged(auto_transport(replace(context, copies=copies)), copies)
        self._maker: EdgeMaker | None = None
        self._pump: asyncio.Task[None] | None = None
        self._staying = 0
        self._all_left = asyncio.Event()

    async def _connect(self, home: HomeLoop, deadline_s: float) -> None:
        context = self.context
        if self._backend is None:
            self._backend = await choose_backend(context)
        self._maker = EdgeMaker(context, self._backend, home)
        await self._carrier.start()
        self._check_open()
        data_peers = context.peers if context.data_peers is None else context.data_peers
        edges = await self._maker.make(set(data_peers) & set(context.peers), deadline_s)
        self._links = {peer: self._link(peer, edges, self._backend, home) for peer in context.peers}
        self._staying = len(self._links)
        if (carrier := delivering(self._carrier)) is not None:
            carrier.deliver_to(self._on_carrier)
        else:
            self._pump = asyncio.create_task(self._receive_from_carrier())

    def _link(self, peer: int, edges: dict[EdgeName, Edge], backend: Backend, home: HomeLoop) -> Link:
        rank = self.context.rank
        outgoing, incoming = edges.get(EdgeName(rank, peer)), edges.get(EdgeName(peer, rank))
        return Link(peer, self, self._carrier, backend, outgoing, incoming, home)

    async def _receive_from_carrier(self) -> None:
        while True:
            try:
                entry: Message | RrfpError = await self._carrier.receive()
            except TransportClosedError:
                return
            except RrfpError as error:
                entry = error
            self._on_carrier(entry)

    def _on_carrier(self, entry: Message | RrfpError) -> None:
        """The carrier brought a message, or an error that its ``receive`` would raise."""
        if self._is_closed:
            return
        if isinstance(entry, Message):
            self._links[entry.sender].on_message(entry)
        elif isinstance(entry, PeerLostError):
            self._links[entry.peer].on_lost(entry)
        elif isinstance(entry, FrameError):
            self.on_bad_frame(entry)
        else:
            assert self._inbox is not None
            self._inbox.put(entry)

    async def close_carrier(self) -> None:
        """One link has left; returns when all have, and the carrier is closed."""
        self._staying -= 1
        if self._staying:
            await self._all_left.wait()
            return
        await self._carrier.close()
        self._all_left.set()

    def _free(self) -> None:
        if self._maker is not None:
            self._maker.close()
        self._carrier.abort()
        if self._pump is not None:
            self._pump.cancel()
        if self._backend is not None:
            self._backend.close()
