"""The default: the best transport for each peer. In one process `inproc`; in one host `shm`; otherwise `zmq` over tcp.

Tensors of a device whose memory processes can share travel by `cuda_ipc` within a host.

Every rank publishes what two processes must have in common to share memory. Of two ranks that have it, the higher one
passes a slot to the lower one and publishes whether that worked, so both choose the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rrfp import timeouts
from rrfp.devices.copies import SharesDeviceMemory
from rrfp.log import get_logger
from rrfp.transports.base import Channel, Loan, Transport, TransportContext
from rrfp.transports.inproc import InprocTransport
from rrfp.transports.links.flow import HomeLoop
from rrfp.transports.links.linked import LinkedTransport
from rrfp.transports.rendezvous import LocalRendezvous, by_peer, lookup_peer, publish_in_time
from rrfp.transports.shm.link import ShmLink, ShmOutlet
from rrfp.transports.shm.transport import ShmTransport
from rrfp.transports.shm.trial import Host, TrialAnswers, is_reached_by_ipc, obstacle_between, this_host, try_slot
from rrfp.transports.zmq.transport import ZmqLink, ZmqTransport

_log = get_logger(__name__)


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


def auto_transport(context: TransportContext) -> Transport:
    """The best transport for each peer, as a plugin's factory makes it."""
    if isinstance(context.rendezvous, LocalRendezvous) or not isinstance(context.copies, SharesDeviceMemory):
        return host_transport(context)
    from rrfp.transports.cuda_ipc.transport import CudaIpcTransport

    return CudaIpcTransport(context)


def host_transport(context: TransportContext) -> InprocTransport | AutoTransport:
    """The best transport between host memories."""
    return InprocTransport(context) if isinstance(context.rendezvous, LocalRendezvous) else AutoTransport(context)


def explain() -> str:
    """The choice that `auto` would make for a rank of this process."""
    host = this_host()
    if host.obstacle:
        return f"inproc in one process; zmq between all others, and device tensors staged there, since {host.obstacle}"
    namespaces = ", ".join((host.user_namespace, host.network_namespace, host.pid_namespace))
    return (
        f"inproc in one process; shm with processes of user {host.user} on this host in the namespaces {namespaces}, "
        "and cuda_ipc with those that can open memory of each other's CUDA devices; zmq with all others; device "
        "tensors staged where cuda_ipc does not move them (collective, with NCCL, by name only)"
    )


def log_choice(rank: int, choices: Mapping[int, str]) -> None:
    by_choice: dict[str, list[str]] = {}
    for peer, choice in choices.items():
        by_choice.setdefault(choice, []).append(str(peer))
    text = "; ".join(f"{choice} with rank {', '.join(peers)}" for choice, peers in by_choice.items())
    if text:
        _log.info("transport of rank %d: %s", rank, text)


class AutoTransport(LinkedTransport[ShmLink | ZmqLink]):
    """Between processes: shm with the peers that this rank can share memory with, zmq with the others."""

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self._parts: tuple[ShmTransport | ZmqTransport, ...] = ()

    def _host(self) -> Host:
        return this_host(self.context.max_message_bytes)

    async def _connect(self, home: HomeLoop, deadline_s: float) -> None:
        context, choice = self.context, HostChoice(self.context, self._host())
        await choice.look(home, deadline_s)
        self._check_open()
        log_choice(context.rank, {peer: choice.describe(peer) for peer in context.peers})
        self._parts = tuple(choice.transports(context, self))
        await asyncio.gather(*(part.start() for part in self._parts))
        self._links = {peer: link for part in self._parts for peer, link in part._links.items()}

    def lend(self, peer: int, channel: Channel, sizes: Sequence[int]) -> Loan | None:
        link = None if self._closing or self._is_closed else self._links.get(peer)
        outlet = None if link is None else link.outlets.get(channel)
        return outlet.lend(sizes) if isinstance(outlet, ShmOutlet) else None

    def _free(self) -> None:
        for part in self._parts:
            part.abort()
