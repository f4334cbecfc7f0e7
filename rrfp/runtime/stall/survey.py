"""The status of all ranks for a user who looks, whether anything stalls or not.

A poll of the watchdog waits for every rank, passes through rank 0, and its verdict may end the job. A survey is of use
above all when some rank does not answer, and changes nothing: the question goes from the rank that asks along the
control tree to all others, each of which answers at once, with the status that it would give to a poll. After
`ANSWER_S` the asking rank takes what has come. No other rank keeps anything or waits for anything.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from rrfp import timeouts
from rrfp.errors import ProtocolError
from rrfp.runtime import records
from rrfp.runtime.all_gather import to_tensor
from rrfp.runtime.context import RankContext
from rrfp.runtime.control_tree import neighbours, towards
from rrfp.runtime.stall.status import RankAnswer, RankStatus, Survey
from rrfp.transports.base import Channel, Message, MessageKind, Plain

#: A rank that has so many questions of surveys to answer is asked no more: they would pile up where its loop stands.
MOST_ASKED = 8


class Surveys:
    """One rank's part in surveys. Used on one loop only.

    ``status`` gives this rank's; ``post`` queues a control message for a peer without waiting.
    """

    def __init__(
        self, context: RankContext, status: Callable[[], RankStatus], post: Callable[[int, Message], None]
    ) -> None:
        self._topology = context.topology
        self._rank = context.topology.rank
        self._neighbours = neighbours(self._rank, self._topology.world)
        self._closed_peers = context.closed_peers
        self._status = status
        self._post = post
        self._number = 0
        self._answers: dict[int, RankStatus] = {}
        self._complete = asyncio.Event()
        #: By neighbour, the questions that it has not answered.
        self._asked: Counter[int] = Counter()

    async def survey(self) -> Survey:
        """Ask all ranks; takes `ANSWER_S` at most. One at a time."""
        self._number += 1
        self._answers = {self._rank: self._status()}
        self._complete.clear()
        self._ask(self._neighbours, self._number, self._rank)
        if self._neighbours:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeouts.ANSWER_S):
                    await self._complete.wait()
        return Survey(self._rank, tuple(map(self._answer_of, range(self._topology.world))))

    def on_message(self, message: Message) -> None:
        """A question of a survey, or an answer to one, arrived."""
        match message.body:
            case {"survey": int(number), "asker": int(asker), "rank": int(rank)} if self._is_from(rank, message):
                if asker == self._rank:
                    self._on_answer(message, number, rank)
                    return
                if not self._is_from(asker, message):
                    self._pass_on(message, asker)
                    return
            case {"survey": int(number), "asker": int(asker), **rest} if not rest and self._is_from(asker, message):
                self._on_question(message.sender, number, asker)
                return
        raise ProtocolError(f"rank {message.sender} sent a {message.kind} message that is part of no survey")

    def _on_question(self, sender: int, number: int, asker: int) -> None:
        body: dict[str, Plain] = {"survey": number, "asker": asker, "rank": self._rank}
        self._send(sender, body, to_tensor(records.pack(self._status())))
        self._ask((peer for peer in self._neighbours if peer != sender), number, asker)

    def _on_answer(self, message: Message, number: int, rank: int) -> None:
        status = records.unpack(RankStatus, self._answered(message), "a status")
        if number == self._number:  # not of one that was given up
            self._answers[rank] = status
            if len(self._answers) == self._topology.world:
                self._complete.set()

    def _pass_on(self, message: Message, asker: int) -> None:
        self._send(towards(self._rank, asker), message.body, to_tensor(self._answered(message)))

    def _answered(self, message: Message) -> bytes:
        """The status in an answer, packed."""
        peer = message.sender
        if message.body["rank"] == peer and self._asked[peer]:
            self._asked[peer] -= 1
        tensor = message.tensors[0] if len(message.tensors) == 1 else None
        return tensor.numpy().tobytes() if tensor is not None and tensor.dtype is torch.uint8 else b""

    def _is_from(self, rank: int, message: Message) -> bool:
        """Whether ``message`` comes from the side of the tree on which ``rank``, another one, is."""
        others = range(self._topology.world)
        return rank != self._rank and rank in others and towards(self._rank, rank) == message.sender

    def _ask(self, peers: Iterable[int], number: int, asker: int) -> None:
        for peer in peers:
            if self._asked[peer] < MOST_ASKED:
                self._asked[peer] += 1
                self._send(peer, {"survey": number, "asker": asker})

    def _send(self, peer: int, body: Mapping[str, Plain], *tensors: Tensor) -> None:
        if peer not in self._closed_peers:
            self._post(peer, Message(Channel.CONTROL, MessageKind.PROBE, tensors=tensors, body=body))

    def _answer_of(self, rank: int) -> RankAnswer:
        status, topology = self._answers.get(rank), self._topology
        absent = "" if status is not None else self._why_absent(rank)
        return RankAnswer(rank, topology.place_of(rank).stage, topology.name_of(rank), status, absent)

    def _why_absent(self, rank: int) -> str:
        """Why there is no answer of ``rank``: it gave none, or a rank on the way did not."""
        silent = self._rank
        while silent in self._answers:
            silent = towards(silent, rank)
        why = "has left" if silent in self._closed_peers else "does not answer"
        return why if silent == rank else f"cannot be reached: {self._topology.name_of(silent)} {why}"
