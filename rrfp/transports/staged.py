"""Device tensors over a transport that carries CPU tensors only: staged through host memory on both sides.

The sender copies a message's device tensors to the host and sends them as CPU tensors; the body names the device of
each tensor. The receiver copies those to its own device; where it has none, nothing wraps its transport, and they stay
on the CPU. Both copies run on streams of the rank's `DeviceCopies`, never on the loop.

Memory is bounded without a queue of its own. A sender stages one message for each peer and channel, then waits until
the inner transport accepts it. A receiver reads the inner transport only inside `receive`: one message may be on its
way to the device, and one more read ahead, so that a control message can pass it. Only behind a copy that is late are
all messages read: where the device is stuck, an abort must get through.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from rrfp.devices.copies import DeviceCopies, held_by, with_copies
from rrfp.errors import ConfigError, FrameError, TransportClosedError
from rrfp.transports.base import Channel, LendsMemory, Loan, Message, Transport, TransportStatistics
from rrfp.transports.flow import CLOSED, background
from rrfp.transports.tensor_bytes import check_sendable, from_buffer

#: The entry of a message's body that names the device of each tensor, with None for None. Absent where all are CPU's.
DEVICES = "tensor_devices"

#: So many seconds after its start, a copy is late. They last milliseconds.
LATE_S = 0.5

_MAX_KIND_LENGTH = 32


def staged(transport: Transport, copies: DeviceCopies | None) -> Transport:
    """``transport`` itself if it carries the tensors of the rank's device, else in front of it a `StagedTransport`."""
    return transport if copies is None or copies.kind in transport.carries else StagedTransport(transport, copies)


@dataclass(frozen=True, slots=True)
class _Copying:
    """A message on its way to the device: its channel, the task that returns it, and when it is late."""

    channel: Channel
    task: asyncio.Task[Message]
    late_at: float


