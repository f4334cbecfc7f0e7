"""All that one peer needs: a link over a carrier whose tensors the receiver pulls."""

from __future__ import annotations

from rrfp.errors import FrameError, RrfpError
from rrfp.transports.base import Message, Transport
from rrfp.transports.carried.edge import Edge
from rrfp.transports.carried.link import Link, Owner, entry_of
from rrfp.transports.carried.wires import Backend
from rrfp.transports.cuda_ipc.announcements import PULLED
from rrfp.transports.cuda_ipc.pulls import Pulls
from rrfp.transports.cuda_ipc.sender import SharingSender
from rrfp.transports.device_sharing import SharesDeviceMemory
from rrfp.transports.flow import HomeLoop
from rrfp.transports.header_checks import HeaderChecks


class PullLink(Link):
    """The connection to one peer; see `rrfp.transports.linked.LinkOf`.

    Args:
        peer: its rank.
        owner: the transport.
        carrier: moves announcements, and messages without device tensors.
        copies: shares and pulls.
        home: the loop.
    """

    def __init__(self, peer: int, owner: Owner, carrier: Transport, copies: SharesDeviceMemory, home: HomeLoop) -> None:
        self._copies = copies
        super().__init__(peer, owner, carrier, None, None, None, home)

    def _new_sender(self, edge: Edge | None, backend: Backend | None) -> SharingSender:
        limit = self._owner.context.max_message_bytes
        self._sharing = SharingSender(self._peer, self._carrier, self._copies, limit, self._reason, self._home)
        return self._sharing

    def _new_arrivals(self, edge: Edge | None, backend: Backend | None) -> Pulls:
        self._pulls = Pulls(
            self._copies,
            self._owner.context.max_message_bytes,
            self._on_whole,
            self._acknowledge,
            self._on_arrival_failed,
            self._owner.on_failure,
        )
        return self._pulls

    def _acknowledge(self, number: int) -> None:
        self._post(entry_of({PULLED: number}))

    def on_message(self, message: Message) -> None:
        """See `Link.on_message`."""
        if PULLED not in message.body:
            super().on_message(message)
            return
        try:
            self._sharing.on_pulled(HeaderChecks(message.sender).integer(PULLED, message.body[PULLED]))
        except FrameError as error:
            self._owner.on_bad_frame(error)

    def end(self, error: RrfpError) -> None:
        """See `LinkOf.end`."""
        super().end(error)
        self._pulls.end()
