"""For ranks on devices: slots of device memory with the peers of this host where a trial works, staging with others.

Everything else goes over shm or zmq, as `auto` chooses.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from rrfp.devices.copies import SharesDeviceMemory
from rrfp.transports.auto import log_choice
from rrfp.transports.base import Transport
from rrfp.transports.cuda_ipc.slots import SlotChannel, Slots
from rrfp.transports.cuda_ipc.trial import try_slots
from rrfp.transports.host_choice import HostChoice
from rrfp.transports.links.flow import HomeLoop
from rrfp.transports.shm.transport import ShmTransport
from rrfp.transports.shm.trial import Host, this_host
from rrfp.transports.tunnel.link import TunnelLink
from rrfp.transports.tunnel.staged import StagedLink
from rrfp.transports.tunnel.transport import TunnelTransport


class CudaIpcTransport(TunnelTransport):
    """Device tensors through slots to peers on the same host, or staged in host memory; all else as with `auto`.

    A rank that computes on the CPU, or on a device whose memory cannot be shared, may be a peer of one that uses slots.
    """

    def _host(self) -> Host:
        return this_host(self.context.max_message_bytes)

    async def _connect(self, home: HomeLoop, deadline_s: float) -> None:
        context, copies = self.context, self.context.copies
        sharing = copies if isinstance(copies, SharesDeviceMemory) else None
        choice = HostChoice(context, self._host(), "" if sharing is None else sharing.sharing)
        await choice.look(home, deadline_s)
        self._check_open()
        tried: dict[int, Slots | str] = {}
        if sharing is not None:
            like = [peer for peer in context.tensor_peers if choice.sharing[peer] == sharing.sharing]
            near = [peer for peer in like if not choice.obstacles[peer]]
            tried = await try_slots(context, sharing, near, deadline_s)
            self._check_open()
        log_choice(context.rank, {peer: _describe(choice.describe(peer), tried.get(peer)) for peer in context.peers})
        slots = {peer: found for peer, found in tried.items() if isinstance(found, Slots)}
        bases: list[Transport] = []
        if slots:
            # A run of its own: this rank may have another end of shm, with the other peers.
            bases.append(ShmTransport(replace(context, peers=tuple(slots), run_id=f"{context.run_id}/cuda_ipc")))
        others = tuple(peer for peer in context.peers if peer not in slots)
        if others or not slots:
            bases += choice.transports(replace(context, peers=others))
        await self._start_bases(bases)
        self._attach(self._link(peer, base, slots, home) for base in self._bases for peer in base.context.peers)
        for base in self._bases:
            self._read(base, by_turns=not slots.keys() & set(base.context.peers))

    def _link(self, peer: int, base: Transport, slots: dict[int, Slots], home: HomeLoop) -> StagedLink:
        copies, found = self.context.copies, slots.get(peer)
        if found is None:
            return StagedLink(peer, base, self, home)
        assert isinstance(copies, SharesDeviceMemory)
        return TunnelLink(peer, base, self, home, partial(SlotChannel, found, copies))


def _describe(chosen: str, tried: Slots | str | None) -> str:
    """The choice for a peer; with the reason where it has no slots, though the devices could."""
    if isinstance(tried, Slots):
        return f"cuda_ipc over {chosen}"
    return chosen if tried is None else f"{chosen}, device tensors through host memory ({tried})"