class StagedTransport(Transport):
    """Sends and receives device tensors over ``inner``, which sees CPU tensors only.

    Messages without device tensors pass as they are. The contract of `Transport` holds if ``inner`` keeps it, but for
    one thing: of the messages with device tensors, one at a time is copied, whatever its peer and channel.
    """

    def __init__(self, inner: Transport, copies: DeviceCopies, *, owns_copies: bool = True) -> None:
        super().__init__(inner.context)
        self.carries = inner.carries | {copies.kind}
        self._inner = inner
        self._copies = copies
        self._owns_copies = owns_copies
        self._turns = {(peer, channel): asyncio.Lock() for peer in inner.context.peers for channel in Channel}
        self._receiving = asyncio.Lock()
        #: The message on its way to the device.
        self._copying: _Copying | None = None
        #: Those behind it that were read, and errors.
        self._held: deque[Message | BaseException] = deque()
        #: Reads the next one.
        self._reading: asyncio.Task[Message] | None = None
        self._closed = False
        self._dropped = 0

    async def start(self) -> None:
        """See `Transport.start`."""
        await self._inner.start()

    async def send(self, peer: int, message: Message) -> None:
        """See `Transport.send`. Cancelled while it copies, it has sent nothing."""
        turn = self._turns.get((peer, message.channel))
        if turn is None:
            return await self._inner.send(peer, message)  # which raises: no such peer
        async with turn:
            loan = None
            try:
                if indices := self._to_copy(message):
                    loan = self._lend(peer, message)
                    message = await self._on_host(message, indices, loan)
                await self._inner.send(peer, message)
            finally:
                if loan is not None:
                    loan.close()

    def _to_copy(self, message: Message) -> list[int]:
        """The indices of the tensors on the device, once all tensors are known to be ones that can be sent."""
        indices = held_by(self._copies, message.tensors)
        if not indices:
            return indices
        if (num_bytes := message.num_bytes) > (limit := self.context.max_message_bytes):
            raise ConfigError(f"message has {num_bytes} bytes, max_message_bytes is {limit}")
        for tensor in message.tensors:
            if tensor is not None:
                check_sendable(tensor, self._copies)
        return indices

    def _lend(self, peer: int, message: Message) -> Loan | None:
        """Memory of the inner transport for all tensors of ``message``, if it has such memory."""
        if not isinstance(self._inner, LendsMemory):
            return None
        sizes = [tensor.numel() * tensor.itemsize for tensor in message.tensors if tensor is not None]
        return self._inner.lend(peer, message.channel, sizes)

    async def _on_host(self, message: Message, indices: list[int], loan: Loan | None) -> Message:
        """``message`` with its device tensors in host memory, and their devices named."""
        devices = [None if tensor is None else "cpu" for tensor in message.tensors]
        for index in indices:
            devices[index] = self._copies.kind
        into = None if loan is None else _tensors_in(loan, message.tensors, indices)
        tensors = await with_copies(message.tensors, indices, partial(self._copies.to_host, into=into))
        return replace(message, tensors=tuple(tensors), body={**message.body, DEVICES: devices})

    async def receive(self) -> Message:
        """See `Transport.receive`."""
        async with self._receiving:
            while not self._closed:
                if (message := await self._advance()) is not None:
                    return message
        raise TransportClosedError(CLOSED)

    async def _advance(self) -> Message | None:
        """Wait for one event: the message that it completes, if any. Cancelled, it loses nothing."""
        copying, reading = self._copying, self._reading
        if copying is not None and copying.task.done():
            self._copying = None
            return copying.task.result()
        if copying is None and self._held:
            return self._accept(self._held.popleft())
        if copying is not None and asyncio.get_running_loop().time() >= copying.late_at:
            self._raise_held()
        if reading is not None and reading.done():
            self._reading = None
            return self._sort(reading.exception() or reading.result())
        if copying is None and reading is None:
            return self._accept(await self._inner.receive())
        await self._wait()
        return None

    async def _wait(self) -> None:
        """Wait until a message is read or copied, or the copy is late."""
        copying = self._copying
        left_s = None if copying is None else copying.late_at - asyncio.get_running_loop().time()
        if self._reading is None and (not self._held or (left_s is not None and left_s <= 0)):
            self._reading = background(self._inner.receive())
        tasks = set() if copying is None else {copying.task}
        if self._reading is not None:
            tasks.add(self._reading)
            left_s = None
        await asyncio.wait(tasks, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    def _raise_held(self) -> None:
        """Raise the first error that waits behind a late copy, if there is one."""
        for entry in self._held:
            if isinstance(entry, BaseException):
                self._held.remove(entry)
                raise entry

    def _sort(self, entry: Message | BaseException) -> Message | None:
        """The message that was read, if it is complete and passes those before it; an error that does is raised."""
        if self._copying is None or self._passes(entry, self._copying):
            return self._accept(entry)
        self._held.append(entry)
        return None

    def _passes(self, entry: Message | BaseException, copying: _Copying) -> bool:
        """Whether an entry overtakes the message on its way to the device, and those that wait for that."""
        if isinstance(entry, BaseException):
            return asyncio.get_running_loop().time() >= copying.late_at
        if entry.channel is not Channel.CONTROL or DEVICES in entry.body or copying.channel is Channel.CONTROL:
            return False
        return all(isinstance(held, BaseException) or held.channel is not Channel.CONTROL for held in self._held)

    def _accept(self, entry: Message | BaseException) -> Message | None:
        """The message if it is complete; else its tensors are on their way. An error is raised."""
        if isinstance(entry, BaseException):
            raise entry
        message = entry
        if DEVICES not in message.body:
            return message
        try:
            indices = _device_tensors(message)
        except FrameError:
            self._dropped += 1
            raise
        body = {key: value for key, value in message.body.items() if key != DEVICES}
        task = background(self._on_device(replace(message, body=body), indices))
        self._copying = _Copying(message.channel, task, asyncio.get_running_loop().time() + LATE_S)
        return None

    async def _on_device(self, message: Message, indices: list[int]) -> Message:
        try:
            tensors = await with_copies(message.tensors, indices, self._copies.to_device)
        except Exception as error:
            error.add_note(f"while tensors of {message.kind} {message.task} from rank {message.sender} were received")
            raise
        return replace(message, tensors=tuple(tensors))

    async def close(self) -> None:
        """See `Transport.close`."""
        self._closed = True
        try:
            await self._inner.close()
        finally:
            self._close_copies()

    def abort(self) -> None:
        """See `Transport.abort`; copies under way end by themselves."""
        self._closed = True
        self._inner.abort()
        self._close_copies()

    def _close_copies(self) -> None:
        if self._owns_copies:
            self._copies.close()

    def statistics(self) -> TransportStatistics:
        """See `Transport.statistics`: the inner transport's. A message counts as received when that one returned it."""
        inner = self._inner.statistics()
        return replace(inner, dropped_frames=inner.dropped_frames + self._dropped) if self._dropped else inner


def _tensors_in(loan: Loan, tensors: Sequence[Tensor | None], indices: Sequence[int]) -> list[Tensor]:
    """Tensors in lent memory like those at ``indices``."""
    frames = iter(loan.frames)
    made = []
    for index, tensor in enumerate(tensors):
        if tensor is None:
            continue
        frame = next(frames)
        if index in indices:
            made.append(from_buffer(frame, tensor.dtype, tuple(tensor.shape), requires_grad=False))
    return made


def _device_tensors(message: Message) -> list[int]:
    """The indices of the tensors that the sender had on a device. The list comes from the network."""
    devices = message.body[DEVICES]
    sender, tensors = message.sender, message.tensors
    if not isinstance(devices, list) or len(devices) != len(tensors):
        raise FrameError(sender, f"body.{DEVICES}", f"is {devices!r:.80}, must be an array of {len(tensors)}")
    for index, (device, tensor) in enumerate(zip(devices, tensors, strict=True)):
        field = f"body.{DEVICES}[{index}]"
        if tensor is None:
            if device is not None:
                raise FrameError(sender, field, f"is {device!r:.80}, must be null like the tensor")
        elif not isinstance(device, str) or not 0 < len(device) <= _MAX_KIND_LENGTH:
            raise FrameError(sender, field, f"is {device!r:.80}, must be the type of a device")
    return [index for index, device in enumerate(devices) if device not in (None, "cpu")]
