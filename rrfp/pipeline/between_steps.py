"""The calls that all ranks make between two steps: clipping gradients, comparing overflows, saving a trace."""

from __future__ import annotations

import os
from typing import Any, Literal, TypeVar

from torch.amp import GradScaler

from rrfp.errors import ConfigError
from rrfp.pipeline.calls import Call, CallGate
from rrfp.pipeline.local_ranks import LocalRanks
from rrfp.pipeline.loss_scaling import LossScaling, Share, bind
from rrfp.runtime.grad_clipping import Clipping, OverflowShare

Scaler = TypeVar("Scaler", bound=GradScaler)


class BetweenSteps:
    """Begins these calls. Methods are called on the caller's thread, and raise an RrfpError while another call runs."""

    def __init__(self, ranks: LocalRanks, gate: CallGate) -> None:
        self._ranks = ranks
        self._gate = gate
        #: The scale on the loss of training steps, if any.
        self._scaling: LossScaling | None = None

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None) -> Call[float]:
        """Clip gradients; errors as in `Clipping`."""
        with self._gate.beginning("clipping gradients"):
            clipping = Clipping(self._ranks.holder, max_norm, norm_type, error_if_nonfinite, foreach)
            rest = self._ranks.gather("clip_grad_norm_", clipping.share(), clipping.empty_share())
        return Call("clipping gradients", rest, clipping.clip)

    def scale(self, scaler: Scaler, share: Share) -> Scaler:
        """Scale the loss of training steps from now on; errors as in `rrfp.Pipeline.scale`.

        ``share`` is for a process that has not all stages.
        """
        with self._gate.between("scale", closed="call scale() of a new one"):
            share_if_needed = None if self._ranks.are_all else share
            self._scaling = bind(scaler, self._ranks.holder.modules, self._gate, share_if_needed)
        return scaler

    def loss_scale(self) -> float | None:
        """The scale of a training step that begins now, if any; errors as in `LossScaling.factor`."""
        return None if self._scaling is None else self._scaling.factor()

    def scaling(self) -> LossScaling:
        """The scale on the loss; a ConfigError if there is none."""
        if self._scaling is None:
            raise ConfigError("unscale_ needs a scaler: call scale() with a torch.amp.GradScaler before")
        return self._scaling

    def share_overflow(self, own: bool) -> Call[bool]:
        """Find out whether gradients have overflowed on any rank, given whether they have in this process."""
        with self._gate.beginning("comparing overflows"):
            shares = OverflowShare(own).packed(), OverflowShare(False).packed()
            return Call("comparing overflows", self._ranks.gather("GradScaler.step", *shares), OverflowShare.any_of)

    def save_trace(self, path: str | os.PathLike[str], steps: int | None, replica: int | Literal["all"]) -> Call[None]:
        """Save a trace; a ConfigError if an argument does not fit, no step is recorded, or nothing could be written."""
        with self._gate.beginning("saving a trace", counts=False):
            request = self._ranks.trace_request(path, steps, replica)
            return Call("saving a trace", self._ranks.save_trace(request), _written)


def _written(reason: Any) -> None:
    """The end of a call that saves a trace, given the cause if nothing was written."""
    if reason:
        raise ConfigError(reason)
