"""A transport over base transports, each of which connects some of the peers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from rrfp.devices.copies import DeviceCopies
from rrfp.errors import FrameError, PeerLostError, RrfpError, TransportClosedError, TransportError
from rrfp.transports.base import Deliver, Message, Transport, TransportContext, TransportStatistics, delivering
from rrfp.transports.links.flow import HomeLoop
from rrfp.transports.links.linked import LinkedTransport
from rrfp.transports.tunnel.staged import StagedLink


class TunnelTransport(LinkedTransport[StagedLink]):
    """Reads base transports for its links. A subclass calls `_start_bases`, `_read` and `_attach`."""

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        if context.copies is not None:
            self.carries |= {context.copies.kind}
        self._bases: tuple[Transport, ...] = ()
        self._reading: list[asyncio.Task[None]] = []
        #: Those that bound by themselves what was sent, and are read while somebody waits for a message.
        self._by_turns: tuple[Transport, ...] = ()
        self._wanted = asyncio.Event()
        self._waiting = 0
        #: What base transports brought before there were links.
        self._early: list[Message | RrfpError] = []
        #: By base transport, the links that have not left, and what is set when all have.
        self._staying: Counter[Transport] = Counter()
        self._left: dict[Transport, asyncio.Event] = {}

    async def _start_bases(self, bases: Iterable[Transport]) -> None:
        """Use the base transports, each with its part of the peers."""
        self._bases = tuple(bases)
        await asyncio.gather(*(base.start() for base in self._bases))
        self._check_open()

    def _attach(self, links: Iterable[StagedLink]) -> None:
        """Use the links, one for each peer, from now on."""
        self._links = {link.peer: link for link in links}
        for base in self._bases:
            self._staying[base] = sum(link.base is base for link in self._links.values())
            self._left[base] = asyncio.Event()
        early, self._early = self._early, []
        for entry in early:
            self._on_entry(entry)

    async def receive(self) -> Message:
        """See `Transport.receive`."""
        self._waiting += 1
        self._wanted.set()
        try:
            return await super().receive()
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._wanted.clear()

    def deliver_to(self, deliver: Deliver) -> None:
        """See `rrfp.transports.base.DeliversMessages`."""
        super().deliver_to(deliver)
        self._wanted.set()

    def _read(self, base: Transport, *, by_turns: bool = False) -> None:
        """Read a base transport; ``by_turns``, only when asked and with room."""
        if by_turns:
            self._by_turns += (base,)
        if not by_turns and (direct := delivering(base)) is not None:
            direct.deliver_to(self._on_entry)
        else:
            self._reading.append(asyncio.create_task(self._read_all(base, by_turns=by_turns)))

    async def _read_all(self, base: Transport, *, by_turns: bool) -> None:
        while True:
            if by_turns:
                await self._wanted.wait()
            try:
                entry: Message | RrfpError = await base.receive()
            except (PeerLostError, FrameError) as error:
                entry = error
            except TransportClosedError as error:
                if not (self._closing or self._is_closed):
                    self.on_failure(error)
                return
            except Exception as error:  # of a plugin
                failure = TransportError(f"receiving failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
                self.on_failure(failure)
                return
            if by_turns and isinstance(entry, Message):
                await self._links[entry.sender].room_for(entry.channel)
            self._on_entry(entry)

    def _on_entry(self, entry: Message | RrfpError) -> None:
        """A base transport brought a message, or an error that its ``receive`` would raise."""
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
        """See `Transport.statistics`; only base transports see strangers, and queue what is staged."""
        own, bases = super().statistics(), {base: base.statistics() for base in self._bases}
        queued = own.queued_bytes + sum(bases[base].queued_bytes for base in self._by_turns)
        return replace(own, queued_bytes=queued, strangers=sum(each.strangers for each in bases.values()))

    async def leave_base(self, base: Transport) -> None:
        """See `TunnelOwner.leave_base`."""
        self._staying[base] -= 1
        if self._staying[base]:
            await self._left[base].wait()
            return
        await base.close()
        self._left[base].set()

    def _free(self) -> None:
        for base in self._bases:
            base.abort()
        for reading in self._reading:
            reading.cancel()
        if self.context.copies is not None:
            self.context.copies.close()


def staged(transport: Transport, copies: DeviceCopies | None) -> Transport:
    """``transport`` itself if it carries the device's tensors, else a `StagedTransport`."""
    return transport if copies is None or copies.kind in transport.carries else StagedTransport(transport, copies)


class StagedTransport(TunnelTransport):
    """Device tensors over ``base``, which sees CPU tensors only."""

    def __init__(self, base: Transport, copies: DeviceCopies) -> None:
        super().__init__(replace(base.context, copies=copies))
        self.carries |= base.carries
        self._bases = (base,)

    async def _connect(self, home: HomeLoop, deadline_s: float) -> None:
        (base,) = self._bases
        await self._start_bases([base])
        self._attach(StagedLink(peer, base, self, home) for peer in self.context.peers)
        self._read(base, by_turns=True)
