"""Tensors made of other tensors: sharded ones (DTensor), and pending results of asynchronous collectives.

Tensor-parallel modules work with both. Nothing here imports ``torch.distributed``: the classes are recognised by the
methods that torch gives them, so a pipeline without tensor parallelism never loads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

#: The types of ordinary tensors, checked first because nearly all tensors have them.
PLAIN = (Tensor, nn.Parameter)


def inner_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that own the memory of ``tensor``: itself or its components."""
    # torch's protocol for tensor subclasses: the attributes that hold the components, and a context that is not needed.
    if type(tensor) in PLAIN or not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        if isinstance(inner := getattr(tensor, name), Tensor):
            yield from inner_tensors(inner)


def is_sharded(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor, also a replicated one."""
    return type(tensor) not in PLAIN and hasattr(tensor, "full_tensor")


def is_pending(tensor: Tensor) -> bool:
    """Whether ``tensor`` is the result of an asynchronous collective, which `wait_async` completes."""
    return type(tensor) not in PLAIN and hasattr(tensor, "trigger_wait")


def wait_async(tensor: Tensor) -> Tensor:
    """The completed result of an asynchronous collective, without a history; any other tensor unchanged."""
    # Why not wait at the first read? Later readers, such as a transport, do not know that the tensor is pending. So it
    # is waited for in the task that began the collective.
    if not is_pending(tensor):
        return tensor
    pending: Any = tensor
    completed: Tensor = pending.trigger_wait()
    return completed


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor, with its history: a collective of its mesh."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    full: Tensor = sharded.full_tensor()
    return full
