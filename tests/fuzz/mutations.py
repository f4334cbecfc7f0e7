"""Damage: what a hostile or broken peer, or a damaged disk, makes of good input.

A *tree* is plain data as msgpack or JSON carries it. `damaged` changes nodes of a tree, `scrambled` bytes. Both draw
from a `random.Random` alone, so a seed repeats them.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import msgpack

#: A tree is damaged at so many places at most.
_MOST_CHANGES = 3


@dataclass(frozen=True)
class Nest:
    """Lists in lists, or maps in maps, so many deep: deeper than libraries write."""

    depth: int
    is_map: bool = False

    @property
    def _mark(self) -> str:
        return f"{'M' if self.is_map else 'L'}{self.depth:07d}"

    def in_msgpack(self, packed: bytes) -> bytes:
        """``packed`` with this nest in place of its mark."""
        mark = msgpack.packb(msgpack.ExtType(99, self._mark.encode()))
        start = b"\x81\xa1a" if self.is_map else b"\x91"
        return packed.replace(mark, start * self.depth + b"\xc0")

    def in_json(self, text: str) -> str:
        """The same of JSON."""
        start, end = ('{"a":', "}") if self.is_map else ("[", "]")
        return text.replace(f'"{self._mark}"', start * self.depth + "0" + end * self.depth)

    def mark(self) -> msgpack.ExtType:
        """What stands for the nest while msgpack packs."""
        return msgpack.ExtType(99, self._mark.encode())


@dataclass(frozen=True)
class Digits:
    """A whole number of so many digits, more than Python converts."""

    count: int

    def in_json(self, text: str) -> str:
        """``text`` with this number in place of its mark."""
        return text.replace(f'"{self!r}"', "9" * self.count)


_NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 127, 128, 255, 256, 8191, 8192, 8193, 65535, 65536, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1),
    *(2**63, 2**64 - 1, -(2**63), 0.0, -0.0, 0.5, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf),
)
_ANY: tuple[Any, ...] = (
    *(None, True, False, "", "x", "0", "F0@0", "é\n\x00", "x" * 300, [], {}, [[]], [None] * 20, {"a": 1}, *_NUMBERS),
    *(Nest(9), Nest(17), Nest(300), Nest(985), Nest(400, is_map=True)),
)
#: Values that msgpack carries and JSON does not, and the reverse.
MSGPACK: tuple[Any, ...] = (
    *(*_ANY, b"", b"\xff" * 40, {b"a": 1}, [None] * 9000, [[]] * 2000, Nest(1010), Nest(1023), Nest(1030)),
    *(Nest(1012, is_map=True), msgpack.Timestamp(1, 5), msgpack.ExtType(5, b"x")),
)
JSON: tuple[Any, ...] = (
    *(*_ANY, 10**30, -(10**30), 10**400, 10**4000, -(10**4000), Digits(4301), "\ud800", "\u2028", "x" * 5000),
    *(Nest(700), Nest(5000), Nest(100_000), Nest(960, is_map=True), Nest(900), Nest(940)),
)


def pack(tree: Any) -> bytes:
    """A tree as msgpack."""
    nests = set[Nest]()

    def default(value: Any) -> msgpack.ExtType:
        if isinstance(value, Nest):
            nests.add(value)
            return value.mark()
        return msgpack.ExtType(7, repr(value).encode())  # a number that damage made too large

    packed: bytes = msgpack.packb(tree, default=default)
    for nest in nests:
        packed = nest.in_msgpack(packed)
    return packed


def to_json(tree: Any) -> bytes:
    """A tree as JSON; also one that no JSON writer makes."""
    marked = list[Nest | Digits]()

    def default(value: Any) -> str:
        if isinstance(value, Nest | Digits):
            marked.append(value)
        return value._mark if isinstance(value, Nest) else repr(value)

    text = json.dumps(tree, default=default)
    for value in marked:
        text = value.in_json(text)
    return text.replace("#again", "").encode()


def damaged(random: Random, tree: Any, values: Sequence[Any]) -> Any:
    """A copy of ``tree`` in which one to three nodes were changed; ``values`` are put in place of some."""
    root = [copy.deepcopy(tree)]
    for _ in range(random.randint(1, _MOST_CHANGES)):
        parent, key = _place(random, root)
        _change(random, parent, key, values)
    return root[0] if root else None


def _place(random: Random, root: list[Any]) -> tuple[Any, Any]:
    """A node, as its parent and its index or key there."""
    parent: Any = root
    key: Any = 0
    while parent:
        key = random.choice(list(parent)) if isinstance(parent, dict) else random.randrange(len(parent))
        child = parent[key]
        if not (isinstance(child, list | dict) and child) or random.random() < 0.15:
            break
        parent = child
    return parent, key


def _change(random: Random, parent: Any, key: Any, values: Sequence[Any]) -> None:
    if not parent:
        return
    kind = random.random()
    if kind < 0.45:
        parent[key] = copy.deepcopy(random.choice(values))
    elif kind < 0.7:
        parent[key] = _near(random, parent[key])
    elif kind < 0.8:
        del parent[key]
    elif kind < 0.9 and isinstance(parent, list):
        parent.insert(random.randint(0, len(parent)), copy.deepcopy(parent[key]))
    elif isinstance(parent, list):
        other = random.randrange(len(parent))
        parent[key], parent[other] = parent[other], parent[key]
    elif kind < 0.95:
        parent[f"{key}#again"] = copy.deepcopy(random.choice(values))  # in JSON: the same name twice
    else:
        parent[random.choice(("", "a", "version", "é" * 50))] = parent.pop(key)


def _near(random: Random, value: Any) -> Any:
    """A value of the same type, if it is a number, a text or bytes."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return random.choice((value + 1, value - 1, -value, value * 1.0 if abs(value) < 1e300 else 0.5, value * 2))
    if isinstance(value, str | bytes):
        at = random.randint(0, len(value))
        return random.choice((value[:at], value[at:], value * 2, value[::-1]))
    return random.choice((None, [value], {"a": value}))


