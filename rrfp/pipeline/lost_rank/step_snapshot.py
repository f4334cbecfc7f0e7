"""The state of a rank's modules when a step begins, so that the step can be computed again.

Parameters do not change in a step. Buffers and gradients do. Torch's generators do not, since tasks draw from forks.
Any other state that a module keeps in its attributes is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from rrfp.compute.gradients.reducer import parameters_once


@dataclass(frozen=True, slots=True)
class _Gradient:
    """``.grad`` of a parameter that has one."""

    name: str
    gradient: Tensor
    #: Whether it is not all zero; read only if need be, since that waits for the device.
    has_values: Tensor


@dataclass(frozen=True, slots=True)
class StepSnapshot:
    """See the module's docstring; `take` makes it."""

    #: The buffers of each submodule, by name: the tensor and a copy of its values.
    _buffers: Sequence[tuple[nn.Module, Mapping[str, tuple[Tensor, Tensor] | None]]]
    #: None where ``.grad`` is None.
    _gradients: Sequence[tuple[nn.Parameter, _Gradient | None]]

    @classmethod
    @torch.no_grad()
    def take(cls, modules: Mapping[int, nn.Module]) -> Self:
        """The state of ``modules``, by virtual stage, those of losses included."""
        parts = {part: None for module in modules.values() for part in module.modules()}  # each once
        # Why not only those that have changed? The kernels of batch norm write without counting.
        buffers = [
            (part, {name: None if b is None else (b, b.detach().clone()) for name, b in part._buffers.items()})
            for part in parts
        ]
        gradients = [
            (parameter, None if (own := parameter.grad) is None else _Gradient(name, own, own.any()))
            for _, name, parameter in parameters_once(modules)
        ]
        return cls(buffers, gradients)

    @property
    def cannot(self) -> str | None:
        """Why the step cannot be computed again, if so: its gradients are added to earlier ones, which are lost."""
        for _, kept in self._gradients:
            if kept is not None and bool(kept.has_values):
                return f"{kept.name} had a gradient of an earlier step, to which this step has added its own"
        return None

    @torch.no_grad()
    def restore(self) -> None:
        """Put buffers and gradients back, in place but for gradients, once no task of the step runs any more."""
        for part, kept in self._buffers:
            own = part._buffers
            for name in own.keys() - kept.keys():
                del own[name]
            for name, pair in kept.items():
                if pair is not None:
                    tensor, values = pair
                    tensor.copy_(values)
                own[name] = None if pair is None else pair[0]
        for parameter, before in self._gradients:
            # Anew: a collective that the step has left may still write into the old one.
            parameter.grad = None if before is None else torch.zeros_like(before.gradient)
