"""Records as bytes: how ranks exchange plain data that is no tensor.

A record is a dataclass of numbers, texts, bytes, tuples, mappings and further records. What arrives is checked field by
field against the annotations of the dataclass, because it comes from another process.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

from rrfp.errors import ProtocolError

T = TypeVar("T")


def pack(record: Any) -> bytes:
    """``record`` as bytes."""
    packed: bytes = msgpack.packb(to_plain(record))
    return packed


def unpack(kind: type[T], data: bytes, name: str) -> T:
    """Read what `pack` made of a ``kind``, which errors call ``name``.

    Raises:
        ProtocolError: if it is something else.
    """
    try:
        plain = msgpack.unpackb(data)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"{name} cannot be read: {error!r}") from None
    return from_plain(kind, plain, name)


def to_plain(value: Any) -> Any:
    """``value`` as plain data that msgpack carries: a record as a dict of its fields, a mapping as a list of pairs."""
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return [[to_plain(key), to_plain(item)] for key, item in value.items()]
    return [*map(to_plain, value)] if isinstance(value, tuple | list) else value


def from_plain(kind: type[T], plain: Any, name: str) -> T:
    """Read what `to_plain` made of a ``kind``, which errors call ``name``.

    Raises:
        ProtocolError: if it is something else.
    """
    try:
        read: T = _read(kind, plain)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"{name} cannot be read: {error}") from None
    return read


def _read(kind: Any, plain: Any) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        if not isinstance(plain, dict) or plain.keys() != hints.keys():
            raise TypeError(f"{plain!r:.80} is no record of {', '.join(hints)}")
        return kind(**{field: _read(hint, plain[field]) for field, hint in hints.items()})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        (kind,) = (each for each in arguments if each is not types.NoneType)
        return None if plain is None else _read(kind, plain)
    if origin in (tuple, Mapping):
        if not isinstance(plain, list):
            raise TypeError(f"{plain!r:.80} is no list")
        if origin is tuple:
            return tuple(_read(arguments[0], item) for item in plain)
        return {_read(arguments[0], key): _read(arguments[1], item) for key, item in plain}
    if kind is float and type(plain) is int:
        return float(plain)
    if type(plain) is not kind:
        raise TypeError(f"{plain!r:.80} is no {kind.__name__}")
    return plain


@cache
def _hints(kind: type[Any]) -> Mapping[str, Any]:
    return get_type_hints(kind)
