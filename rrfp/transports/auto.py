"""The default: the best transport for each peer. In one process `inproc`; in one host `shm`; otherwise `zmq` over tcp.

Tensors of a device whose memory processes can share travel by `cuda_ipc` within a host.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from rrfp.devices.copies import SharesDeviceMemory
from rrfp.errors import RrfpError
from rrfp.log import get_logger
from rrfp.transports.base import Channel, Deliver, Loan, Message, Transport, TransportContext
from rrfp.transports.by_peer import ByPeerTransport
from rrfp.transports.flow import HomeLoop
from rrfp.transports.host_choice import HostChoice
from rrfp.transports.inproc import InprocTransport
from rrfp.transports.rendezvous import LocalRendezvous
from rrfp.transports.shm.transport import ShmTransport
from rrfp.transports.shm.trial import Host, this_host
from rrfp.transports.zmq.transport import ZmqTransport

_log = get_logger(__name__)


def auto_transport(context: TransportContext) -> Transport:
    """The best transport for each peer: inproc in one process, shm in one host, otherwise zmq over tcp.

    A rank whose device's memory can be shared between processes gets `cuda_ipc`, which uses these for all else.
    """
    if isinstance(context.rendezvous, LocalRendezvous) or not isinstance(context.copies, SharesDeviceMemory):
        return host_transport(context)
    from rrfp.transports.cuda_ipc.transport import CudaIpcTransport

    return CudaIpcTransport(context)


def host_transport(context: TransportContext) -> Transport:
    """The best transport for each peer among those between host memories."""
    return InprocTransport(context) if isinstance(context.rendezvous, LocalRendezvous) else AutoTransport(context)


def explain() -> str:
    """The choice that `auto` would make for a rank in this process, in a sentence."""
    host = this_host()
    if host.obstacle:
        return f"inproc in one process; zmq between all others, and device tensors staged there, since {host.obstacle}"
    namespaces = ", ".join((host.user_namespace, host.network_namespace, host.pid_namespace))
    return (
        f"inproc in one process; shm with processes of user {host.user} on this host in the namespaces {namespaces}, "
        "and cuda_ipc with those that can pull tensors from each other's CUDA devices; zmq with all others; device "
        "tensors staged where they are not pulled (collective, with NCCL, by name only)"
    )


def log_choice(rank: int, choices: Mapping[int, str]) -> None:
    """Log the choice for each peer, in one line."""
    by_choice: dict[str, list[str]] = {}
    for peer, choice in choices.items():
        by_choice.setdefault(choice, []).append(str(peer))
    text = "; ".join(f"{choice} with rank {', '.join(peers)}" for choice, peers in by_choice.items())
    if text:
        _log.info("transport of rank %d: %s", rank, text)


class AutoTransport(ByPeerTransport[ShmTransport | ZmqTransport]):
    """Between processes: shm with the peers that this rank can share memory with, zmq with the others.

    Args:
        context: this rank, its peers and the limits.
        choice: what is known of the peers already; then nothing is published or logged.
    """

    def __init__(self, context: TransportContext, choice: HostChoice | None = None) -> None:
        super().__init__(context)
        self._choice = choice

    def _host(self) -> Host:
        return this_host(self.context.max_message_bytes)

    async def _choose(self, home: HomeLoop, deadline_s: float) -> Sequence[ShmTransport | ZmqTransport]:
        context, choice = self.context, self._choice
        if choice is None:
            choice = HostChoice(context, self._host())
            await choice.look(home, deadline_s)
            self._check_open()
            log_choice(context.rank, {peer: choice.describe(peer) for peer in context.peers})
        return tuple(choice.transports(context))

    def send_at_once(self, peer: int, message: Message) -> bool:
        """See `rrfp.transports.base.SendsAtOnce`."""
        inner = self._by_peer.get(peer)
        return inner is not None and inner.send_at_once(peer, message)

    def deliver_to(self, deliver: Deliver) -> None:
        """See `rrfp.transports.base.DeliversMessages`."""
        self._check_running()
        receiving, self._receiving = self._receiving, {}
        for inner in self._inners:
            if (task := receiving.get(inner)) is not None and not task.cancel():  # read ahead by `receive`
                deliver(_outcome(task))
            if not self._closed:
                inner.deliver_to(deliver)

    def lend(self, peer: int, channel: Channel, sizes: Sequence[int]) -> Loan | None:
        """See `rrfp.transports.base.LendsMemory`."""
        inner = self._by_peer.get(peer)
        return inner.lend(peer, channel, sizes) if isinstance(inner, ShmTransport) else None


def _outcome(receiving: asyncio.Task[Message]) -> Message | RrfpError:
    """The message that was received, or the error that was raised."""
    error = receiving.exception()
    if error is None:
        return receiving.result()
    if isinstance(error, RrfpError):
        return error
    raise error
