"""Records as bytes: how ranks exchange plain data that is no tensor.

A record is a dataclass of numbers, texts, bytes, tuples, mappings and further records. What arrives is checked field by
field against the annotations of the dataclass, because it comes from another process.
"""

from __future__ import annotations

import reprlib
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, partial
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgpack

from rrfp.errors import ProtocolError

T = TypeVar("T")


def pack(record: Any) -> bytes:
    packed: bytes = msgpack.packb(to_plain(record))
    return packed


def unpack(kind: type[T], data: bytes, name: str) -> T:
    """Read what `pack` made of a ``kind``; anything else is a ProtocolError that calls it ``name``."""
    try:
        plain = msgpack.unpackb(data)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"{name} cannot be read: {type(error).__name__}: {error!s:.300}") from None
    return from_plain(kind, plain, name)


def to_plain(value: Any) -> Any:
    """``value`` as plain data that msgpack carries: a record as a dict of its fields, a mapping as a list of pairs."""
    if (names := _names(cast("Any", type(value)))) is not None:
        return {name: to_plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return [[to_plain(key), to_plain(item)] for key, item in value.items()]
    return [*map(to_plain, value)] if isinstance(value, tuple | list) else value


def from_plain(kind: type[T], plain: Any, name: str) -> T:
    """Read what `to_plain` made of a ``kind``; anything else is a ProtocolError that calls it ``name``."""
    try:
        read: T = _reader(cast("Any", kind))(plain)  # mypy takes no type variable for hashable
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"{name} cannot be read: {error!s:.300}") from None
    return read


@cache
def _names(kind: type[Any]) -> tuple[str, ...] | None:
    """The fields of a record; None for what is none."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else None


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Checks and reads plain data of ``kind``; made once a kind, because a step reads a record of every rank."""
    if isinstance(kind, type) and is_dataclass(kind):
        return _record_reader(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        (some,) = (_reader(each) for each in arguments if each is not types.NoneType)
        return lambda plain: None if plain is None else some(plain)
    if origin is tuple:
        item = _reader(arguments[0])
        return lambda plain: tuple(map(item, _checked(list, plain)))
    if origin is Mapping:
        key, value = map(_reader, arguments)
        return lambda plain: {key(k): value(v) for k, v in _checked(list, plain)}
    if kind is float:
        return lambda plain: float(plain) if type(plain) is int else _checked(float, plain)
    if kind is int:
        return _checked_int
    return partial(_checked, kind)


def _record_reader(kind: type[Any]) -> Callable[[Any], Any]:
    readers = {field: _reader(hint) for field, hint in get_type_hints(kind).items()}

    def read(plain: Any) -> Any:
        if not isinstance(plain, dict) or plain.keys() != readers.keys():
            raise TypeError(f"{reprlib.repr(plain):.80} is no record of {', '.join(readers)}")
        return kind(**{field: reader(plain[field]) for field, reader in readers.items()})

    return read


def _checked_int(plain: Any) -> int:
    """Of JSON it may be longer than what msgpack carries, and than what has a quotient as a float."""
    if not -(1 << 63) <= _checked(int, plain) < 1 << 64:
        raise TypeError(f"{reprlib.repr(plain):.80} is no integer of 64 bits")
    return int(plain)


def _checked(kind: type[T], plain: Any) -> T:
    if type(plain) is not kind:
        raise TypeError(f"{reprlib.repr(plain):.80} is no {kind.__name__}")
    return plain
