"""A transport around another one, that delivers its messages in another order.

`reordered` shows that a hint, a stage program or a trainer does not depend on the order of arrival, which differs on
slow and busy networks::

    choices = random.Random(seed)
    rrfp.local(modules, transport=reordered(InprocTransport, lambda count: choices.randrange(count)))
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from rrfp.errors import RrfpError, TransportClosedError
from rrfp.testing.transport_checks.pair import WrappedTransport
from rrfp.transports.base import Channel, Message, Transport, TransportContext

#: Picks an index below a count, 0 being the first.
Pick = Callable[[int], int]

#: Longest pause before a delivery, in steps of `PAUSE_S` seconds.
MAX_PAUSES = 4
PAUSE_S = 0.0005


def reordered(
    factory: Callable[[TransportContext], Transport], pick: Pick
) -> Callable[[TransportContext], ReorderingTransport]:
    """A factory to pass as ``transport``: of `ReorderingTransport`s around those that ``factory`` makes."""
    return lambda context: ReorderingTransport(context, factory(context), pick)


class ReorderingTransport(WrappedTransport):
    """Holds arrived messages for a while, and delivers the one that ``pick`` chooses.

    Tensor messages may overtake each other even within a channel, which a transport's contract excludes: a rank must
    not depend on their order at all. Control messages of one peer stay in order.
    """

    def __init__(self, context: TransportContext, inner: Transport, pick: Pick) -> None:
        super().__init__(inner)
        self.context = context
        self._pick = pick
        self._held: list[Message | RrfpError] = []
        self._filled = asyncio.Event()
        self._is_closed = False
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._inner.start()
        self._reader = asyncio.create_task(self._read())

    async def receive(self) -> Message:
        """One of the held messages; an error waits for those before it."""
        await self._wait_for_entry()
        await asyncio.sleep(self._pick(MAX_PAUSES) * PAUSE_S)
        await self._wait_for_entry()  # a close or another receive may have come meanwhile
        candidates = list(self._candidates())
        entry = self._held.pop(candidates[self._pick(len(candidates))])
        if isinstance(entry, RrfpError):
            raise entry
        return entry

    def _candidates(self) -> Iterator[int]:
        """Indices in ``_held`` of the entries that may be delivered next."""
        control_senders: set[int] = set()
        for index, entry in enumerate(self._held):
            if isinstance(entry, RrfpError):
                if index == 0:
                    yield index
                return
            if entry.channel is not Channel.CONTROL:
                yield index
            elif entry.sender not in control_senders:
                control_senders.add(entry.sender)
                yield index

    async def _wait_for_entry(self) -> None:
        while not (self._held or self._is_closed):
            self._filled.clear()
            await self._filled.wait()
        if self._is_closed:
            raise TransportClosedError("the transport is closed")

    async def _read(self) -> None:
        while not self._is_closed:
            try:
                self._held.append(await self._inner.receive())
            except TransportClosedError:
                self._is_closed = True
            except RrfpError as error:
                self._held.append(error)
            self._filled.set()
