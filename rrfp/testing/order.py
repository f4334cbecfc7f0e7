"""A transport that delivers in another order than messages came, as slow and busy networks do.

Use it to show that a hint, a stage program or a trainer does not depend on the order of arrival::

    choices = random.Random(seed)
    rrfp.local(modules, transport=reordered(InprocTransport, lambda count: choices.randrange(count)))
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from rrfp.errors import RrfpError
from rrfp.transports.base import Channel, Message, Transport, TransportContext, TransportStatistics

#: Picks one of so many, 0 being the first.
Pick = Callable[[int], int]

#: Longest pause before a delivery, in steps of `PAUSE_S` seconds.
MAX_PAUSES = 4
PAUSE_S = 0.0005


def reordered(
    factory: Callable[[TransportContext], Transport], pick: Pick
) -> Callable[[TransportContext], ReorderingTransport]:
    """A factory, to pass as ``transport``.

    Args:
        factory: makes the transport that really moves messages.
        pick: decides pauses and order; called with a count, answers below it.
    """
    return lambda context: ReorderingTransport(context, factory(context), pick)


class ReorderingTransport(Transport):
    """Holds what arrives for a while, and releases what ``pick`` says.

    Tensor messages may overtake each other even within a channel, which goes beyond the contract of a transport: a
    rank must not depend on their order at all. Control messages of one peer stay in order.

    Args:
        context: who this rank is.
        inner: moves the messages.
        pick: see `reordered`.
    """

    def __init__(self, context: TransportContext, inner: Transport, pick: Pick) -> None:
        super().__init__(context)
        self._inner = inner
        self._pick = pick
        self._held: list[Message | RrfpError] = []
        self._filled = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """See `Transport.start`."""
        await self._inner.start()
        self._reader = asyncio.create_task(self._read())

    async def send(self, peer: int, message: Message) -> None:
        """See `Transport.send`."""
        await self._inner.send(peer, message)

    async def receive(self) -> Message:
        """One of the messages held; errors keep their place among them."""
        while not self._held:
            self._filled.clear()
            await self._filled.wait()
        await asyncio.sleep(self._pick(MAX_PAUSES) * PAUSE_S)
        candidates = list(self._candidates())
        entry = self._held.pop(candidates[self._pick(len(candidates))])
        if isinstance(entry, RrfpError):
            raise entry
        return entry

    async def close(self) -> None:
        """See `Transport.close`."""
        self._stop()
        await self._inner.close()

    def abort(self) -> None:
        """See `Transport.abort`."""
        self._stop()
        self._inner.abort()

    def statistics(self) -> TransportStatistics:
        """See `Transport.statistics`."""
        return self._inner.statistics()

    def _candidates(self) -> Iterator[int]:
        """Places in ``_held`` of what may be delivered next."""
        controlled: set[int] = set()
        for place, entry in enumerate(self._held):
            if isinstance(entry, RrfpError):
                if place == 0:
                    yield place
                return
            if entry.channel is not Channel.CONTROL:
                yield place
            elif entry.sender not in controlled:
                controlled.add(entry.sender)
                yield place

    async def _read(self) -> None:
        running = True
        while running:
            entry: Message | RrfpError
            try:
                entry = await self._inner.receive()
            except RrfpError as error:
                entry = error
                running = self._reader is not None
            self._held.append(entry)
            self._filled.set()
            if isinstance(entry, RrfpError):
                await asyncio.sleep(0)  # an end that is closed raises without waiting

    def _stop(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
