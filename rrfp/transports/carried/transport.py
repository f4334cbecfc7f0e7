"""A transport over another one, its carrier, which brings announcements and all messages without tensors."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rrfp.errors import FrameError, PeerLostError, RrfpError, TransportClosedError, TransportError
from rrfp.transports.base import Message, Transport, TransportContext, TransportStatistics, delivering
from rrfp.transports.carried.link import TunnelLink
from rrfp.transports.linked import LinkedTransport


class CarriedTransport(LinkedTransport[TunnelLink]):
    """What the kind of links does not matter to. A subclass starts the carrier, makes the links, and calls `_attach`.

    It calls `_receive_all` before or after that.
    """

    def __init__(self, context: TransportContext, carrier: Transport) -> None:
        super().__init__(context)
        self._carrier = carrier
        self._pump: asyncio.Task[None] | None = None
        #: What the carrier brought before there were links.
        self._early: list[Message | RrfpError] = []
        self._staying = 0
        self._all_left = asyncio.Event()

    def _receive_all(self) -> None:
        """Read the carrier from now on."""
        if (carrier := delivering(self._carrier)) is not None:
            carrier.deliver_to(self._on_carrier)
        else:
            self._pump = asyncio.create_task(self._receive_from_carrier())

    def _attach(self, links: dict[int, TunnelLink]) -> None:
        """Use the links, one for each peer, from now on."""
        self._links = links
        self._staying = len(links)
        for entry in self._early:
            self._on_carrier(entry)
        self._early.clear()

    async def _receive_from_carrier(self) -> None:
        while True:
            try:
                entry: Message | RrfpError = await self._carrier.receive()
            except TransportClosedError:
                return
            except RrfpError as error:
                entry = error
            except Exception as error:  # of a device that copies for the carrier
                entry = TransportError(f"receiving failed: {type(error).__name__}: {error}")
                entry.__cause__ = error
            self._on_carrier(entry)

    def _on_carrier(self, entry: Message | RrfpError) -> None:
        """The carrier brought a message, or an error that its ``receive`` would raise."""
        if self._is_closed:
            return
        if not self._links:
            self._on_early(entry)
        elif isinstance(entry, Message):
            self._links[entry.sender].on_message(entry)
        elif isinstance(entry, PeerLostError):
            self._links[entry.peer].on_lost(entry)
        elif isinstance(entry, FrameError):
            self.on_bad_frame(entry)
        else:
            self.on_failure(entry)

    def _on_early(self, entry: Message | RrfpError) -> None:
        """An entry came before there were links; a subclass may do more."""
        self._early.append(entry)

    def on_failure(self, error: RrfpError) -> None:
        """An error of this end: ``receive`` raises it."""
        assert self._inbox is not None
        self._inbox.put(error)

    def statistics(self) -> TransportStatistics:
        """See `Transport.statistics`; strangers come to the carrier only."""
        return replace(super().statistics(), strangers=self._carrier.statistics().strangers)

    async def close_carrier(self) -> None:
        """One link has left; returns when all have, and the carrier is closed."""
        self._staying -= 1
        if self._staying:
            await self._all_left.wait()
            return
        await self._carrier.close()
        self._all_left.set()

    def _free(self) -> None:
        self._carrier.abort()
        if self._pump is not None:
            self._pump.cancel()
