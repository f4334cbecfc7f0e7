"""Lost messages: those that a check sent and that did not arrive."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import wraps
from typing import NamedTuple

from rrfp.testing.transport_checks.pair import Check, DidNotHappenError, MakePair, Pair, PairOptions, WrappedTransport
from rrfp.transports.base import Message, Transport

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
