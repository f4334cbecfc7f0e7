"""Announcements: messages without those tensors that follow over an edge, and the other entries that links exchange.

An announcement is a carrier's message whose body has one more entry, `EDGE`: the number of the transfer, and for each
tensor of the message its dtype, shape and requires_grad if it comes over the edge, else null. The tensors' places in
the message are null then. Nothing is allocated before all of it is checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from rrfp.errors import ConfigError
from rrfp.transports.base import Message, Plain
from rrfp.transports.header_checks import HeaderChecks, TensorSpec
from rrfp.transports.tensor_bytes import DTYPE_NAMES

#: [number, specs]: tensors of the message come over the edge.
EDGE = "edge_tensors"

#: [channel, bytes, messages]: so much was consumed.
CREDIT = "edge_credit"

#: [channel]: a sender waits for room in it.
WANT = "edge_want"

#: True: the sender closes in order, and all its messages have arrived.
FAREWELL = "edge_farewell"

_RESERVED = frozenset({EDGE, CREDIT, WANT, FAREWELL})


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A checked announcement."""

    #: Without the tensors that come over the edge, and without the entry that names them.
    message: Message
    #: One for each tensor of the message; None where it is not the edge's.
    specs: tuple[TensorSpec | None, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors of the message."""
        return self.message.num_bytes + sum(spec.num_bytes for spec in self.specs if spec is not None)

    def assemble(self, received: Sequence[Tensor]) -> Message:
        """The whole message; ``received`` are the tensors of the specs that are not None, in order."""
        arrived = iter(received)
        tensors = [
            own if spec is None else next(arrived).requires_grad_(spec.requires_grad)
            for own, spec in zip(self.message.tensors, self.specs, strict=True)
        ]
        return replace(self.message, tensors=tuple(tensors))


def check_body(body: Mapping[str, Any]) -> None:
    """Refuse a caller's body with an entry that links use: a ConfigError that names it."""
    if taken := sorted(_RESERVED & body.keys()):
        raise ConfigError(f"message body has the entry {taken[0]!r}, which the transport uses itself")


def announcement(message: Message, number: int, on_edge: Sequence[bool]) -> Message:
    """``message`` without the tensors whose ``on_edge`` is true, which transfer ``number`` moves."""
    specs: list[Plain] = [
        [DTYPE_NAMES[tensor.dtype], list(tensor.shape), tensor.requires_grad] if moved and tensor is not None else None
        for tensor, moved in zip(message.tensors, on_edge, strict=True)
    ]
    tensors = tuple(None if moved else tensor for tensor, moved in zip(message.tensors, on_edge, strict=True))
    return replace(message, tensors=tensors, body={**message.body, EDGE: [number, specs]})


def number_of(message: Message) -> int:
    """The number of an announced transfer; a FrameError if it is malformed."""
    check = HeaderChecks(message.sender)
    return check.integer(f"{EDGE}.number", check.array(EDGE, message.body[EDGE], 2)[0])


def announced(message: Message, max_message_bytes: int) -> TensorHeader:
    """Check an announcement whose number is known to be good."""
    check = HeaderChecks(message.sender)
    specs = check.tensors(check.array(EDGE, message.body[EDGE], 2)[1])
    if len(specs) != len(message.tensors):
        check.fail("tensors", f"are {len(message.tensors)}, {EDGE} names {len(specs)}")
    for index, (tensor, spec) in enumerate(zip(message.tensors, specs, strict=True)):
        if tensor is not None and spec is not None:
            check.fail(f"tensors[{index}]", "came with the announcement, must come over the edge")
    body = {key: value for key, value in message.body.items() if key != EDGE}
    whole = TensorHeader(replace(message, body=body), specs)
    if whole.num_bytes > max_message_bytes:
        check.fail("tensors", f"have {whole.num_bytes} bytes, max_message_bytes is {max_message_bytes}")
    return whole
