"""The payload between virtual stages: tensors and their nesting.

A module may return a tensor, or tuples, named tuples, lists and dicts of tensors and plain values. A message holds a
flat list of tensors and a small description of the nesting, so nothing is ever unpickled. Other classes derived from
tuple, list and dict, such as the outputs of transformers, arrive as plain tuples, lists and dicts.

A named tuple is sent by the name of its class, which the receiving rank must have loaded. That name is untrusted. It is
only looked up in modules that are loaded already: this imports nothing and runs no module's ``__getattr__`` and no
constructor, and accepts only a tuple class with the fields that were sent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from rrfp.compute.async_tensors import PLAIN, is_pending, is_sharded, wait_async
from rrfp.errors import ProtocolError, StageError
from rrfp.model.record import record
from rrfp.plain import value_error, whole

_REMEDY = "return a tuple or a dict instead (x._asdict())"


def is_named(value: object) -> bool:
    return isinstance(value, tuple) and isinstance(getattr(value, "_fields", None), tuple)


def name_of(value: Any, path: str) -> str:
    """The name by which another rank finds the class of ``value``, ``module:qualified.name``.

    A StageError if that name does not lead to the class, such as for a class defined in a function.
    """
    cls = type(value)
    name = f"{cls.__module__}:{cls.__qualname__}"
    if _find(name) is not cls:
        raise StageError(
            f"{path} is a named tuple of the class {name}, which other stages cannot find by that name: define it at "
            f"the top level of a module, or {_REMEDY}"
        )
    return name


def rebuilt(name: Any, fields: Any, items: Iterable[Any]) -> Any:
    """The named tuple that was sent; a StageError if its class is unknown here."""
    cls = _find(name) if isinstance(name, str) else None
    known = getattr(cls, "_fields", None) if isinstance(cls, type) and issubclass(cls, tuple) else None
    if cls is None or not isinstance(known, tuple):
        raise StageError(
            f"a named tuple of the class {name!r:.200} arrived, which this rank has not loaded: import its module "
            f"where this stage is built, or {_REMEDY}"
        )
    values = tuple(items)
    if not isinstance(fields, Sequence) or known != tuple(fields) or len(values) != len(known):
        raise StageError(
            f"a named tuple of the class {name} arrived with the fields {fields!r:.200}, here it has {list(known)}: "
            f"run the same code on all ranks, or {_REMEDY}"
        )
    return tuple.__new__(cls, values)  # its own constructor may take other arguments


def with_items(value: Any, items: Iterable[Any]) -> Any:
    return tuple.__new__(type(value), items)


def _find(name: str) -> Any:
    """The object of that name in a loaded module; None if there is none."""
    module, _, path = name.partition(":")
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        # Why not getattr? A lazy module, or a metaclass, would run code of its own.
        if issubclass(type(value), ModuleType):
            value = ModuleType.__getattribute__(value, "__dict__").get(part)
        elif issubclass(type(value), type):
            value = type.__getattribute__(value, "__dict__").get(part)
        else:
            return None
    return value


#: The nesting as plain data: ["t", i] is tensor i; ["v", x] the plain value x; ["(", ...] a tuple; ["[", ...] a list;
#: ["{", [key, ...], ...] a dict with string keys; ["n", class, [field, ...], ...] a named tuple.
Structure = Sequence[Any]


@record
class Payload:
    """Tensors and their nesting.

    Attributes:
        tensors: the leaves; None means no gradient.
        structure: the nesting of the leaves, as plain data. Gradients have the nesting of their outputs, so their own
            structure is an empty tuple.
    """

    tensors: tuple[Tensor | None, ...] = ()
    structure: Structure = ()

    @classmethod
    def pack(cls, value: Any, name: str = "output") -> Payload:
        """Flatten ``value``.

        Args:
            value: a tensor, None, bool, int, float or str, or a nesting of these in tuples, lists and dicts.
            name: what errors call it.

        Raises:
            StageError: if a leaf has another type, is not dense or of a class derived from Tensor (DTensor among them),
                if a dict key is no string, or if other ranks cannot find the class of a named tuple by its name.
        """
        leaves: list[Tensor | None] = []
        structure = _describe(value, leaves, name)
        return cls(tuple(leaves), structure)

    def unpack(self) -> Any:
        """The inverse of `pack`, with this payload's tensors.

        Raises:
            StageError: if this rank has not loaded the class of a named tuple.
            ProtocolError: if the structure came from another rank, and is none.
        """
        try:
            return _rebuild(self.structure, self.tensors)
        except (IndexError, TypeError, ValueError) as error:
            count = len(self.tensors)
            raise ProtocolError(f"the nesting of {count} tensors that arrived cannot be read: {error!r:.80}") from error

    def sent(self, needs_copy: Callable[[Tensor], bool] = Tensor.is_inference) -> Payload:
        """As it is sent: the same memory without a history; a tensor requires grad if its gradient is wanted back.

        Args:
            needs_copy: whether later tasks may write into a tensor, or their writes would go unnoticed, as those into
                an inference tensor.
        """
        return Payload(tuple([_sent(tensor, needs_copy) for tensor in self.tensors]), self.structure)

    def pick(self, keys: Sequence[str]) -> tuple[Payload, tuple[int, ...]]:
        """Single values of a dict: a payload of a dict with ``keys`` alone, and the indices of its tensors in this one.

        Args:
            keys: keys of the dict.

        Raises:
            StageError: if this is no payload of a dict with these keys.
        """
        known = list(self.structure[1]) if self.structure and self.structure[0] == "{" else []
        if missing := [key for key in keys if key not in known]:
            kind = f"a dict with the keys {', '.join(map(repr, known))}" if known else "no dict"
            raise StageError(f"output is {kind}, must be a dict with the key {missing[0]!r}, which another part reads")
        indices: list[int] = []
        items = [_renumbered(self.structure[2 + known.index(key)], indices) for key in keys]
        return Payload(tuple([self.tensors[i] for i in indices]), ["{", [*keys], *items]), tuple(indices)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, as dense ones."""
        total = 0
        for tensor in self.tensors:  # no generator, which takes longer than all else here
            if tensor is not None:
                total += tensor.numel() * tensor.element_size()
        return total


