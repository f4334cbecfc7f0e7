"""The sending side of a peer: announce, post, and wait until the tensors are no longer read.

A cancelled send that has not passed anything to the carrier has sent nothing; one that has waits for its end, since the
backend reads the caller's memory until then. The peer posts what was announced whatever it computes, so that is soon.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from torch import Tensor

from rrfp.errors import ConfigError, RrfpError
from rrfp.transports.base import Channel, Message, Transport, sending_at_once
from rrfp.transports.carried.announcements import announcement, check_body
from rrfp.transports.carried.wires import Backend, Edge
from rrfp.transports.flow import Window, cost_of
from rrfp.transports.tensor_bytes import check_sendable


class Sender:
    """What the channels to one peer share.

    Args:
        peer: its rank.
        carrier: moves announcements, and messages without tensors.
        edge: moves tensors; None where the carrier does.
        backend: says which tensors the edge can move; None where there is no edge.
        max_message_bytes: the most that a message may have.
        reason: finds out why a transfer failed.
    """

    def __init__(
        self,
        peer: int,
        carrier: Transport,
        edge: Edge | None,
        backend: Backend | None,
        max_message_bytes: int,
        reason: Callable[[Exception], Awaitable[RrfpError]],
    ) -> None:
        self.peer = peer
        self.carrier = carrier
        self.at_once = sending_at_once(carrier)
        self._edge = edge
        self._backend = backend
        self._max_message_bytes = max_message_bytes
        self._reason = reason
        self._tasks: set[asyncio.Task[None]] = set()

    def check(self, message: Message, num_bytes: int) -> None:
        """Refuse a message that the peer would refuse: a ConfigError."""
        if num_bytes > self._max_message_bytes:
            raise ConfigError(f"message has {num_bytes} bytes, max_message_bytes is {self._max_message_bytes}")
        check_body(message.body)

    def on_edge(self, message: Message) -> list[bool]:
        """For each tensor whether the edge moves it; empty where the carrier moves the whole message."""
        if self._edge is None or message.channel is Channel.CONTROL or not message.tensors:
            return []
        moved = [tensor is not None and self._is_moved(tensor) for tensor in message.tensors]
        return moved if any(moved) else []

    def _is_moved(self, tensor: Tensor) -> bool:
        assert self._backend is not None
        check_sendable(tensor, self.carrier.context.copies)
        # The carrier can bring empty tensors of the host, and has their dtype and shape in its header.
        return self._backend.holds(tensor) and not (tensor.is_cpu and tensor.numel() == 0)

    async def begin(self, message: Message, on_edge: list[bool]) -> Awaitable[None] | None:
        """Pass a message to the carrier, and post its tensors; returns the transfer, if there is one."""
        edge = self._edge
        if edge is None or not on_edge:
            await self.carrier.send(self.peer, message)
            return None
        tensors = [
            tensor for tensor, moved in zip(message.tensors, on_edge, strict=True) if moved and tensor is not None
        ]
        async with edge.turn:
            await self.carrier.send(self.peer, announcement(message, edge.number, on_edge))
            return edge.post([tensor for tensor in tensors if tensor.numel()])

    async def finish(self, transfer: Awaitable[None]) -> None:
        """Wait for the end of a transfer; raises the loss that ended it."""
        try:
            await transfer
        except RrfpError:
            raise
        except Exception as error:
            raise await self._reason(error) from error

    def run(self, sending: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that `drained` waits for."""
        task: asyncio.Task[None] = asyncio.create_task(sending)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def drained(self) -> None:
        """Wait until all sends that have begun have ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def end(self, error: RrfpError) -> None:
        """Fail all transfers."""
        if self._edge is not None:
            self._edge.end(error)


class TunnelOutlet:
    """One channel to a peer; see `rrfp.transports.linked.OutletFactory`."""

    def __init__(self, sender: Sender, window: Window) -> None:
        self.window = window
        self._sender = sender
        self._turn = asyncio.Lock()

    async def send(self, message: Message, num_bytes: int) -> None:
        """See `OutletOf.send`."""
        self._sender.check(message, num_bytes)
        on_edge = self._sender.on_edge(message)
        cost = cost_of(num_bytes)
        await self._turn.acquire()
        try:
            await self.window.acquire(cost)
        except BaseException:
            self._turn.release()
            raise
        await _whole(self._sender.run(self._send(message, on_edge, cost)))

    async def _send(self, message: Message, on_edge: list[bool], cost: int) -> None:
        """Send a message in its turn, which ends when the next one may follow."""
        try:
            transfer = await self._sender.begin(message, on_edge)
        except BaseException:
            self.window.release(cost)
            raise
        finally:
            self._turn.release()
        if transfer is not None:
            await self._sender.finish(transfer)

    def send_at_once(self, message: Message, num_bytes: int) -> bool:
        """See `OutletOf.send_at_once`: only what the carrier can send at once."""
        sender = self._sender
        if sender.at_once is None or self._turn.locked():
            return False
        sender.check(message, num_bytes)
        cost = cost_of(num_bytes)
        if sender.on_edge(message) or not self.window.try_acquire(cost):
            return False
        if sender.at_once.send_at_once(sender.peer, message):
            return True
        self.window.release(cost)
        return False


async def _whole(task: asyncio.Task[None]) -> None:
    """Wait for the end of a task, also when cancelled meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # read: the caller gave up
        raise cancelled
    task.result()
