"""The contract of a P2P channel: it moves tensors between this rank and one peer, beside the base transport.

The sending end gets ready for some tensors, the message is announced over the base transport, and the tensors follow.
Transfers of each direction are numbered in the order of their announcements, by both ends alike.

An announcement is a message whose body has one more entry, `BESIDE`: the number of the transfer; for each tensor of the
message its dtype, shape and requires_grad if the channel brings it, else null; and fields of the channel. The tensors'
places in the message are null then. Nothing is allocated before all of it is checked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from rrfp.errors import ConfigError, RrfpError
from rrfp.transports.base import Channel, Message, MessageKind, Plain
from rrfp.transports.wire.header_checks import HeaderChecks, TensorSpec
from rrfp.transports.wire.tensor_bytes import DTYPE_NAMES


class P2PError(RuntimeError):
    """A channel failed, of which either end may be the cause."""


class Transfer(NamedTuple):
    """Some tensors that a channel is ready to send."""

    #: What travels with the announcement, beside number, dtypes and shapes.
    fields: Plain
    #: Sends the tensors of the message that was announced with this number, on this channel; done when they are not
    #: read any more. It fails with a P2PError, an error of this process's device, or what `P2PChannel.end_sending` got.
    start: Callable[[int, Channel], Awaitable[None]]


class P2PChannel(Protocol):
    """This rank's end, used on one loop. A FrameError names malformed fields."""

    def moves(self, tensor: Tensor) -> bool:
        """Whether the channel can move a tensor."""

    async def prepare(self, tensors: Sequence[Tensor]) -> Transfer:
        """Get ready to send; the other end makes room whatever its rank does."""

    def receive(self, number: int, specs: Sequence[TensorSpec], fields: Plain) -> Awaitable[list[Tensor]]:
        """Receive announced tensors, as dense leaves that require no grad yet; fails as `Transfer.start` does."""
        # Announcements come in any order: those of a later transfer may be faster.

    def refuse(self, number: int, fields: Plain) -> None:
        """An announcement was malformed; later ones can be received, or the link hears of a failure."""

    def on_entry(self, fields: Plain) -> None:
        """The other end of the channel sent fields of its own."""

    async def close(self) -> None:
        """Wait until the peer needs this end no more, or sends fail; then free it."""

    def end_sending(self, error: RrfpError) -> None:
        """Fail all transfers to the peer; those from it go on. May be called twice."""

    def end(self, error: RrfpError) -> None:
        """Fail all transfers and free everything, without waiting. May be called twice."""


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
        return [spec for spec in self.specs if spec is not None]

    @property
    def num_bytes(self) -> int:
        return self.message.num_bytes + sum(spec.num_bytes for spec in self.moved)

    async def assemble(self, receiving: Awaitable[list[Tensor]]) -> Message:
        """The whole message, with the tensors that the channel brings."""
        arrived = iter(await receiving)
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
