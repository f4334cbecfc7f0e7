"""Whole batches, which a step cuts into microbatches along dimension 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rrfp.compute.gradients.layout import as_dtensor
from rrfp.compute.payload import is_named, with_items
from rrfp.errors import ConfigError

_BY_MICROBATCH = "for any other batch pass a list with one entry a microbatch"


class WholeBatches:
    """Those among the arguments of one step, and their pieces.

    A tensor, a dict or a named tuple is a whole batch, and a plain tuple is one unless it has M entries; any other
    value is left as it is.
    """

    def __init__(self, arguments: Mapping[str, Any], microbatches: int, *, trains: bool) -> None:
        whole = {name: value for name, value in arguments.items() if _is_whole(name, value, microbatches)}
        leaves = [leaf for name, value in whole.items() for leaf in _leaves(name, value)]
        if trains and microbatches > 1:
            _check_no_history(leaves)
        self._rows = _rows(leaves, microbatches) if whole else 0
        self._microbatches = microbatches
        self.pieces = {name: _cut(value, microbatches) for name, value in whole.items()}

    def replaced(self, field: str, values: Any) -> Any:
        """The argument ``field``, or its values by part or stage, with pieces in place of whole batches."""
        if field in self.pieces:
            return self.pieces[field]
        if not self.pieces or not isinstance(values, Mapping):
            return values
        return {key: self.pieces.get(f"{field}[{key!r}]", value) for key, value in values.items()}

    def weights(self) -> tuple[float, ...] | None:
        """Weights that count each row of cut targets alike, and sum to M; None where the pieces are of one size."""
        count, has_targets = self._microbatches, any(name.startswith("targets") for name in self.pieces)
        if not has_targets or self._rows % count == 0:
            return None
        least, larger = divmod(self._rows, count)
        return tuple((least + (m < larger)) * count / self._rows for m in range(count))


def is_batch(value: Any) -> bool:
    """Whether ``value`` may be one whole batch, to be cut, and is no list by microbatch."""
    return isinstance(value, Tensor | Mapping) or is_named(value)


def _is_whole(name: str, value: Any, microbatches: int) -> bool:
    if is_batch(value):
        return True
    if type(value) is not tuple or not value:
        return False
    if len(value) == microbatches > 1 and all(isinstance(each, Tensor) for each in value):
        raise ConfigError(
            f"{name} is a tuple of {microbatches} tensors, and microbatches is {microbatches}: must be list({name}) if "
            f"each is a microbatch, or list(zip(*(x.tensor_split({microbatches}) for x in {name}))) if they are the "
            "arguments of a whole batch"
        )
    return len(value) != microbatches


def _items(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a container holds, with paths."""
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", each) for key, each in value.items())
    elif is_named(value):
        yield from ((f"{path}.{field}", each) for field, each in zip(value._fields, value, strict=True))
    else:
        yield from ((f"{path}[{index}]", each) for index, each in enumerate(value))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a whole batch; a ConfigError for what cannot be cut."""
    if isinstance(value, Tensor):
        if (obstacle := _obstacle(value)) is not None:
            raise ConfigError(f"{path} is {obstacle}, which cannot be cut along dimension 0; {_BY_MICROBATCH}")
        yield path, value
    elif isinstance(value, Mapping | tuple):
        for inner, each in _items(path, value):
            yield from _leaves(inner, each)
    elif value is not None:
        raise ConfigError(
            f"{path} is of type {type(value).__name__}, must be a tensor or None in a whole batch, which is cut along "
            f"dimension 0; {_BY_MICROBATCH}"
        )


def _obstacle(tensor: Tensor) -> str | None:
    """Why a tensor cannot be cut row by row; None if it can."""
    if tensor.is_nested:
        return "a nested tensor"
    if as_dtensor(tensor) is not None:
        return "a DTensor"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    return "a scalar" if tensor.dim() == 0 else None


def _check_no_history(leaves: Sequence[tuple[str, Tensor]]) -> None:
    """The first backward would free what those of the other pieces need."""
    for path, tensor in leaves:
        if tensor.grad_fn is not None:
            raise ConfigError(
                f"{path} was computed with gradients ({tensor.grad_fn.name()}), must be detached in a whole batch: its "
                "microbatches would share one history; compute it under torch.no_grad(), or pass a list whose entries "
                "are computed one by one"
            )


def _rows(leaves: Sequence[tuple[str, Tensor]], microbatches: int) -> int:
    if not leaves:
        raise ConfigError(f"a whole batch must hold a tensor, to be cut into {microbatches} microbatches")
    first, rows = leaves[0][0], leaves[0][1].shape[0]
    for path, tensor in leaves:
        if tensor.shape[0] != rows:
            raise ConfigError(
                f"{first} has {rows} rows (dimension 0) and {path} {tensor.shape[0]}: must be the same, as whole "
                f"batches are cut row by row; {_BY_MICROBATCH}"
            )
    if rows < microbatches:
        raise ConfigError(
            f"{first} has {rows} rows (dimension 0), must have one or more for each of {microbatches} microbatches"
        )
    return rows


def _cut(value: Any, microbatches: int) -> list[Any]:
    """``value`` in pieces: views, as even as possible, the first ones a row larger."""
    if isinstance(value, Tensor):
        return list(value.tensor_split(microbatches))
    if value is None:
        return [None] * microbatches
    inner = [_cut(each, microbatches) for _, each in _items("", value)]
    by_microbatch: list[tuple[Any, ...]] = list(zip(*inner, strict=True)) if inner else [()] * microbatches
    if isinstance(value, Mapping):
        return [dict(zip(value, parts, strict=True)) for parts in by_microbatch]
    return [with_items(value, parts) for parts in by_microbatch] if is_named(value) else by_microbatch
