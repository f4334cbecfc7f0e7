"""Parameter gradients that must not live in received memory.

autograd adopts a gradient without a copy where it can, and views reach back: the ``.grad`` of a parameter that is an
output up to its shape would be the received tensor, which nobody may write to, accumulate into or keep.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from rrfp.compute.activations import storage_pointer
from rrfp.compute.async_tensors import parts
from rrfp.compute.payload import Payload


class OwnGradients:
    """Copies such gradients of one module, in one step.

    Args:
        module: whose parameters are watched.
    """

    def __init__(self, module: nn.Module) -> None:
        #: Parameters without a gradient: only a first gradient can be adopted.
        self._gradless = [p for p in module.parameters() if p.requires_grad and p.grad is None]

    def foreign(self, received: Iterable[Payload]) -> frozenset[int]:
        """The memory of received gradients, to be passed to `settle` once parameters have theirs."""
        if not self._gradless:
            return frozenset()
        tensors = (tensor for payload in received for tensor in payload.tensors if tensor is not None)
        return frozenset(pointer for tensor in tensors if (pointer := storage_pointer(tensor)) is not None)

    def settle(self, foreign: frozenset[int]) -> None:
        """Copy what lies in ``foreign`` memory."""
        for parameter in self._gradless:
            if parameter.grad is not None and any(storage_pointer(part) in foreign for part in parts(parameter.grad)):
                parameter.grad = parameter.grad.clone()
        self._gradless = [parameter for parameter in self._gradless if parameter.grad is None]
