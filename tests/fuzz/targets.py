"""A decoder as the fuzzers see it: bytes in; a result or a documented error out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from random import Random
from typing import Any

Decode = Callable[[bytes], object]


@dataclass(frozen=True)
class Target:
    """A decoder.

    Attributes:
        name: also of the folder of its corpus.
        errors: those that it documents.
        grammar: makes good input; also what is good by itself and wrong together.
        write: the bytes of a tree that `grammar` returned, or of a damaged one.
        values: what damage puts in place of nodes.
        open: the decoder, and what it needs meanwhile; called on a running loop.
    """

    name: str
    errors: tuple[type[Exception], ...]
    grammar: Callable[[Random], Any]
    write: Callable[[Any], bytes]
    values: Sequence[Any]
    open: Callable[[], AbstractContextManager[Decode]]


def plain(decode: Decode) -> Callable[[], AbstractContextManager[Decode]]:
    """The ``open`` of a decoder that needs nothing."""
    return lambda: nullcontext(decode)


def parts(case: bytes) -> list[bytes]:
    """The frames of a case: each has its length in front, in two bytes. Never fails."""
    found = []
    while len(case) >= 2:
        length = int.from_bytes(case[:2], "big")
        found.append(case[2 : 2 + length])
        case = case[2 + length :]
    return found or [case]


def join(frames: Sequence[bytes]) -> bytes:
    """The reverse of `parts`."""
    return b"".join(min(len(frame), 0xFFFF).to_bytes(2, "big") + frame[:0xFFFF] for frame in frames)
