"""`torch.amp.GradScaler` over all ranks: one scale, and one answer to the question whether gradients have overflowed.

torch has no hook between its check of an optimizer's gradients and the decision to skip the optimizer's step. So this
module, and no other, uses private names of ``torch.amp``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from rrfp.compute.gradients.layout import as_dtensor, local_part
from rrfp.compute.gradients.norm import has_gradients, has_overflow
from rrfp.errors import ConfigError, RrfpError

#: Returns whether gradients have overflowed on any rank, given whether they have on this one.
Share = Callable[[bool], bool]


class Owner(Protocol):
    """The pipeline that a scaler belongs to."""

    @property
    def is_entered(self) -> bool:
        """Whether it was entered and not left."""


class LossScaling:
    """The scale on the loss of one pipeline, and the answer of all its ranks in the current iteration.

    An iteration ends with ``scaler.update()``. The ranks answer once in each, in the first call of ``unscale_``,
    ``step`` or ``update``: a stage may have several optimizers or none.
    """

    def __init__(self, scaler: GradScaler, modules: Mapping[int, nn.Module], owner: Owner, share: Share | None) -> None:
        self.scaler = scaler
        self.owner = owner
        #: The scaler's class before `bind` changed it.
        self.kind = type(scaler)
        #: Whether torch's scaler has got the answer for at least one optimizer.
        self.is_recorded = False
        self._modules = modules
        self._share = share
        self._answer: bool | None = None
        #: The scale of the last training step.
        self._used: float | None = None
        #: All optimizers that the scaler has got, and whether an iteration has shown which ones there are.
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._knows_optimizers = False

    def factor(self) -> float | None:
        """The scale, for a training step that begins now; None if the scaler is disabled."""
        scaler = self.scaler
        if not scaler.is_enabled():
            return None
        if scaler.__dict__.get("_scaling") is not self:
            raise ConfigError("the scaler was passed to scale() of another pipeline: pass it to this one again")
        if self._used is None:  # torch sets up the scale in the first call of `scale`
            parameter = next((p for module in self._modules.values() for p in module.parameters()), None)
            scaler.scale(torch.zeros((), device=None if parameter is None else parameter.device))
        scale = scaler.get_scale()
        if not 0.0 < scale < math.inf:
            raise ConfigError(f"the scale of the GradScaler is {scale}, must be a positive finite number")
        if self._used not in (None, scale) and has_gradients(self._parameters()):
            raise ConfigError(
                f"the scale changed from {self._used:g} to {scale:g}, and .grad holds gradients with the old one: must "
                "be zeroed before step(); steps that accumulate come before one scaler.update()"
            )
        self._used = scale
        return scale

    def question(self, *optimizers: Optimizer) -> bool | None:
        """Whether gradients of this rank have overflowed; None if all ranks have answered in this iteration."""
        self._optimizers.update(optimizers)
        if self._answer is not None or not self.scaler.is_enabled():
            return None
        parameters = list(self._parameters())
        # Later ones must not be asked: a parameter that no optimizer has keeps an inf forever.
        if not self._knows_optimizers:
            parameters += [p for module in self._modules.values() for p in module.parameters()]
        return has_overflow(parameters)

    def answer(self, overflow: bool) -> None:
        """Keep the answer of all ranks until the iteration ends."""
        self._answer = overflow

    def overflow(self, *optimizers: Optimizer) -> bool:
        """The answer of all ranks; waits for them in the first call of an iteration."""
        own = self.question(*optimizers)
        if own is not None:
            self.answer(own if self._share is None else self._share(own))
        return bool(self._answer)

    def end(self) -> None:
        self._answer, self.is_recorded, self._knows_optimizers = None, False, True

    def _parameters(self) -> Iterator[Tensor]:
        return (p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"])


class _SharedScaler(GradScaler):
    """Mixed into the class of a scaler that belongs to a pipeline."""

    _scaling: LossScaling

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """As torch's, and the answer is that of all ranks."""
        overflow = self._scaling.overflow(*([optimizer] if optimizer is not _NONE else []))
        flags = super()._unscale_grads_(_with_local_parts(optimizer), inv_scale, found_inf, allow_fp16)
        if not overflow and any(flag.item() for flag in flags.values()):
            raise RrfpError(
                "a gradient of an optimizer is inf or nan that was not, or was not known, when the ranks compared "
                "theirs: change gradients before the first scaler.unscale_() or scaler.step() of an iteration, and "
                "pass every optimizer in the first iteration"
            )
        flags.setdefault(found_inf.device, found_inf)
        for flag in flags.values():
            flag.fill_(float(overflow))
        self._scaling.is_recorded = True
        return flags

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """As torch's; also on a rank that has no optimizer."""
        if new_scale is None and self._get_scale_async() is not None and not self._scaling.is_recorded:
            self._check_inf_per_device(_NONE)
        super().update(new_scale)
        self._scaling.end()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy belongs to no pipeline."""
        state = {name: value for name, value in self.__getstate__().items() if name != "_scaling"}
        return _new, (self._scaling.kind,), state


def _new(kind: type[GradScaler]) -> GradScaler:
    """A scaler without its state, to be unpickled."""
    return kind.__new__(kind)


#: Stands for the optimizer of a rank that has none.
_NONE: Any = SimpleNamespace(param_groups=())


def bind(scaler: Any, modules: Mapping[int, nn.Module], owner: Owner, share: Share | None) -> LossScaling:
    """Let ``scaler`` belong to ``owner``, unless it is disabled: then it does nothing."""
    if not isinstance(scaler, GradScaler):
        raise ConfigError(f"scaler is of type {type(scaler).__name__}, must be a torch.amp.GradScaler")
    scaling = LossScaling(scaler, modules, owner, share)
    if not scaler.is_enabled():
        return scaling
    earlier: LossScaling | None = scaler.__dict__.get("_scaling")
    if earlier is None:
        scaler.__class__ = _shared(type(scaler))
    elif earlier.owner is not owner and earlier.owner.is_entered:
        raise ConfigError("scaler belongs to another pipeline in use, must be a GradScaler of this pipeline's own")
    else:
        scaling.kind = earlier.kind
    scaler.__dict__["_scaling"] = scaling
    return scaling


def _shared(kind: type[GradScaler]) -> type[GradScaler]:
    return type(kind.__name__, (_SharedScaler, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def _with_local_parts(optimizer: Any) -> Any:
    """The parameters of ``optimizer`` with this rank's parts of sharded gradients: torch takes no list of both."""
    groups: Sequence[Mapping[str, Any]] = optimizer.param_groups
    return SimpleNamespace(param_groups=[{"params": [_local(p) for p in group["params"]]} for group in groups])


def _local(parameter: Any) -> Any:
    if not isinstance(parameter, Tensor) or as_dtensor(parameter.grad) is None:
        return parameter
    assert parameter.grad is not None
    holder = (part := local_part(parameter.grad)).detach()
    holder.grad = part
    return holder
