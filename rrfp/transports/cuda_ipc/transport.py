"""For ranks on devices: `PulledTransport` with the peers of this host where a trial works, staging with all others.

Only the carrier of the pulled tensors, and what stages, see the host's memory; both are shm or zmq, as `auto` chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rrfp.transports.auto import AutoTransport, log_choice
from rrfp.transports.base import Transport, TransportContext
from rrfp.transports.by_peer import ByPeerTransport
from rrfp.transports.cuda_ipc.pulled import PulledTransport
from rrfp.transports.cuda_ipc.trial import try_pulls
from rrfp.transports.device_sharing import SharesDeviceMemory
from rrfp.transports.flow import HomeLoop
from rrfp.transports.host_choice import HostChoice
from rrfp.transports.shm.transport import ShmTransport
from rrfp.transports.shm.trial import Host, this_host
from rrfp.transports.staged import StagedTransport


class CudaIpcTransport(ByPeerTransport[Transport]):
    """Device tensors are pulled by peers on the same host, or staged through host memory; all else as with `auto`.

    A rank that computes on the CPU, or on a device whose memory cannot be shared, may be a peer of one that pulls.

    Args:
        context: this rank, its peers and the limits.
    """

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        if context.copies is not None:
            self.carries |= {context.copies.kind}

    def _host(self) -> Host:
        return this_host()

    async def _choose(self, home: HomeLoop, deadline_s: float) -> Sequence[Transport]:
        context, copies = self.context, self.context.copies
        sharing = copies if isinstance(copies, SharesDeviceMemory) else None
        choice = HostChoice(context, self._host(), "" if sharing is None else sharing.sharing)
        await choice.look(home, deadline_s)
        self._check_open()
        obstacles: dict[int, str] = {}
        if sharing is not None:
            near = [peer for peer in context.peers if not choice.obstacles[peer]]
            like = [peer for peer in near if choice.sharing[peer] == sharing.sharing]
            obstacles = await try_pulls(context, sharing, like, deadline_s)
            self._check_open()
        log_choice(context.rank, {peer: _describe(peer, choice, obstacles) for peer in context.peers})
        pulled = tuple(peer for peer, obstacle in obstacles.items() if not obstacle)
        others = tuple(peer for peer in context.peers if peer not in pulled)
        inners: list[Transport] = []
        if sharing is not None and pulled:
            # A run of its own: this rank may have another end of shm, with the other peers.
            own = replace(context, peers=pulled, run_id=f"{context.run_id}/cuda_ipc")
            inners.append(PulledTransport(own, ShmTransport(own), sharing))
        if others or not pulled:
            rest = AutoTransport(replace(context, peers=others), choice)
            inners.append(rest if copies is None else StagedTransport(rest, copies, owns_copies=False))
        return inners

    async def close(self) -> None:
        """See `Transport.close`."""
        try:
            await super().close()
        finally:
            self._close_copies()

    def abort(self) -> None:
        """See `Transport.abort`."""
        super().abort()
        self._close_copies()

    def _close_copies(self) -> None:
        if self.context.copies is not None:
            self.context.copies.close()


def _describe(peer: int, choice: HostChoice, obstacles: dict[int, str]) -> str:
    """The choice for a peer; with the reason where it does not pull, though the devices could."""
    chosen = choice.describe(peer)
    if peer not in obstacles:
        return chosen
    obstacle = obstacles[peer]
    return f"{chosen}, device tensors through host memory ({obstacle})" if obstacle else f"cuda_ipc over {chosen}"
