"""Checks of single header fields: each returns the typed value, or raises a FrameError that names the field.

A header may come from any sender, so no field is used to allocate, index or convert before its check.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch

from rrfp.errors import FrameError
from rrfp.model.tasks import Kind, Mode, StepId, Task
from rrfp.plain import flag, shown, whole
from rrfp.transports.wire.tensor_bytes import DTYPES, MAX_DIMENSIONS

#: Bytes of one announced tensor: beyond it, strides would overflow 64 bits.
MAX_TENSOR_BYTES = 1 << 60

MAX_BODY_DEPTH = 16

#: Items of an array or a map, before memory is allocated for them.
MAX_ITEMS = 8192

_MAX_INT = 2**63 - 1

_Choice = TypeVar("_Choice", bound=StrEnum)


@cache
def _members(choices: type[_Choice]) -> dict[str, _Choice]:
    """The members by value; faster than a call of the enumeration."""
    return {member.value: member for member in choices}


class TensorSpec(NamedTuple):
    """Dtype, shape and requires_grad of one announced tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class HeaderChecks:
    """Checks for the frames of one peer."""

    __slots__ = ("_peer",)

    def __init__(self, peer: int | None) -> None:
        self._peer = peer

    def _error(self, field: str, reason: str) -> FrameError:
        return FrameError(self._peer, field, reason)

    def fail(self, field: str, reason: str) -> NoReturn:
        raise self._error(field, reason)

    def choice(self, field: str, value: Any, choices: type[_Choice]) -> _Choice:
        members: dict[str, _Choice] = _members(choices)
        if type(value) is str and value in members:
            return members[value]
        self.fail(field, f"is {shown(value)}, must be one of: {', '.join(choices)}")

    def integer(self, field: str, value: Any, least: int = 0) -> int:
        """An integer of 63 bits, at least ``least``."""
        if type(value) is int and least <= value <= _MAX_INT:
            return value
        return whole(field, value, least, _MAX_INT, error=self._error)

    def boolean(self, field: str, value: Any) -> bool:
        return flag(field, value, error=self._error)

    def array(self, field: str, value: Any, length: int | None = None) -> list[Any]:
        """A list; of ``length`` items unless that is None."""
        if type(value) is not list or (length is not None and len(value) != length):
            wanted = "an array" if length is None else f"an array of {length}"
            self.fail(field, f"is {shown(value)}, must be {wanted}")
        return value

    def step(self, value: Any) -> StepId | None:
        if value is None:
            return None
        number, mode, microbatches = self.array("step", value, 3)
        return StepId(
            self.integer("step.number", number),
            self.choice("step.mode", mode, Mode),
            self.integer("step.microbatches", microbatches, least=1),
        )

    def task(self, value: Any) -> Task | None:
        if value is None:
            return None
        kind, microbatch, virtual_stage = self.array("task", value, 3)
        return Task(
            self.choice("task.kind", kind, Kind),
            self.integer("task.microbatch", microbatch),
            self.integer("task.virtual_stage", virtual_stage),
        )

    def tensors(self, value: Any) -> tuple[TensorSpec | None, ...]:
        """All announced tensors; None stands for "no gradient"."""
        entries = enumerate(self.array("tensors", value))
        return tuple(None if entry is None else self._tensor(f"tensors[{index}]", entry) for index, entry in entries)

    def _tensor(self, field: str, value: Any) -> TensorSpec:
        name, shape, requires_grad = self.array(field, value, 3)
        dtype = DTYPES.get(name) if type(name) is str else None
        if dtype is None:
            self.fail(f"{field}.dtype", f"is {shown(name)}, must be one of: {', '.join(DTYPES)}")
        sizes = self.array(f"{field}.shape", shape)
        if len(sizes) > MAX_DIMENSIONS:
            self.fail(f"{field}.shape", f"has {len(sizes)} dimensions, must have at most {MAX_DIMENSIONS}")
        for size in sizes:
            self.integer(f"{field}.shape", size)
        # Zeros count as one: an empty tensor's strides must not overflow either.
        if math.prod(max(size, 1) for size in sizes) * dtype.itemsize > MAX_TENSOR_BYTES:
            self.fail(f"{field}.shape", f"is {shown(sizes)}, must stay below {MAX_TENSOR_BYTES} bytes")
        is_differentiable = dtype.is_floating_point or dtype.is_complex
        if self.boolean(f"{field}.requires_grad", requires_grad) and not is_differentiable:
            self.fail(f"{field}.requires_grad", f"is true, must be false for {name}")
        return TensorSpec(dtype, tuple(sizes), requires_grad)

    def body(self, value: Any) -> dict[str, Any]:
        """Plain data, nested 16 deep at most; before it is sent, also tuples and derived classes."""
        if not isinstance(value, dict):
            self.fail("body", f"is {shown(value)}, must be a map")
        self._plain(value, MAX_BODY_DEPTH)
        return value

    def _plain(self, value: Any, depth: int) -> None:
        items: Collection[Any]
        if isinstance(value, dict):
            items = value.values()
            for key in value:
                if type(key) is not str and not isinstance(key, str):
                    self.fail("body", f"has the key {shown(key)}, keys must be strings")
        elif isinstance(value, _ARRAYS):
            items = value
        elif isinstance(value, _SCALARS):
            return
        else:  # msgpack's timestamps and extension types, and what no message can hold
            self.fail("body", f"holds a {type(value).__name__}, must be plain data")
        if depth == 0:
            self.fail("body", f"is nested deeper than {MAX_BODY_DEPTH}")
        if len(items) > MAX_ITEMS:
            self.fail("body", f"has an array or a map of {len(items)} items, must have at most {MAX_ITEMS}")
        for item in items:
            kind = type(item)
            if kind in _COMMON or (kind is list and depth > 1 and _is_flat(item)):
                continue
            self._plain(item, depth - 1)


def _is_flat(items: list[Any]) -> bool:
    """Whether ``items`` are few enough, and scalars all of them."""
    return len(items) <= MAX_ITEMS and _COMMON.issuperset(map(type, items))


#: Faster than a union of the two.
_ARRAYS = (list, tuple)

_SCALARS = (type(None), bool, int, float, str, bytes, bytearray, memoryview)

#: The scalars that are received.
_COMMON = frozenset({type(None), bool, int, float, str, bytes})
