"""From announcements to whole messages, for one peer: receives are posted in the order in which the peer announced
its transfers, and messages are passed on in the order of their channel.

Announcements travel on the channels of their messages, so one may overtake that of an earlier transfer: it waits for
its turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from rrfp.errors import FrameError
from rrfp.transports.base import Channel, Message
from rrfp.transports.carried.announcements import EDGE, TensorHeader, announced, number_of
from rrfp.transports.carried.wires import Backend, Edge


@dataclass(slots=True, eq=False)
class Arriving:
    """A message on its way."""

    #: Whole; None while tensors are missing.
    message: Message | None
    #: Bytes of its tensors.
    num_bytes: int


class AnnouncedReceives:
    """See the module's docstring. Used on one loop only.

    Args:
        edge: over which tensors come; None if the peer has no edge to this rank.
        backend: allocates memory to receive into; None where there is no edge.
        max_message_bytes: larger announced messages are refused.
        deliver: takes whole messages, and the bytes of their tensors.
        on_failed: takes the error of a transfer that failed.
    """

    def __init__(
        self,
        edge: Edge | None,
        backend: Backend | None,
        max_message_bytes: int,
        deliver: Callable[[Message, int], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        self._edge = edge
        self._backend = backend
        self._max_message_bytes = max_message_bytes
        self._deliver = deliver
        self._on_failed = on_failed
        self._queues: dict[Channel, deque[Arriving]] = {channel: deque() for channel in Channel}
        #: By number, the announced transfers that wait for earlier ones; None for those that are left out.
        self._early: dict[int, tuple[TensorHeader, Arriving] | None] = {}
        #: How many transfers are posted and have not ended.
        self.posted = 0

    def add(self, message: Message) -> None:
        """A message or an announcement arrived."""
        if EDGE not in message.body:
            self._queue(message.channel, Arriving(message, message.num_bytes))
            return
        edge, number = self._edge, number_of(message)
        if edge is None or message.channel is Channel.CONTROL:
            raise FrameError(message.sender, EDGE, "announces tensors where no edge brings them")
        if number < edge.number or number in self._early:
            raise FrameError(message.sender, f"{EDGE}.number", f"is {number}, which was announced before")
        self._early[number] = None
        try:
            whole = announced(message, self._max_message_bytes)
            arriving = Arriving(None, whole.num_bytes)
            self._early[number] = (whole, arriving)
            self._queues[message.channel].append(arriving)
        finally:
            self._post_in_order(edge)

    def _post_in_order(self, edge: Edge) -> None:
        while edge.number in self._early:
            entry = self._early.pop(edge.number)
            if entry is not None:
                self._post(edge, *entry)
            elif not edge.skip():
                self._on_failed(RuntimeError("an announcement was refused, so later ones cannot be matched"))

    def _post(self, edge: Edge, whole: TensorHeader, arriving: Arriving) -> None:
        assert self._backend is not None
        try:
            tensors = [self._backend.empty(spec) for spec in whole.specs if spec is not None]
        except (MemoryError, RuntimeError) as error:  # torch raises the latter where memory is short
            edge.skip()
            self._on_failed(error)
            return
        self.posted += 1
        done = edge.post([tensor for tensor in tensors if tensor.numel()])
        done.add_done_callback(partial(self._on_moved, whole, tensors, arriving))

    def _on_moved(
        self, whole: TensorHeader, tensors: list[Tensor], arriving: Arriving, done: asyncio.Future[None]
    ) -> None:
        self.posted -= 1
        if (error := done.exception()) is None:
            arriving.message = whole.assemble(tensors)
            self._flush(whole.message.channel)
        else:
            assert isinstance(error, Exception)
            self._on_failed(error)

    def _queue(self, channel: Channel, arriving: Arriving) -> None:
        self._queues[channel].append(arriving)
        self._flush(channel)

    def _flush(self, channel: Channel) -> None:
        queue = self._queues[channel]
        while queue and (message := queue[0].message) is not None:
            self._deliver(message, queue.popleft().num_bytes)