#: Bytes that mean much to some reader: lengths, types, ends, brackets.
TOKENS: tuple[bytes, ...] = (
    *(b"\x00", b"\xff", b"\x80", b"\x90", b"\x91" * 50, b"\xc0", b"\xc1", b"\xc4\xff", b"\xc7\x0c\xff", b"\xd6\xff"),
    *(
        b"\xdc\x20\x00",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xdc\x20\x00" * 400,
    ),
    *(b"\xcf" + b"\xff" * 8, b"\xcb\x7f\xf8" + bytes(6), b"\x7f\xff\xff\xff", b"\x00" * 8, b"\x91" * 1012),
    *(b'"', b"[", b"]", b"{", b"}", b",", b":", b"\\", b"\\ud800", b"NaN", b"1e999", b"null", b"\n", b"\r", b"\x1e"),
    *(b"[" * 500, b"9" * 400, b"-0", b"2F0", b"0B0,", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"true"),
)


def scrambled(random: Random, data: bytes, other: bytes) -> bytes:
    """``data`` with one to three runs of bytes overwritten, removed, repeated or inserted, also from ``other``."""
    result = bytearray(data)
    for _ in range(random.randint(1, _MOST_CHANGES)):
        random.choice(_SCRAMBLES)(random, result, other)
    return bytes(result)


def _flip(random: Random, data: bytearray, other: bytes) -> None:
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _overwrite(random: Random, data: bytearray, other: bytes) -> None:
    at, token = random.randint(0, len(data)), random.choice(TOKENS)
    data[at : at + len(token)] = token


def _insert(random: Random, data: bytearray, other: bytes) -> None:
    at = random.randint(0, len(data))
    data[at:at] = random.choice(TOKENS) if random.random() < 0.7 else random.randbytes(random.randint(1, 16))


def _cut(random: Random, data: bytearray, other: bytes) -> None:
    at = random.randint(0, len(data))
    del data[at : at + random.choice((1, 1, 2, 8, len(data)))]


def _repeat(random: Random, data: bytearray, other: bytes) -> None:
    start = random.randint(0, len(data))
    piece = data[start : start + random.randint(1, 32)]
    data[start:start] = piece * random.choice((1, 2, 50))


def _splice(random: Random, data: bytearray, other: bytes) -> None:
    data[random.randint(0, len(data)) :] = other[random.randint(0, len(other)) :]


def _noise(random: Random, data: bytearray, other: bytes) -> None:
    data[:] = random.randbytes(random.choice((0, 1, 5, 40, 400)))


_SCRAMBLES: tuple[Callable[[Random, bytearray, bytes], None], ...] = (
    *(_flip, _flip, _flip, _overwrite, _overwrite, _insert, _insert, _cut, _cut, _repeat, _splice, _splice, _noise),
)
