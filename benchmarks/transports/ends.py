"""Both ends of every way that moves messages between two ranks: RRFP's transports, gloo and bare sockets.

An end sends messages with one tensor, or an acknowledgement without any (size 0).
"""

from __future__ import annotations

import asyncio
import socket
import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.transports.settings import DATAGRAM_BYTES
from rrfp.errors import RrfpError
from rrfp.model.tasks import Kind, Mode, StepId, Task
from rrfp.transports.base import Channel, DeliversMessages, Message, MessageKind, Plain, SendsAtOnce, Transport

_ROW = 1024  # of float32: 4 KiB
_STEP = StepId(0, Mode.TRAIN, 8)
_BODY: dict[str, Plain] = {"structure": ["t", 0], "consumed": 0}

#: Received messages that are valid at the same time in a way that does not bring memory of its own.
_BUFFERS = 4

_SEND_BUFFER_BYTES = 1 << 20


class Memory:
    """The tensors of one size at a time: all ways use the same, again and again, as a pipeline's allocator does."""

    def __init__(self) -> None:
        self._size = 0
        self._sent = torch.zeros(0)
        self._received: deque[Tensor] = deque()

    def set_size(self, size: int) -> None:
        """Make tensors of ``size`` bytes, a multiple of 4 KiB. Call it while no message is under way."""
        if size != self._size:
            self._size = size
            self._sent = _tensor(size)
            self._received = deque(_tensor(size) for _ in range(_BUFFERS))

    def to_send(self) -> Tensor:
        """The tensor that every end sends."""
        return self._sent

    def to_receive(self) -> Tensor:
        """The buffer for the next message, for ways that need one."""
        self._received.rotate()
        return self._received[0]


def _tensor(size: int) -> Tensor:
    return torch.ones(size // (4 * _ROW), _ROW)


class End(ABC):
    """One rank's end. All calls are made on one loop.

    Args:
        rank: 0 or 1.
        memory: of this process.
    """

    def __init__(self, rank: int, memory: Memory) -> None:
        self.rank = rank
        self._memory = memory

    @abstractmethod
    async def send(self, size: int) -> None:
        """Send a message; returns when the tensor may be written to again."""

    @abstractmethod
    async def receive(self, size: int) -> Tensor | None:
        """The next message's tensor, which has ``size`` bytes; None for an acknowledgement."""

    @abstractmethod
    async def close(self) -> None:
        """Leave in order."""


class TransportEnd(End):
    """A transport of RRFP, which was started, with messages like those between two stages.

    Args:
        rank: 0 or 1.
        memory: of this process.
        transport: started.
        is_direct: use its shortcuts, as the runtime does. What is delivered counts as received, so nothing bounds a
            stream of messages then.
    """

    def __init__(self, rank: int, memory: Memory, transport: Transport, *, is_direct: bool) -> None:
        super().__init__(rank, memory)
        self._transport = transport
        self._sends_at_once = transport if is_direct and isinstance(transport, SendsAtOnce) else None
        self._delivered: deque[Message | RrfpError] | None = None
        self._arrival: asyncio.Future[None] | None = None
        if is_direct and isinstance(transport, DeliversMessages):
            self._delivered = deque()
            transport.deliver_to(self._deliver)
        self._channel = (Channel.FORWARD, Channel.BACKWARD)[rank]
        self._task = Task((Kind.F, Kind.B)[rank], 1, rank)

    async def send(self, size: int) -> None:
        """See `End.send`."""
        tensors = (self._memory.to_send(),) if size else ()
        message = Message(self._channel, MessageKind.OUTPUT, _STEP, self._task, tensors, _BODY)
        if self._sends_at_once is None or not self._sends_at_once.send_at_once(1 - self.rank, message):
            await self._transport.send(1 - self.rank, message)

    def _deliver(self, entry: Message | RrfpError) -> None:
        assert self._delivered is not None
        self._delivered.append(entry)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def _next(self) -> Message:
        if self._delivered is None:
            return await self._transport.receive()
        while not self._delivered:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        entry = self._delivered.popleft()
        if isinstance(entry, RrfpError):
            raise entry
        return entry

    async def receive(self, size: int) -> Tensor | None:
        """See `End.receive`."""
        message = await self._next()
        assert message.num_bytes == size
        return message.tensors[0] if size else None

    async def close(self) -> None:
        """See `End.close`."""
        await self._transport.close()


class GlooEnd(End):
    """torch.distributed's send and recv over the default group. They block the loop, which must serve nothing else."""

    def __init__(self, rank: int, memory: Memory) -> None:
        super().__init__(rank, memory)
        self._nothing = torch.zeros(1)

    async def send(self, size: int) -> None:
        """See `End.send`."""
        dist.send(self._memory.to_send() if size else self._nothing, 1 - self.rank)

    async def receive(self, size: int) -> Tensor | None:
        """See `End.receive`."""
        tensor = self._memory.to_receive() if size else self._nothing
        dist.recv(tensor, 1 - self.rank)
        return tensor if size else None

    async def close(self) -> None:
        """See `End.close`."""


class SocketEnd(End):
    """A Unix socket of type SEQPACKET, and nothing else. Calls block the loop, which must serve nothing else.

    Args:
        rank: 0 or 1.
        memory: of this process.
        sock: connected; this object closes it.
    """

    def __init__(self, rank: int, memory: Memory, sock: socket.socket) -> None:
        super().__init__(rank, memory)
        self._nothing = memoryview(bytearray(1))
        self._sock = sock
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)

    async def send(self, size: int) -> None:
        """See `End.send`."""
        view = _bytes_of(self._memory.to_send()) if size else self._nothing
        for start in range(0, view.nbytes, DATAGRAM_BYTES):
            self._sock.send(view[start : start + DATAGRAM_BYTES])

    async def receive(self, size: int) -> Tensor | None:
        """See `End.receive`."""
        tensor = self._memory.to_receive() if size else None
        view = self._nothing if tensor is None else _bytes_of(tensor)
        start = 0
        while start < view.nbytes:
            received = self._sock.recv_into(view[start:])
            if received == 0:
                raise EOFError("the other end was closed")
            start += received
        return tensor

    async def close(self) -> None:
        """See `End.close`."""
        self._sock.close()


class HoppingSocketEnd(SocketEnd):
    """The same for messages of one datagram, which a thread reads and hands to the loop. Made on its loop."""

    def __init__(self, rank: int, memory: Memory, sock: socket.socket) -> None:
        super().__init__(rank, memory, sock)
        self._buffer = memoryview(bytearray(DATAGRAM_BYTES))
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[None] = asyncio.Queue()
        self._thread = threading.Thread(target=self._read_all, name="reader", daemon=True)
        self._thread.start()

    def _read_all(self) -> None:
        while self._sock.recv_into(self._buffer):
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, None)

    async def receive(self, size: int) -> Tensor | None:
        """See `End.receive`; the message itself stays in the reader's buffer."""
        await self._arrived.get()
        return None

    async def close(self) -> None:
        """See `End.close`."""
        self._sock.shutdown(socket.SHUT_RDWR)  # ends both readers
        self._thread.join()
        await super().close()


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)
