"""Plain data: what a checkpoint may hold besides its tensors, and how that is read back without running any code."""

from __future__ import annotations

import pickle
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from rrfp.errors import ConfigError

_VALUES = (type(None), bool, float, complex, str, bytes, bytearray, torch.dtype, torch.device, torch.Size)
_DICTS, _LISTS, _TENSORS = (dict, OrderedDict, Counter), (list, tuple, set), (Tensor, nn.Parameter)
#: Of numpy's dtypes: all but objects, records and times.
_NUMPY_KINDS = "?bhilqBHILQefdFDSU"
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
        or ((kind is np.ndarray or isinstance(value, np.generic)) and value.dtype.char in _NUMPY_KINDS)
    ):
        yield path, value


def read(stream: BinaryIO, *, trust_pickles: bool) -> Any:
    """What ``torch.save`` has written; ``trust_pickles`` says whether it may be an object of any class."""
    if trust_pickles:
        return torch.load(stream, weights_only=False)
    # Leaving the block takes out again all that it was given, also what the program had added itself.
    known = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([each for each in _numpy_names() if each not in known]):
        try:
            return torch.load(stream, weights_only=True)
        except pickle.UnpicklingError as error:
            match = re.search(r"(?:GLOBAL|class) ([\w.]+)", str(error))
            what = f"holds {match[1]}, which" if match else "is damaged, or holds something that"
            text = "is no plain data and may run code: pass trust_pickles=True if you trust who wrote it"
            raise NotPlainError(f"{what} {text}") from error


def _numpy_names() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """What makes arrays and numbers, under the names that numpy 1 and 2 write."""
    makers: list[Any] = [np.zeros(0).__reduce__()[0], np.float64().__reduce__()[0]]
    names = [(maker, f"numpy.{core}.multiarray.{maker.__name__}") for maker in makers for core in ("core", "_core")]
    return [np.ndarray, np.dtype, *names, *{type(np.dtype(code)) for code in _NUMPY_KINDS}]
