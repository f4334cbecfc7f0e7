"""Announcements: messages without their device tensors, whose memory the receiver opens.

An announcement is a carrier's message whose body has two more entries: `EDGE`, with a number and a
description of each absent tensor, and `SHARED`, the fields of shared memory. Nothing is opened or allocated before all
of it is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rrfp.errors import ConfigError, FrameError
from rrfp.transports.base import Message
from rrfp.transports.carried.announcements import EDGE, TensorHeader, announced, announcement, number_of
from rrfp.transports.header_checks import HeaderChecks, TensorSpec

#: For each tensor that is not in the message, in order, the fields of its memory; null for an empty one.
SHARED = "shared_tensors"

#: The number of an announcement whose tensors have been pulled.
PULLED = "pulled_tensors"

Fields = Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class SharedTensors:
    """A checked announcement."""

    #: The message without the tensors that are pulled, and their specs.
    whole: TensorHeader
    #: For the acknowledgement.
    number: int
    #: One for each spec that is not None.
    fields: list[Fields]

    @property
    def specs(self) -> list[TensorSpec]:
        """Of the tensors that are pulled."""
        return [spec for spec in self.whole.specs if spec is not None]


def check_body(body: Mapping[str, Any]) -> None:
    """Refuse a caller's body with an entry that links use: a ConfigError that names it."""
    for name in (SHARED, PULLED):
        if name in body:
            raise ConfigError(f"message body has the entry {name!r}, which the transport uses itself")


def shared_announcement(message: Message, number: int, moved: Sequence[bool], fields: Sequence[Fields]) -> Message:
    """``message`` without the tensors whose ``moved`` is true, and with the ``fields`` of their memory."""
    whole = announcement(message, number, moved)
    return replace(whole, body={**whole.body, SHARED: list(fields)})


def shared(
    message: Message, max_message_bytes: int, check_shared: Callable[[Mapping[str, Any], int], None]
) -> SharedTensors:
    """Check an announcement."""
    check = HeaderChecks(message.sender)
    if not message.body.keys() >= {EDGE, SHARED}:
        check.fail("body", f"must have both {EDGE} and {SHARED}, or none")
    number, whole = number_of(message), announced(message, max_message_bytes)
    body = {key: value for key, value in whole.message.body.items() if key != SHARED}
    specs = [spec for spec in whole.specs if spec is not None]
    entries = check.array(SHARED, message.body[SHARED], len(specs))
    for index, (spec, fields) in enumerate(zip(specs, entries, strict=True)):
        name = f"{SHARED}[{index}]"
        if not spec.num_bytes:
            if fields is not None:
                check.fail(name, f"is {fields!r:.80}, must be null like the memory of an empty tensor")
            continue
        if type(fields) is not dict:
            check.fail(name, f"is {fields!r:.80}, must be a map")
        try:
            check_shared(fields, spec.num_bytes)
        except FrameError as error:
            raise FrameError(message.sender, f"{name}.{error.field}", error.reason) from None
    return SharedTensors(replace(whole, message=replace(whole.message, body=body)), number, entries)
