"""Which tensors an operator reads, writes and makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from functools import cache
from typing import Any

import torch
import torch._dynamo  # the first dispatch mode would import it, for a second, perhaps on an event loop
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rrfp.testing.device_double.regions import storages

#: Called before an operator: its name, the tensors that it reads, and those that it writes.
Use = Callable[[str, Sequence[Tensor], Sequence[Tensor]], None]

#: Called after it: its results, and the keys of storages that are not new.
Made = Callable[[Sequence[Tensor], Set[int]], None]

_RUNNING = frozenset({"running_mean", "running_var"})
_BATCH_NORMS = frozenset({"aten::native_batch_norm", "aten::batch_norm", "aten::_batch_norm_impl_index"})


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports the operators of a block."""

    def __init__(self, use: Use, made: Made) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._use = use
        self._made = made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(_is_composed, types)):
            return NotImplemented  # the operators on its components follow
        reads = _tensors((args, kwargs))
        if func is torch.ops.aten.lift_fresh.default:  # a tensor that was made of Python's numbers
            self._made(reads, frozenset())
            return func(*args, **kwargs)
        self._use(str(func), reads, _tensors(_written(func, args, kwargs)))
        known = {storage._cdata for tensor in reads for storage in storages(tensor)}
        result = func(*args, **kwargs)
        self._made(_tensors(result), known)
        return result


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _is_composed(kind: type) -> bool:
    """Whether tensors of the type dispatch operators to their components."""
    return hasattr(kind, "__tensor_flatten__")


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterable[Any]:
    if func.namespace in ("c10d", "_c10d_functional"):  # a collective's schema does not say what it writes
        return (args, kwargs)
    places, names = _written_arguments(func)
    return [*(args[i] for i in places if i < len(args)), *(kwargs[name] for name in names if name in kwargs)]


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The positions and the names of the arguments that an operator writes."""
    # The schemas of most batch norms do not say that they write the running statistics.
    unsaid = _RUNNING if func._schema.name in _BATCH_NORMS else frozenset()
    written = [
        (i, argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if argument.name in unsaid or (argument.alias_info is not None and argument.alias_info.is_write)
    ]
    return tuple(i for i, _ in written), tuple(name for _, name in written)
