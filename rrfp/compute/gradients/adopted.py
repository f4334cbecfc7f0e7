"""Parameter gradients that autograd adopted from memory with other readers, and which must be copied out of it.

autograd adopts a gradient without a copy if it can, and views reach back. So the ``.grad`` of a parameter that is an
output up to its shape would be the received tensor, and that of a parameter added to a view of an input would share
memory with the input gradient, which may still wait to be sent while later microbatches add to ``.grad``.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from rrfp.compute.activations import storage_pointer
from rrfp.compute.async_tensors import inner_tensors
from rrfp.compute.payload import Payload


class AdoptedGradients:
    """Copies adopted gradients of the parameters of one module, in one step.

    Args:
        module: its parameters may have gradients from earlier steps; those are left alone.
    """

    def __init__(self, module: nn.Module) -> None:
        #: Parameters without a gradient: autograd adopts a first gradient only, and adds later ones in place.
        self._gradless = [p for p in module.parameters() if p.requires_grad and p.grad is None]

    def memory_of(self, payloads: Iterable[Payload]) -> frozenset[int]:
        """The addresses of ``payloads``, for `copy_out_of`; empty if no gradient can be adopted.

        Args:
            payloads: the gradients that a backward received, and those that it sends.
        """
        if not self._gradless:
            return frozenset()
        tensors = (tensor for payload in payloads for tensor in payload.tensors if tensor is not None)
        return frozenset(pointer for tensor in tensors if (pointer := storage_pointer(tensor)) is not None)

    def copy_out_of(self, memory: frozenset[int]) -> None:
        """Copy the gradients that lie in ``memory``. Called after the task that formed them.

        Args:
            memory: from `memory_of`, of the backward of the same microbatch.
        """
        if not self._gradless:
            return
        for parameter in self._gradless:
            gradient = parameter.grad
            if gradient is not None and any(storage_pointer(inner) in memory for inner in inner_tensors(gradient)):
                parameter.grad = gradient.clone()
        self._gradless = [parameter for parameter in self._gradless if parameter.grad is None]