#: In place of an output of a virtual stage that the microbatch skips, and of the gradients from there.
ABSENT: Final = Payload((), ("v", None))


def _sent(tensor: Tensor | None, needs_copy: Callable[[Tensor], bool]) -> Tensor | None:
    if tensor is None:
        return None
    sent = canonical(tensor.detach())
    if needs_copy(sent):
        sent = sent.clone()
    return sent.requires_grad_() if tensor.requires_grad else sent


def canonical(tensor: Tensor) -> Tensor:
    """The same values in row-major memory; waits for a pending collective."""
    # Why also for a payload that stays on its rank? Products over other strides round differently, so results would
    # depend on the placement. Why not is_contiguous()? It ignores the strides of dims of size 1, which kernels read.
    tensor = wait_async(tensor)
    shape = tensor.shape
    return tensor if tensor.stride() == _row_major(shape) else tensor.contiguous().view(-1).view(shape)


@lru_cache(maxsize=1024)
def _row_major(shape: torch.Size) -> tuple[int, ...]:
    """The strides of ``shape`` in row-major memory."""
    strides, expected = [], 1
    for size in reversed(shape):
        strides.append(expected)
        expected *= max(size, 1)
    return tuple(reversed(strides))


def _describe(value: Any, leaves: list[Tensor | None], path: str) -> list[Any]:
    if isinstance(value, Tensor):
        _check_tensor(value, path)
        leaves.append(value)
        return ["t", len(leaves) - 1]
    if value is None or isinstance(value, bool | int | float | str):
        return ["v", value]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise StageError(f"{path} has the dict key {key!r}; keys between stages must be strings")
        return ["{", list(value), *(_describe(item, leaves, f"{path}[{key!r}]") for key, item in value.items())]
    if is_named(value):
        fields = type(value)._fields
        items = (_describe(item, leaves, f"{path}.{field}") for field, item in zip(fields, value, strict=True))
        return ["n", name_of(value, path), list(fields), *items]
    if isinstance(value, tuple | list):
        mark = "(" if isinstance(value, tuple) else "["
        return [mark, *[_describe(item, leaves, f"{path}[{i}]") for i, item in enumerate(value)]]
    raise StageError(
        f"{path} is of type {type(value).__name__}; between stages may travel tensors, None, bool, int, float, str, "
        "and tuples, named tuples, lists and string-keyed dicts of them"
    )


def _check_tensor(tensor: Tensor, path: str) -> None:
    """Refuse sharded, nested, sparse, opaque and quantized tensors, and those of other derived classes."""
    if is_sharded(tensor):
        raise StageError(
            f"{path} is a DTensor; between stages travel ordinary tensors: return {path}.to_local(), which reaches "
            "the same member of the next stage's group, or its full_tensor()"
        )
    if tensor.is_nested:
        kind, remedy = "nested", f"list({path}.unbind()), or {path}.to_padded_tensor(0.0)"
    elif tensor.layout is not torch.strided:
        parts = "" if tensor.is_mkldnn else ", or its indices and values"
        kind, remedy = f"{tensor.layout}", f"{path}.to_dense(){parts}"
    elif tensor.is_quantized:
        kind, remedy = "quantized", f"{path}.dequantize(), or its int_repr() and its scale"
    elif type(tensor) in PLAIN or is_pending(tensor):
        return
    else:
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        raise StageError(
            f"{path} is a {kind}, a class derived from torch.Tensor; between stages travel ordinary tensors, since "
            f"another rank would get no more than the values: return {path}.as_subclass(torch.Tensor), or the "
            "tensors that it is made of, and build it again where it is used"
        )
    raise StageError(f"{path} is a {kind} tensor; between stages travel dense ones: return {remedy}")


def _rebuild(structure: Structure, tensors: Sequence[Tensor | None]) -> Any:
    mark, rest = structure[0], structure[1:]
    if mark == "t":
        return tensors[whole("the index", rest[0], error=value_error)]
    if mark == "v":
        return rest[0]
    if mark == "{":
        return {key: _rebuild(item, tensors) for key, item in zip(rest[0], rest[1:], strict=True)}
    if mark == "n":
        return rebuilt(rest[0], rest[1], (_rebuild(item, tensors) for item in rest[2:]))
    items = (_rebuild(item, tensors) for item in rest)
    return tuple(items) if mark == "(" else list(items)


def _renumbered(structure: Structure, indices: list[int]) -> Structure:
    mark, rest = structure[0], structure[1:]
    if mark == "t":
        indices.append(rest[0])
        return [mark, len(indices) - 1]
    if mark == "v":
        return structure
    fields = {"{": 1, "n": 2}.get(mark, 0)
    return [mark, *rest[:fields], *(_renumbered(item, indices) for item in rest[fields:])]
