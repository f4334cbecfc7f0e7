"""Checks over wrapped transports: errors name the messages that were lost, and checks by a transport's shortcuts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import NamedTuple

from rrfp.errors import RrfpError
from rrfp.testing.checks import DidNotHappenError, NotOfferedError
from rrfp.testing.transport_checks.pair import Check, MakePair, Pair, PairOptions, WrappedTransport
from rrfp.transports.base import Message, Transport, delivering, sending_at_once

_MOST_NAMED = 4


class _Passage(NamedTuple):
    """A message, as far as both ends know it."""

    sender: int
    receiver: int
    name: str

    @classmethod
    def of(cls, sender: int, receiver: int, message: Message) -> _Passage:
        subject = message.kind if message.task is None else f"{message.kind} {message.task}"
        return cls(sender, receiver, f"{subject} on {message.channel}")

    def __str__(self) -> str:
        return f"{self.name} from rank {self.sender} to {self.receiver}"


class _Ledger:
    """The messages of one check."""

    def __init__(self) -> None:
        self.begun: Counter[_Passage] = Counter()
        self.sent: Counter[_Passage] = Counter()
        self.received: Counter[_Passage] = Counter()

    def __str__(self) -> str:
        lost, waiting = self.sent - self.received, self.begun - self.sent - self.received
        parts = (_listed("sent and not received", lost), _listed("its send has not returned", waiting))
        return "; ".join(filter(None, parts))


def _listed(text: str, passages: Counter[_Passage]) -> str:
    if not (count := passages.total()):
        return ""
    others = count - min(count, _MOST_NAMED)
    named = ", ".join(map(str, list(passages.elements())[:_MOST_NAMED]))
    return f"{text}: {named}" + (f" and {others} more" if others else "")


class _Watched(WrappedTransport):
    """The end of ``rank``, which keeps the ledger."""

    def __init__(self, inner: Transport, rank: int, ledger: _Ledger) -> None:
        super().__init__(inner)
        self._rank = rank
        self._ledger = ledger

    async def send(self, peer: int, message: Message) -> None:
        passage = _Passage.of(self._rank, peer, message)
        self._ledger.begun[passage] += 1
        try:
            await self._inner.send(peer, message)
        except BaseException:
            self._ledger.begun[passage] -= 1
            raise
        self._ledger.sent[passage] += 1

    async def receive(self) -> Message:
        message = await self._inner.receive()
        self._ledger.received[_Passage.of(message.sender, self._rank, message)] += 1
        return message


def naming_losses(check: Check) -> Check:
    """``check``, whose error says which messages were lost."""

    @wraps(check)
    async def run(make_pair: MakePair) -> None:
        ledger = _Ledger()
        try:
            await check(_watched_by(ledger, make_pair))
        except DidNotHappenError as error:
            if not (lost := str(ledger)):
                raise
            raise DidNotHappenError(f"{error}; {lost}") from error

    return run


def _watched_by(ledger: _Ledger, make_pair: MakePair) -> MakePair:
    @asynccontextmanager
    async def make(options: PairOptions) -> AsyncIterator[Pair]:
        async with make_pair(options) as pair:
            third = None if pair.third is None else _Watched(pair.third, 2, ledger)
            yield replace(pair, left=_Watched(pair.left, 0, ledger), right=_Watched(pair.right, 1, ledger), third=third)

    return make


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


def directly(check: Check) -> Check:
    """``check`` by a transport's shortcuts, if it offers any."""

    @wraps(check)
    async def run(make_pair: MakePair) -> None:
        await naming_losses(check)(partial(_direct_pair, make_pair))

    run.__name__ = f"{check.__name__}_directly"
    return run
