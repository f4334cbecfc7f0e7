"""The checks of a transport's shortcuts, if it offers any: messages that are delivered, and those sent at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial, wraps

from rrfp.errors import RrfpError
from rrfp.testing.checks import NotOfferedError, checks_of
from rrfp.testing.transport_checks import data, ends, flow, frames, peers
from rrfp.testing.transport_checks.losses import naming_losses
from rrfp.testing.transport_checks.pair import Check, MakePair, Pair, PairOptions, WrappedTransport
from rrfp.transports.base import Message, Transport, delivering, sending_at_once


class _Direct(WrappedTransport):
    """A transport used by its shortcuts, as far as offered."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self._delivered: asyncio.Queue[Message | RrfpError] | None = None
        self._at_once = sending_at_once(inner)
        if (transport := delivering(inner)) is not None:
            self._delivered = asyncio.Queue()
            transport.deliver_to(self._delivered.put_nowait)

    async def send(self, peer: int, message: Message) -> None:
        if self._at_once is None or not self._at_once.send_at_once(peer, message):
            await self._inner.send(peer, message)

    async def receive(self) -> Message:
        if self._delivered is None:
            return await self._inner.receive()
        entry = await self._delivered.get()
        if isinstance(entry, RrfpError):
            raise entry
        return entry


@asynccontextmanager
async def _direct_pair(make_pair: MakePair, options: PairOptions) -> AsyncIterator[Pair]:
    async with make_pair(options) as pair:
        ends_of_pair = [end for end in (pair.left, pair.right, pair.third) if end is not None]
        if not any(delivering(end) or sending_at_once(end) for end in ends_of_pair):
            raise NotOfferedError("the transport offers no shortcut")
        left, right, *others = map(_Direct, ends_of_pair)
        yield replace(pair, left=left, right=right, third=others[0] if others else None)


def _directly(check: Check) -> Check:
    """``check`` by a transport's shortcuts, if it offers any."""

    @wraps(check)
    async def run(make_pair: MakePair) -> None:
        await naming_losses(check)(partial(_direct_pair, make_pair))

    run.__name__ = f"{check.__name__}_directly"
    return run


# Not those of back-pressure, nor of waiting calls: what is delivered counts as received, and is never waited for.
CHECKS: tuple[Check, ...] = tuple(
    map(
        _directly,
        (
            *checks_of(data),
            flow.check_fifo_per_channel,
            flow.check_message_larger_than_the_queue,
            ends.check_refused_calls,
            ends.check_statistics,
            ends.check_close_delivers,
            ends.check_death_comes_after_messages,
            peers.check_three_ranks,
            peers.check_one_of_three_dies,
            *checks_of(frames),
        ),
    )
)
