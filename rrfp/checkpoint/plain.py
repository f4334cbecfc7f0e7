"""Plain data: what a checkpoint may hold besides its tensors, and how that is read back without running any code."""

from __future__ import annotations

import math
import operator
import pickle
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from rrfp.errors import ConfigError

_VALUES = (type(None), bool, float, complex, str, bytes, bytearray, torch.dtype, torch.device, torch.Size)
_DICTS, _LISTS, _TENSORS = (dict, OrderedDict, Counter), (list, tuple, set), (Tensor, nn.Parameter)
#: Of numpy's dtypes: all but objects, records and times.
_NUMPY_KINDS = "?bhilqBHILQefdFDSU"
#: As pickles name them: no records, and none inside of arrays.
_DTYPE = re.compile(r"\?|[<>=|]?[biufcSU]\d{1,9}")
#: What torch's reader takes: 255 bytes.
_INT_BITS = 2039

_ALLOWED = (
    "plain data, which can be loaded without running code: None, numbers, strings, bytes, tensors, torch's dtypes, "
    "devices and sizes, numpy's arrays and numbers, and lists, tuples, sets and dicts of these"
)


class NotPlainError(pickle.UnpicklingError):
    """What was read is no plain data."""


def check(value: Any, path: str) -> None:
    """Refuse what `read` would not read."""
    try:
        for where, part in _parts(value, path):
            what = f"{part.dtype} {type(part).__name__}" if isinstance(part, np.ndarray) else type(part).__name__
            size = f" of {part.bit_length()} bits" if type(part) is int else ""
            raise ConfigError(f"{where} is a {what}{size}, must be {_ALLOWED}")
    except RecursionError:
        raise ConfigError(f"{path} contains itself, or is nested too deep, must be {_ALLOWED}") from None


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Those at fault. Subclasses are, too: their class would be lost, or run code."""
    kind = type(value)
    if kind in _DICTS:
        for key, each in value.items():
            yield from _parts(key, f"a key of {path}")
            yield from _parts(each, f"{path}[{key!r}]")
        # As `nn.Module.state_dict` has one.
        for name, each in getattr(value, "__dict__", {}).items():
            yield from _parts(each, f"{path}.{name}")
    elif kind in _LISTS:
        for index, each in enumerate(value):
            yield from _parts(each, f"an element of {path}" if kind is set else f"{path}[{index}]")
    elif kind in _TENSORS:
        for name, each in value.__dict__.items():
            yield f"{path}.{name}", each
    elif not (
        kind in _VALUES
        or (kind is int and value.bit_length() <= _INT_BITS)
        or ((kind is np.ndarray or isinstance(value, np.generic)) and _is_plain(value.dtype))
    ):
        yield path, value


def _is_plain(dtype: np.dtype[Any]) -> bool:
    return dtype.char in _NUMPY_KINDS and dtype.metadata is None


def read(stream: BinaryIO, *, trust_pickles: bool) -> Any:
    """What ``torch.save`` has written; ``trust_pickles`` says whether it may be an object of any class.

    What is no plain data is a NotPlainError; whatever else cannot be read, a ValueError.
    """
    if trust_pickles:
        return torch.load(stream, weights_only=False)
    with _safe_names():
        try:
            return _with_arrays(torch.load(stream, weights_only=True), set())
        except pickle.UnpicklingError as error:
            match = re.search(r"(?:GLOBAL|class) ([\w.]+)", str(error))
            what = f"holds {match[1]}, which" if match else "is damaged, or holds something that"
            text = "is no plain data and may run code: pass trust_pickles=True if you trust who wrote it"
            raise NotPlainError(f"{what} {text}") from error
        except OSError:
            raise
        except Exception as error:  # of bytes that are no archive, or of parts that contradict each other
            reason = str(error).partition("\n")[0]
            raise ValueError(f"it is damaged ({type(error).__name__}: {reason:.200})") from error


# --- numpy's arrays and numbers ----------------------------------------------

# Why not let numpy make them? Of a state that is wrong, such as a dtype whose size is changed below an array, it makes
# arrays that read and write memory of others. So the pickle makes stand-ins, which check what they are given.


class _Dtype:
    """In the place of a dtype."""

    def __init__(self, code: str, align: bool = False, copy: bool = False) -> None:
        if not _DTYPE.fullmatch(code) or (value := np.dtype(code)).char not in _NUMPY_KINDS:
            raise ValueError(f"{code!r:.40} is no dtype of plain data")
        self.value: np.dtype[Any] = value

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Of its state only the byte order is its own; sizes and flags follow from the code."""
        self.value = self.value.newbyteorder(state[1])


class _Array:
    """In the place of an array; once it has its state, ``value`` is the array."""

    __hash__ = None  # type: ignore[assignment]  # as an array

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, is_fortran, data = state
        count, size = math.prod(shape), dtype.value.itemsize
        if min(shape, default=0) < 0 or len(data) != count * size:
            raise ValueError(f"{len(data)} bytes are no array of shape {shape} of {dtype.value}")
        flat = np.frombuffer(data, dtype.value).copy() if data else np.zeros(count, dtype.value)
        self.value = flat.reshape(shape, order="F" if is_fortran else "C")


def _reconstruct(kind: type[_Array], *_: Any) -> _Array:
    """In the place of numpy's function, which makes an array that gets its state afterwards."""
    if kind is not _Array:
        raise ValueError("it makes arrays only")
    return _Array()


def _scalar(dtype: _Dtype, data: bytes) -> Any:
    """In the place of numpy's function, which makes a number."""
    made = _Array()
    made.__setstate__((1, (1,), dtype, False, data))
    return made.value[0]


def _no_bytes() -> bytes:
    return b""


def _with_arrays(value: Any, seen: set[int]) -> Any:
    """``value`` with the arrays in place of their stand-ins."""
    kind = type(value)
    if kind is _Array:
        return value.value
    if kind is _Dtype:
        raise NotPlainError("it holds a numpy dtype")
    if kind is tuple:
        items = [_with_arrays(each, seen) for each in value]
        return value if all(map(operator.is_, items, value)) else tuple(items)
    if id(value) not in seen and (kind in _DICTS or kind is list):
        seen.add(id(value))
        for key in list(value) if kind in _DICTS else range(len(value)):
            value[key] = _with_arrays(value[key], seen)
        for name, each in getattr(value, "__dict__", {}).items():
            setattr(value, name, _with_arrays(each, seen))
    return value


@contextmanager
def _safe_names() -> Iterator[None]:
    """Within, torch's reader takes the stand-ins, and none of numpy's own that the program may have added."""
    known = torch.serialization.get_safe_globals()
    others = [each for each in known if not _full_name(each).startswith("numpy.")]
    try:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals([*others, *_numpy_names()])
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(known)


def _full_name(each: Any) -> str:
    return str(each[1]) if isinstance(each, tuple) else f"{each.__module__}.{each.__qualname__}"


def _numpy_names() -> list[tuple[Callable[..., Any], str]]:
    """The stand-ins, under the names that numpy 1 and 2 write, and how pickles name no bytes, as of an empty array."""
    cores = ("numpy.core.multiarray", "numpy._core.multiarray")
    named = ((_reconstruct, "_reconstruct"), (_scalar, "scalar"))
    makers = [(maker, f"{core}.{name}") for maker, name in named for core in cores]
    no_bytes = [(_no_bytes, f"{module}.bytes") for module in ("builtins", "__builtin__")]
    return [(_Dtype, "numpy.dtype"), (_Array, "numpy.ndarray"), *makers, *no_bytes]
