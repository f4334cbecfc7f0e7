"""Tensors over a process group of two ranks for each direction; announcements and everything else over `auto`.

EXPERIMENTAL. A sender announces each message with tensors, then posts their transfer; the receiver posts the receives
when it gets the announcement, in the announced order. So no transfer waits for memory or for a task. Both ends bound
what is under way by windows of ``queue_bytes`` for each peer and channel, which are taken before the announcement and
given back when ``receive`` has returned the message.
"""

from __future__ import annotations

from dataclasses import replace

from rrfp.errors import PeerLostError, RrfpError, TransportClosedError, TransportError
from rrfp.transports.auto import host_transport
from rrfp.transports.base import Message, TransportContext
from rrfp.transports.carried.edge import Edge
from rrfp.transports.carried.link import Link
from rrfp.transports.carried.transport import CarriedTransport
from rrfp.transports.carried.wires import Backend, EdgeName
from rrfp.transports.collective.backends import CUDA, choose_backend
from rrfp.transports.collective.edges import EdgeMaker
from rrfp.transports.flow import CLOSED, HomeLoop
from rrfp.transports.staged import staged


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

    def _link(self, peer: int, edges: dict[EdgeName, Edge], backend: Backend, home: HomeLoop) -> Link:
        rank = self.context.rank
        outgoing, incoming = edges.get(EdgeName(rank, peer)), edges.get(EdgeName(peer, rank))
        return Link(peer, self, self._carrier, backend, outgoing, incoming, home)

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
