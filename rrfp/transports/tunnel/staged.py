"""Device tensors over a transport that carries CPU tensors only: staged through host memory on both sides.

The sender copies a message's device tensors to the host and sends them as CPU tensors; the body names the device of
each tensor. The receiver copies those to its own device; where it has none, nothing wraps its transport, and they stay
on the CPU. The copies run on streams of the rank's `DeviceCopies`, never on the loop, and those for different peers and
directions beside each other.
"""

from __future__ import annotations

from dataclasses import replace

from rrfp.devices.copies import DeviceCopies
from rrfp.transports.base import Transport
from rrfp.transports.links.flow import HomeLoop
from rrfp.transports.tunnel.link import StagedLink
from rrfp.transports.tunnel.transport import TunnelTransport


def staged(transport: Transport, copies: DeviceCopies | None) -> Transport:
    """``transport`` itself if it carries the tensors of the rank's device, else in front of it a `StagedTransport`."""
    return transport if copies is None or copies.kind in transport.carries else StagedTransport(transport, copies)


class StagedTransport(TunnelTransport):
    """Sends and receives device tensors over ``base``, which sees CPU tensors only. Others pass as they are."""

    def __init__(self, base: Transport, copies: DeviceCopies) -> None:
        super().__init__(replace(base.context, copies=copies))
        self.carries |= base.carries
        self._bases = (base,)

    async def _connect(self, home: HomeLoop, deadline_s: float) -> None:
        (base,) = self._bases
        await self._start_bases([base])
        self._attach(StagedLink(peer, base, self, home) for peer in self.context.peers)
        self._read(base, by_turns=True)
