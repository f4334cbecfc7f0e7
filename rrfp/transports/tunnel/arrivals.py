"""The messages of one peer on their way: passed on in the order of their channels, each once it is whole."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from rrfp.errors import PeerLostError, TransportClosedError, TransportError
from rrfp.transports.base import Channel, Message
from rrfp.transports.tunnel.p2p import P2PError


@dataclass(slots=True, eq=False)
class _Arriving:
    """A message, None while tensors are missing; and the bytes of its tensors."""

    message: Message | None
    num_bytes: int


class Arrivals:
    """Used on one loop only.

    Args:
        deliver: takes whole messages, and the bytes of their tensors.
        on_dropped: takes the channel of a message that an error of this process's device cost, its bytes and the error.
        on_failed: takes the error of a P2P channel, which may have cost a message: those behind it wait for ever.
    """

    def __init__(
        self,
        deliver: Callable[[Message, int], None],
        on_dropped: Callable[[Channel, int, TransportError], None],
        on_failed: Callable[[P2PError], None],
    ) -> None:
        self._deliver = deliver
        self._on_dropped = on_dropped
        self._on_failed = on_failed
        self._queues: dict[Channel, deque[_Arriving]] = {channel: deque() for channel in Channel}
        self._completing: set[asyncio.Future[Message]] = set()

    @property
    def pending(self) -> int:
        """How many messages are being completed."""
        return len(self._completing)

    def is_first_pending(self, channel: Channel) -> bool:
        """Whether the next message of a channel is being completed."""
        queue = self._queues[channel]
        return bool(queue) and queue[0].message is None

    def add(self, message: Message) -> None:
        """A whole message arrived."""
        self._queues[message.channel].append(_Arriving(message, message.num_bytes))
        self._flush(message.channel)

    def add_pending(self, channel: Channel, num_bytes: int, completing: Awaitable[Message]) -> None:
        """A message arrived, and will be whole."""
        arriving = _Arriving(None, num_bytes)
        self._queues[channel].append(arriving)
        task = asyncio.ensure_future(completing)
        self._completing.add(task)
        task.add_done_callback(partial(self._on_completed, channel, arriving))

    def _on_completed(self, channel: Channel, arriving: _Arriving, completed: asyncio.Future[Message]) -> None:
        self._completing.discard(completed)
        if completed.cancelled():
            return
        error = completed.exception()
        if error is None:
            arriving.message = completed.result()
            self._flush(channel)
        elif isinstance(error, TransportClosedError | PeerLostError):  # this end has ended the transfer
            return
        elif isinstance(error, P2PError):
            self._on_failed(error)
        else:
            assert isinstance(error, TransportError)
            self._on_dropped(channel, arriving.num_bytes, error)
            self._queues[channel].remove(arriving)
            self._flush(channel)

    def _flush(self, channel: Channel) -> None:
        queue = self._queues[channel]
        while queue and (message := queue[0].message) is not None:
            self._deliver(message, queue.popleft().num_bytes)

    def end(self) -> None:
        """Complete no more messages; copies under way end by themselves. May be called twice."""
        for completing in self._completing:
            completing.cancel()
