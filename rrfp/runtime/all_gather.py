"""Collectives over the control tree: every rank contributes some bytes.

In an all-gather every rank gets the bytes of all. In a reduction rank 0 makes an answer of them, which every rank gets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgpack
import torch
from torch import Tensor

from rrfp.errors import ProtocolError
from rrfp.runtime import records
from rrfp.runtime.control_tree import below, children, parent
from rrfp.transports.base import Channel, Message, MessageKind, Plain

T = TypeVar("T")

#: Names one all-gather: a topic and a number that all ranks agree on.
Key = tuple[str, int]

#: Makes the answer of a reduction from the bytes of all ranks, by rank.
Answer = Callable[[Sequence[bytes]], bytes]

#: All-gathers that others have begun and this rank has not; in order there are a handful, one a topic.
MOST_AHEAD = 16


class TreeAllGather:
    """Collects the bytes of every rank at rank 0, and hands them to all.

    Messages of an all-gather that this rank has not joined yet are kept. Every rank joins each once. At the end of the
    pipeline its runner cancels the tasks that wait here. ``post`` queues a control message for a peer without waiting.
    """

    def __init__(self, rank: int, world: int, post: Callable[[int, Message], None]) -> None:
        self._rank = rank
        self._world = world
        self._parent = parent(rank)
        self._children = children(rank, world)
        #: By child, the ranks whose values it reports.
        self._reports_of = {child: frozenset(below(child, world)) for child in self._children}
        self._post = post
        self._gathered: dict[Key, dict[int, bytes]] = {}
        self._reported: dict[Key, set[int]] = {}
        self._results: dict[Key, asyncio.Future[dict[int, bytes]]] = {}
        #: The reductions that this rank has joined.
        self._answers: dict[Key, Answer] = {}

    async def all_gather(self, topic: str, number: int, own: bytes) -> list[bytes]:
        """Contribute ``own``, and wait for all ranks: returns the bytes of each, by rank."""
        result = await self._join((topic, number), own)
        return [result[rank] for rank in range(self._world)]

    async def share(self, topic: str, number: int, own: T, name: str) -> list[T]:
        """As `all_gather`, of records of one kind, which errors call ``name``."""
        answers = await self.all_gather(topic, number, records.pack(own))
        return [records.unpack(type(own), data, name) for data in answers]

    async def reduce(self, topic: str, number: int, own: bytes, answer: Answer) -> bytes:
        """Contribute ``own``, and wait for the ``answer`` that rank 0 makes of the bytes of all ranks."""
        key = (topic, number)
        self._answers[key] = answer
        try:
            bundle = await self._join(key, own)
        finally:
            self._answers.pop(key, None)
        return bundle[0]

    async def _join(self, key: Key, own: bytes) -> dict[int, bytes]:
        self._gathered.setdefault(key, {})[self._rank] = own
        future = self._results.setdefault(key, asyncio.get_running_loop().create_future())
        self._advance(key)
        try:
            return await future
        finally:
            self._results.pop(key, None)

    def on_message(self, message: Message) -> None:
        """A REPORT (from below) or RESULT (from above) arrived."""
        topic, number = message.body.get("topic"), message.body.get("number")
        if not isinstance(topic, str) or not isinstance(number, int):
            raise ProtocolError(f"rank {message.sender} sent a {message.kind} without topic and number")
        key = (topic, number)
        bundle = _unpack(message)
        if message.kind is MessageKind.REPORT and message.sender in self._children:
            if bundle.keys() != self._reports_of[message.sender]:
                raise ProtocolError(f"rank {message.sender} sent a report of the wrong ranks: {[*bundle]!r:.80}")
            self._check_ahead(key, message.sender)
            self._gathered.setdefault(key, {}).update(bundle)
            self._reported.setdefault(key, set()).add(message.sender)
            self._advance(key)
        elif message.kind is MessageKind.RESULT and message.sender == self._parent and self._is_whole(key, bundle):
            self._finish(key, bundle)
        else:
            raise ProtocolError(f"rank {message.sender} sent rank {self._rank} a {message.kind} of {topic} {number}")

    def _check_ahead(self, key: Key, sender: int) -> None:
        """An all-gather that a peer begins is kept until this rank joins, so their number is bounded."""
        if key not in self._gathered and len(self._gathered) >= MOST_AHEAD:
            raise ProtocolError(f"rank {sender} began {key[0]} {key[1]}, but {MOST_AHEAD} all-gathers are open already")

    def _is_whole(self, key: Key, bundle: Mapping[int, bytes]) -> bool:
        wanted = {0} if key in self._answers else set(range(self._world))
        return bundle.keys() == wanted

    def _advance(self, key: Key) -> None:
        """Pass the bundle on once this rank and all below it have contributed."""
        gathered = self._gathered[key]
        if self._rank not in gathered or not self._reported.get(key, set()).issuperset(self._children):
            return
        del self._gathered[key]
        self._reported.pop(key, None)
        if self._parent is None:
            answer = self._answers.get(key)
            if answer is not None:
                gathered = {0: answer([gathered[rank] for rank in range(self._world)])}
            self._finish(key, gathered)
        else:
            self._post(self._parent, _message(MessageKind.REPORT, key, gathered))

    def _finish(self, key: Key, bundle: dict[int, bytes]) -> None:
        for child in self._children:
            self._post(child, _message(MessageKind.RESULT, key, bundle))
        future = self._results.get(key)
        if future is not None and not future.done():
            future.set_result(bundle)


def to_tensor(data: bytes) -> Tensor:
    """Bytes as a uint8 tensor: how they travel where they may be larger than a header."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def bytes_in(message: Message) -> bytes:
    """The bytes that a message has as its one tensor; none if it has other tensors."""
    tensor = message.tensors[0] if len(message.tensors) == 1 else None
    return b"" if tensor is None or tensor.dtype is not torch.uint8 else tensor.numpy().tobytes()


def _message(kind: MessageKind, key: Key, bundle: dict[int, bytes]) -> Message:
    packed: bytes = msgpack.packb(sorted(bundle.items()))
    body: dict[str, Plain] = {"topic": key[0], "number": key[1]}
    return Message(Channel.CONTROL, kind, tensors=(to_tensor(packed),), body=body)


def _unpack(message: Message) -> dict[int, bytes]:
    try:
        bundle = dict(msgpack.unpackb(bytes_in(message)))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"rank {message.sender} sent a {message.kind} that cannot be read: {error}") from None
    if not all(type(rank) is int and isinstance(data, bytes) for rank, data in bundle.items()):
        raise ProtocolError(f"rank {message.sender} sent a {message.kind} that is not bytes by rank")
    return bundle
