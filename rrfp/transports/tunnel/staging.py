"""Device tensors of one peer's messages, copied through host memory: the message names the device of each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from rrfp.devices.copies import DeviceCopies, held_by, with_copies
from rrfp.errors import ConfigError, FrameError, RrfpError, TransportError
from rrfp.transports.base import Channel, LendsMemory, Loan, Message, Transport
from rrfp.transports.tunnel.announcements import DEVICES
from rrfp.transports.wire.tensor_bytes import check_sendable, from_buffer

_MAX_KIND_LENGTH = 32


class Staging:
    """Copies for messages to and from ``peer`` over ``base``, which sees CPU tensors only."""

    def __init__(self, peer: int, base: Transport, copies: DeviceCopies) -> None:
        self._peer = peer
        self._base = base
        self._copies = copies

    def to_copy(self, message: Message) -> list[int]:
        """The indices of the tensors on the device, once all tensors are known to be ones that can be sent."""
        indices = held_by(self._copies, message.tensors)
        if not indices:
            return indices
        if (num_bytes := message.num_bytes) > (limit := self._base.context.max_message_bytes):
            raise ConfigError(f"message has {num_bytes} bytes, max_message_bytes is {limit}")
        for tensor in message.tensors:
            if tensor is not None:
                check_sendable(tensor, self._copies)
        return indices

    async def send(self, message: Message, indices: list[int]) -> None:
        """Send a message with device tensors at ``indices``. Cancelled while it copies, it sends nothing."""
        loan = self._lend(message.channel, message.tensors)
        try:
            await self._base.send(self._peer, await self._on_host(message, indices, loan))
        finally:
            if loan is not None:
                loan.close()

    def _lend(self, channel: Channel, tensors: Sequence[Tensor | None]) -> Loan | None:
        """Memory of the base transport for all tensors of a message, if it has such memory."""
        if not isinstance(self._base, LendsMemory):
            return None
        sizes = [tensor.numel() * tensor.itemsize for tensor in tensors if tensor is not None]
        return self._base.lend(self._peer, channel, sizes)

    async def _on_host(self, message: Message, indices: list[int], loan: Loan | None) -> Message:
        """``message`` with its device tensors in host memory, and their devices named."""
        devices = [None if tensor is None else "cpu" for tensor in message.tensors]
        for index in indices:
            devices[index] = self._copies.kind
        into = None if loan is None else _tensors_in(loan, message.tensors, indices)
        to_host = partial(self._copies.to_host, into=into, peer=self._peer)
        tensors = await with_copies(message.tensors, indices, to_host)
        return replace(message, tensors=tuple(tensors), body={**message.body, DEVICES: devices})

    async def on_device(self, message: Message, indices: list[int]) -> Message:
        """A received message with its tensors at ``indices`` on the device."""
        body = {key: value for key, value in message.body.items() if key != DEVICES}
        to_device = partial(self._copies.to_device, peer=self._peer)
        try:
            tensors = await with_copies(message.tensors, indices, to_device)
        except RrfpError:
            raise
        except Exception as error:
            raise failure_of(error, message) from error
        return replace(message, tensors=tuple(tensors), body=body)


def failure_of(error: Exception, message: Message) -> TransportError:
    """The error for a message whose tensors could not be copied to this process's device."""
    sender = f"rank {message.sender}"
    text = (
        f"{type(error).__name__}: {error}, while tensors of {message.kind} {message.task} from {sender} were received"
    )
    return TransportError(text)


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


def staged_indices(message: Message) -> list[int]:
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
