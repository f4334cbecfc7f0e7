"""Tensors that stand for others: sharded ones (DTensor), and results of collectives that are still on their way.

Tensor-parallel modules work with both. Nothing here imports ``torch.distributed``: the classes are told by the methods
that torch gives them, so a pipeline without tensor parallelism never loads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

#: Tensors that stand for themselves, told apart at once.
_PLAIN = (Tensor, nn.Parameter)


def parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors whose memory ``tensor`` is: itself, or what is inside; of a sharded one this rank's shard."""
    # torch's protocol for tensors made of others: the names of the attributes that hold them, and other things.
    if type(tensor) in _PLAIN or not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        if isinstance(inner := getattr(tensor, name), Tensor):
            yield from parts(inner)


def is_sharded(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor, also one that is replicated."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "full_tensor")


def landed(tensor: Tensor) -> Tensor:
    """The result of an asynchronous collective once it is there, without a history; any other tensor as it is.

    Called within the task that began the collective: whoever reads the tensor later, such as a transport, would not
    know that it has to wait.
    """
    if type(tensor) in _PLAIN or not hasattr(tensor, "trigger_wait"):
        return tensor
    arrived: Tensor = tensor.trigger_wait()
    return arrived


def whole(tensor: Tensor) -> Tensor:
    """All of a sharded tensor, with its history; any other tensor as it is. A collective."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    full: Tensor = sharded.full_tensor()
    return full
