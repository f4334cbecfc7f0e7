"""The sending side of a peer: share the memory of device tensors, announce it, and keep it until the peer's copy."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rrfp.errors import FrameError, RrfpError
from rrfp.log import get_logger
from rrfp.transports.base import Channel, Message, Transport
from rrfp.transports.carried.outlet import Sender
from rrfp.transports.cuda_ipc.announcements import check_body, shared_announcement
from rrfp.transports.device_copies import held_by
from rrfp.transports.device_sharing import SharesDeviceMemory
from rrfp.transports.flow import HomeLoop, settle
from rrfp.transports.tensor_bytes import check_sendable

_log = get_logger(__name__)

#: A message with more device tensors is staged: their fields would not fit into a header.
MOST_SHARED = 128


class SharingSender(Sender):
    """See `Sender`.

    Args:
        peer: its rank.
        carrier: moves announcements, and messages without device tensors; stages those of others.
        copies: shares memory.
        max_message_bytes: the most that a message may have.
        reason: finds out why a transfer failed.
        home: the loop.
    """

    def __init__(
        self,
        peer: int,
        carrier: Transport,
        copies: SharesDeviceMemory,
        max_message_bytes: int,
        reason: Callable[[Exception], Awaitable[RrfpError]],
        home: HomeLoop,
    ) -> None:
        super().__init__(peer, carrier, None, None, max_message_bytes, reason)
        self._copies = copies
        self._home = home
        self._number = 0
        #: By number, the announcements that the peer has not pulled.
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._error: RrfpError | None = None
        self._has_warned = False

    def check(self, message: Message, num_bytes: int) -> None:
        """See `Sender.check`."""
        super().check(message, num_bytes)
        check_body(message.body)

    def on_edge(self, message: Message) -> list[bool]:
        """For each tensor whether the peer pulls it; empty where the carrier moves the whole message."""
        tensors = message.tensors
        indices = held_by(self._copies, tensors) if message.channel is not Channel.CONTROL else []
        if not 0 < len(indices) <= MOST_SHARED:
            return []
        for tensor in tensors:
            if tensor is not None:
                check_sendable(tensor, self._copies)
        moved = [False] * len(tensors)
        for index in indices:
            moved[index] = True
        return moved

    async def begin(self, message: Message, on_edge: list[bool]) -> Awaitable[None] | None:
        """Pass a message to the carrier; returns the end of the peer's pull, if it pulls."""
        tensors = [t for t, moved in zip(message.tensors, on_edge, strict=False) if moved and t is not None]
        try:
            shared = await self._copies.share(tensors) if tensors else []
        except OSError as error:
            self._warn(error)
            shared = []
        if not shared:
            await self.carrier.send(self.peer, message)
            return None
        number, self._number = self._number, self._number + 1
        pulled = self._waiting[number] = self._home.loop.create_future()
        pulled.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            if self._error is not None:
                raise type(self._error)(*self._error.args)
            await self.carrier.send(
                self.peer, shared_announcement(message, number, on_edge, [fields for fields, _ in shared])
            )
        except BaseException:
            del self._waiting[number]
            raise
        # Until the peer has pulled, this callback keeps the memory.
        pulled.add_done_callback(lambda _: shared.clear())
        return pulled

    def on_pulled(self, number: int) -> None:
        """The peer has pulled an announcement; a FrameError if it cannot have."""
        if (pulled := self._waiting.pop(number, None)) is None:
            raise FrameError(self.peer, "pulled_tensors", f"is {number}, which was not announced")
        settle(pulled, None)

    def end(self, error: RrfpError) -> None:
        """See `Sender.end`."""
        self._error = self._error or error
        for pulled in self._waiting.values():
            settle(pulled, type(error)(*error.args))
        self._waiting.clear()

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("device tensors for rank %d pass through host memory: %s", self.peer, error)
