"""What a rank has in common with each of its peers, and the transport between host memories that follows from it.

Every rank publishes what two processes must have in common to share memory. Of two ranks that have it, the higher one
passes a slot to the lower one and publishes whether that worked, so both choose the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rrfp import timeouts
from rrfp.transports.base import TransportContext
from rrfp.transports.links.flow import HomeLoop
from rrfp.transports.links.linked import LinkedTransport
from rrfp.transports.rendezvous import by_peer, lookup_peer, publish_in_time
from rrfp.transports.shm.transport import ShmTransport
from rrfp.transports.shm.trial import Host, TrialAnswers, is_reached_by_ipc, obstacle_between, try_slot
from rrfp.transports.zmq.transport import ZmqTransport


class HostChoice:
    """Chooses shm or zmq for each peer."""

    def __init__(self, context: TransportContext, host: Host) -> None:
        #: For each peer, why this rank cannot share host memory with it; empty where it can.
        self.obstacles: dict[int, str] = {}
        #: What each peer has published.
        self.hosts: dict[int, Host] = {}
        self._context = context
        self._own = host

    def _key(self, *ranks: int) -> str:
        return f"auto/{self._context.run_id}/{self._context.restart}/{'-'.join(map(str, ranks))}"

    async def look(self, home: HomeLoop, deadline_s: float) -> None:
        """Find the obstacles."""
        context = self._context
        answers = None if self._own.obstacle else TrialAnswers(context.rank, home)
        try:
            published = replace(self._own, address="" if answers is None else answers.address)
            await publish_in_time(context, self._key(context.rank), published.pack())
            self.obstacles = await by_peer(context.peers, lambda peer: self._obstacle(peer, home, deadline_s))
        finally:
            if answers is not None:
                answers.close()

    async def _obstacle(self, peer: int, home: HomeLoop, deadline_s: float) -> str:
        context, rank = self._context, self._context.rank
        host = self.hosts[peer] = Host.unpack(peer, await lookup_peer(context, peer, self._key(peer), deadline_s))
        if obstacle := obstacle_between(self._own, host):
            return obstacle
        if peer > rank:
            return (await lookup_peer(context, peer, self._key(rank, peer), deadline_s)).decode(errors="replace")
        timeout_s = max(0.0, min(timeouts.TRIAL_S, deadline_s - home.loop.time()))
        obstacle = await try_slot(host.address, home, timeout_s)
        await publish_in_time(context, self._key(peer, rank), obstacle.encode())
        return obstacle

    def transports(
        self, context: TransportContext, whole: LinkedTransport[Any] | None = None
    ) -> Iterator[ShmTransport | ZmqTransport]:
        """One transport or more, each with its part of the context's peers, and a part of ``whole``."""
        shared = tuple(peer for peer in context.peers if not self.obstacles[peer])
        others = tuple(peer for peer in context.peers if self.obstacles[peer])
        if shared:
            yield ShmTransport(replace(context, peers=shared), whole)
        if others or not shared:
            is_near = all(is_reached_by_ipc(self._own, self.hosts[peer]) for peer in others)
            beyond = replace(context, peers=others, single_host=context.single_host and is_near)
            yield ZmqTransport(beyond, whole=whole)

    def describe(self, peer: int) -> str:
        """The choice for a peer, and the reason if it is not shm."""
        obstacle = self.obstacles[peer]
        return f"zmq ({obstacle})" if obstacle else "shm"
