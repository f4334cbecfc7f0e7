"""Asks all ranks for their status: for the watchdog of rank 0, and for a user who looks.

The question goes from the rank that asks along the control tree to all others, each of which answers at once and keeps
nothing. The rank that asks takes what has come in time, so a rank that does not answer keeps nobody waiting. Where it
is a neighbour, `PeerMonitor` names it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from rrfp import timeouts
from rrfp.errors import ProtocolError
from rrfp.runtime import records
from rrfp.runtime.all_gather import bytes_in, to_tensor
from rrfp.runtime.context import RankContext
from rrfp.runtime.control_tree import neighbours, towards
from rrfp.runtime.messenger import Handler
from rrfp.runtime.stall.peer_monitor import PeerMonitor
from rrfp.runtime.stall.status import JobStatus, RankAnswer, RankStatus
from rrfp.transports.base import Channel, Message, MessageKind

#: A neighbour that has so many questions to answer is asked no more: they would pile up where its loop stands.
MOST_ASKED = 8


@dataclass(slots=True)
class _Open:
    answers: dict[int, RankStatus]
    complete: asyncio.Event = field(default_factory=asyncio.Event)


class StatusQuery:
    """One rank's part in questions for the status of all. Used on one loop only.

    ``status`` gives this rank's; ``post`` queues a control message for a peer without waiting.
    """

    def __init__(
        self,
        context: RankContext,
        status: Callable[[], RankStatus],
        peer_monitor: PeerMonitor,
        post: Callable[[int, Message], None],
    ) -> None:
        self._topology = context.topology
        self._rank = context.topology.rank
        self._neighbours = neighbours(self._rank, self._topology.world)
        self._closed_peers = context.closed_peers
        self._status = status
        self._peer_monitor = peer_monitor
        self._post = post
        self._number = 0
        self._open: dict[int, _Open] = {}
        #: By neighbour, the questions that it has not answered.
        self._asked: Counter[int] = Counter()
        self.handlers: Mapping[MessageKind, Handler] = {
            MessageKind.STATUS_QUERY: self._on_query,
            MessageKind.STATUS: self._on_status,
        }

    async def ask(self, timeout_s: float | None = None) -> JobStatus:
        """Ask all ranks; takes ``timeout_s`` at most, by default `ANSWER_S`."""
        self._number += 1
        number, question = self._number, _Open({self._rank: self._status()})
        self._open[number] = question
        self._ask(self._neighbours, number, self._rank)
        try:
            if self._neighbours:
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeouts.ANSWER_S if timeout_s is None else timeout_s):
                        await question.complete.wait()
        finally:
            del self._open[number]
        answers = question.answers
        return JobStatus(self._rank, tuple(self._answer_of(rank, answers) for rank in range(self._topology.world)))

    def _on_query(self, message: Message) -> None:
        match message.body:
            case {"number": int(number), "asker": int(asker), **rest} if not rest and self._is_from(asker, message):
                own = to_tensor(records.pack(self._status()))
                body = {"number": number, "asker": asker, "rank": self._rank}
                self._send(message.sender, Message(Channel.CONTROL, MessageKind.STATUS, tensors=(own,), body=body))
                self._ask((peer for peer in self._neighbours if peer != message.sender), number, asker)
            case _:
                raise ProtocolError(f"rank {message.sender} asked for the status of no rank that it can answer")

    def _on_status(self, message: Message) -> None:
        match message.body:
            case {"number": int(number), "asker": int(asker), "rank": int(rank), **rest} if not rest:
                if self._is_from(rank, message) and (asker == self._rank or not self._is_from(asker, message)):
                    if rank == message.sender:
                        self._asked[rank] -= self._asked[rank] > 0
                        self._peer_monitor.on_answer(rank)
                    if asker == self._rank:
                        self._take(message, number, rank)
                    else:
                        self._send(towards(self._rank, asker), message)
                    return
        raise ProtocolError(f"rank {message.sender} sent a status that this rank did not ask for")

    def _take(self, message: Message, number: int, rank: int) -> None:
        status = records.unpack(RankStatus, bytes_in(message), "a status")
        if (question := self._open.get(number)) is not None:  # else it was given up
            question.answers[rank] = status
            if len(question.answers) == self._topology.world:
                question.complete.set()

    def _is_from(self, rank: int, message: Message) -> bool:
        """Whether ``message`` comes from the side of the tree on which ``rank``, another one, is."""
        others = range(self._topology.world)
        return rank != self._rank and rank in others and towards(self._rank, rank) == message.sender

    def _ask(self, peers: Iterable[int], number: int, asker: int) -> None:
        question = Message(Channel.CONTROL, MessageKind.STATUS_QUERY, body={"number": number, "asker": asker})
        for peer in peers:
            if peer in self._closed_peers:
                continue
            self._peer_monitor.expect_answer(peer)
            if self._asked[peer] < MOST_ASKED:
                self._asked[peer] += 1
                self._post(peer, question)

    def _send(self, peer: int, message: Message) -> None:
        if peer not in self._closed_peers:
            self._post(peer, message)

    def _answer_of(self, rank: int, answers: Mapping[int, RankStatus]) -> RankAnswer:
        status, topology = answers.get(rank), self._topology
        absent = "" if status is not None else self._why_absent(rank, answers)
        return RankAnswer(rank, topology.place_of(rank).stage, topology.name_of(rank), status, absent)

    def _why_absent(self, rank: int, answers: Mapping[int, RankStatus]) -> str:
        """Why there is no answer of ``rank``: it gave none, or a rank on the way did not."""
        silent = self._rank
        while silent in answers:
            silent = towards(silent, rank)
        why = "has left" if silent in self._closed_peers else "does not answer"
        return why if silent == rank else f"cannot be reached: {self._topology.name_of(silent)} {why}"
