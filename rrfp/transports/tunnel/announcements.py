"""Announcements: messages without those tensors that a P2P channel brings, and entries of links' own.

An announcement is a message whose body has one more entry, `BESIDE`: the number of the transfer; for each tensor of the
message its dtype, shape and requires_grad if the channel brings it, else null; and fields of the channel. The tensors'
places in the message are null then. Nothing is allocated before all of it is checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from rrfp.errors import ConfigError
from rrfp.transports.base import Channel, Message, MessageKind, Plain
from rrfp.transports.wire.header_checks import HeaderChecks, TensorSpec
from rrfp.transports.wire.tensor_bytes import DTYPE_NAMES

#: [number, specs, fields]: a P2P channel brings tensors of the message.
BESIDE = "tunnel_tensors"

#: Fields from one end of a P2P channel for the other.
ENTRY = "tunnel_entry"

#: [channel, bytes, messages]: so much was consumed.
CREDIT = "tunnel_credit"

#: [channel]: a sender waits for room in it.
WANT = "tunnel_want"

#: True: the sender closes in order, and all its messages have arrived.
FAREWELL = "tunnel_farewell"

#: The indices of tensors that were on a device, and were copied through host memory.
STAGED = "staged_tensors"

_RESERVED = frozenset({BESIDE, ENTRY, CREDIT, WANT, FAREWELL, STAGED})


class TensorHeader(NamedTuple):
    """A checked announcement."""

    #: Without the tensors that the channel brings, and without the entry that names them.
    message: Message
    #: One for each tensor of the message; None where it came with the announcement.
    specs: tuple[TensorSpec | None, ...]

    @property
    def moved(self) -> list[TensorSpec]:
        """Of the tensors that the channel brings."""
        return [spec for spec in self.specs if spec is not None]

    @property
    def num_bytes(self) -> int:
        return self.message.num_bytes + sum(spec.num_bytes for spec in self.moved)

    def assemble(self, received: Sequence[Tensor]) -> Message:
        """The whole message; ``received`` are the tensors that the channel brings."""
        arrived = iter(received)
        tensors = [
            own if spec is None else next(arrived).requires_grad_(spec.requires_grad)
            for own, spec in zip(self.message.tensors, self.specs, strict=True)
        ]
        return replace(self.message, tensors=tuple(tensors))


def check_body(body: Mapping[str, Any]) -> None:
    """Refuse a caller's body with an entry of the links' own."""
    if taken := sorted(_RESERVED & body.keys()):
        raise ConfigError(f"message body has the entry {taken[0]!r}, which the transport uses itself")


def announcement(message: Message, number: int, moved: Sequence[int], fields: Plain) -> Message:
    """``message`` without the tensors at the indices ``moved``, which transfer ``number`` brings."""
    tensors, specs = list(message.tensors), list[Plain]([None] * len(message.tensors))
    for index in moved:
        tensor, tensors[index] = tensors[index], None
        assert tensor is not None
        specs[index] = [DTYPE_NAMES[tensor.dtype], list(tensor.shape), tensor.requires_grad]
    return replace(message, tensors=tuple(tensors), body={**message.body, BESIDE: [number, specs, fields]})


def number_of(message: Message) -> tuple[int, Any]:
    """The checked number of an announced transfer, and the channel's fields, not checked."""
    check = HeaderChecks(message.sender)
    number, _, fields = check.array(BESIDE, message.body[BESIDE], 3)
    return check.integer(f"{BESIDE}.number", number), fields


def announced(message: Message, max_message_bytes: int) -> TensorHeader:
    """Check an announcement whose number is known to be good."""
    check = HeaderChecks(message.sender)
    specs = check.tensors(check.array(BESIDE, message.body[BESIDE], 3)[1])
    if len(specs) != len(message.tensors):
        check.fail("tensors", f"are {len(message.tensors)}, {BESIDE} names {len(specs)}")
    for index, (tensor, spec) in enumerate(zip(message.tensors, specs, strict=True)):
        if tensor is not None and spec is not None:
            check.fail(f"tensors[{index}]", f"came with the announcement, which names it in {BESIDE}")
    body = {key: value for key, value in message.body.items() if key != BESIDE}
    header = TensorHeader(replace(message, body=body), specs)
    if header.num_bytes > max_message_bytes:
        check.fail("tensors", f"have {header.num_bytes} bytes, max_message_bytes is {max_message_bytes}")
    return header


def entry_of(body: Mapping[str, Plain], channel: Channel = Channel.CONTROL) -> Message:
    """A message between links, which `receive` never returns."""
    return Message(channel, MessageKind.CONSUMED, body=body)
