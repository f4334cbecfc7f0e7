"""Between ranks of one host that can open each other's device memory: the receiver pulls, all else over a carrier.

A sender shares the memory of a message's device tensors when they are complete, and announces it over the carrier with
all else of the message. The receiver copies the tensors into memory of its own device at once, and acknowledges that,
which ends ``send``. No kernel waits for another rank. Both ends bound what is under way by windows of ``queue_bytes``
for each peer and channel, acquired before the announcement and released when ``receive`` has returned the message.
"""

from __future__ import annotations

from rrfp.transports.base import Transport, TransportContext
from rrfp.transports.carried.transport import CarriedTransport
from rrfp.transports.cuda_ipc.link import PullLink
from rrfp.transports.device_sharing import SharesDeviceMemory
from rrfp.transports.flow import HomeLoop
from rrfp.transports.staged import StagedTransport


class PulledTransport(CarriedTransport):
    """See the module's docstring.

    Args:
        context: this rank, its peers and the limits. All of the peers have such a transport.
        carrier: of the host's tensors; not started.
        copies: of this rank's device; the caller closes them.
    """

    def __init__(self, context: TransportContext, carrier: Transport, copies: SharesDeviceMemory) -> None:
        # The carrier stages device tensors of control messages, and those whose memory cannot be shared.
        super().__init__(context, StagedTransport(carrier, copies, owns_copies=False))
        self.carries |= {copies.kind}
        self._copies = copies

    async def _connect(self, home: HomeLoop, deadline_s: float) -> None:
        await self._carrier.start()
        self._check_open()
        self._attach({peer: PullLink(peer, self, self._carrier, self._copies, home) for peer in self.context.peers})
        self._receive_all()
