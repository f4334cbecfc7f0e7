"""The default: the best transport for each peer. In one process `inproc`; in one host `shm`; otherwise `zmq` over tcp.

Tensors of a device whose memory processes can share travel by `cuda_ipc` within a host.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from rrfp.devices.copies import SharesDeviceMemory
from rrfp.log import get_logger
from rrfp.transports.base import Channel, Loan, Transport, TransportContext
from rrfp.transports.host_choice import HostChoice
from rrfp.transports.inproc import InprocTransport
from rrfp.transports.links.flow import HomeLoop
from rrfp.transports.links.linked import LinkedTransport
from rrfp.transports.rendezvous import LocalRendezvous
from rrfp.transports.shm.link import ShmLink, ShmOutlet
from rrfp.transports.shm.transport import ShmTransport
from rrfp.transports.shm.trial import Host, this_host
from rrfp.transports.zmq.transport import ZmqLink, ZmqTransport

_log = get_logger(__name__)


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
    """Log the choice for each peer, in one line."""
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
