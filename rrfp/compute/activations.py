"""The bytes that a microbatch keeps between its forward and its backward.

autograd does not report them. Saved-tensor hooks see every tensor that it keeps, but cost about 1 us a tensor and
switch off torch's own check that none was overwritten. So they are set only for the first microbatch of each input
signature, with that check done here, and later microbatches of the signature count the same. If the caller has set such
hooks, torch would call only the innermost ones: then every microbatch is measured, around the caller's hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from rrfp.compute.async_tensors import inner_tensors
from rrfp.compute.caller_context import saved_tensor_hooks

T = TypeVar("T")

#: The most signatures that are remembered for a module; then all are dropped and measured again.
_MAX_SIGNATURES = 4096


@dataclass(frozen=True, slots=True)
class ForwardBytes:
    """Bytes that a forward keeps."""

    #: All bytes, each storage counted once.
    held: int
    #: The part of them that is output of the forward.
    of_output: int


class ActivationMeter:
    """Measures the bytes that forwards of one module keep."""

    # Every storage counts once, of sharded tensors this rank's part; the module's parameters and buffers do not count.
    # Tensors that a checkpoint will recompute are not kept and do not count. If the bytes depend on *values* (routing),
    # the first microbatch of a signature stands for all.

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: dict[Hashable, ForwardBytes] = {}

    def run(self, call: Callable[[], T], signature: Hashable, kept: Iterable[Tensor]) -> tuple[T, ForwardBytes]:
        """Run ``call``, a forward; also returns the bytes that it keeps, of ``kept`` too."""
        caller_hooks = saved_tensor_hooks()
        known = self._known.get(signature)
        if known is not None and caller_hooks is None:
            return call(), known
        state = (*self._module.parameters(), *self._module.buffers())
        storages = Storages(excluded={storage_pointer(part) for tensor in state for part in inner_tensors(tensor)})
        pack: Callable[[Tensor], Any] = storages.pack
        unpack: Callable[[Any], Tensor] = unpack_measured
        if caller_hooks is not None:
            pack, unpack = storages.counting(caller_hooks[0]), caller_hooks[1]
        with saved_tensors_hooks(pack, unpack):
            result = call()
        for tensor in kept:
            storages.add(tensor)
        if len(self._known) >= _MAX_SIGNATURES:
            self._known.clear()
        known = ForwardBytes(storages.num_bytes, storages.sum_of_seen(tensors_in(result)))
        if caller_hooks is None:  # the hooks of another step may keep more, or less
            self._known[signature] = known
        return result, known


def describe(value: Any) -> Hashable:
    """What decides how much is kept: shapes, dtypes and plain values of arguments."""
    # Every forward runs this: the commonest types come first, and no generator runs.
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.requires_grad
    if isinstance(value, tuple | list):
        return tuple(map(describe, value))
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, dict) or isinstance(value, Mapping):  # noqa: SIM101 - asking an ABC takes 1 us
        return tuple([(str(key), describe(item)) for key, item in value.items()])
    return type(value).__qualname__


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a nesting of tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def storage_pointer(tensor: Tensor) -> int | None:
    """Address of a tensor's memory; None without ordinary storage."""
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):
        return None


class Storages:
    """Sums storages, each once."""

    def __init__(self, excluded: Iterable[int | None] = ()) -> None:
        self._seen = set(excluded)
        self._added: set[int] = set()
        self.num_bytes = 0

    def add(self, tensor: Tensor) -> None:
        """Count the storages that ``tensor`` keeps alive."""
        for part in inner_tensors(tensor):
            pointer = storage_pointer(part)
            if pointer is None:
                self.num_bytes += part.numel() * part.element_size()
            elif pointer not in self._seen:
                self._seen.add(pointer)
                self._added.add(pointer)
                self.num_bytes += part.untyped_storage().nbytes()

    def sum_of_seen(self, tensors: Iterable[Tensor]) -> int:
        seen = (part for tensor in tensors for part in inner_tensors(tensor) if storage_pointer(part) in self._added)
        return sum(part.numel() * part.element_size() for part in seen)

    def pack(self, tensor: Tensor) -> tuple[Tensor, int]:
        """Count a tensor that autograd saves, and pack it for `unpack_measured`."""
        self.add(tensor)
        # Why detach? A node that saves its own output with its history refers to itself and would never be freed.
        return tensor if tensor.grad_fn is None else tensor.detach(), tensor._version

    def counting(self, pack: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """The hook ``pack``, which also counts packed tensors on their device."""

        def counted(tensor: Tensor) -> Any:
            packed = pack(tensor)
            for kept in tensors_in(packed):
                if kept.device == tensor.device:
                    self.add(kept)
            return packed

        return counted


def unpack_measured(packed: tuple[Tensor, int]) -> Tensor:
    """The tensor that `Storages.pack` packed; autograd may unpack it several times."""
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.dtype} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} instead"
        )
    return tensor
