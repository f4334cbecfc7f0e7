"""The loss of a step from the losses of its microbatches: the arithmetic of ``weights`` and ``reduction``.

A step differentiates ``sum(w_i * loss_i) / sum(w_i)`` for ``"mean"`` and ``sum(w_i * loss_i)`` for ``"sum"``. No loss
is known when the first backward starts, so the factor of each microbatch's loss depends on the weights alone.

A microbatch of weight 0, such as one without tokens, does not enter these sums, whatever its loss is: a mean over
nothing is nan, and so is 0 * nan. It is not differentiated either (see `TorchStage` for the exception).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args, overload

from rrfp.errors import ConfigError

Reduction = Literal["mean", "sum"]


def gradient_weights(
    weights: Sequence[float] | None, microbatches: int, reduction: str = "mean", grad_scale: float = 1.0
) -> tuple[float, ...]:
    """The factor on each microbatch's loss in backward.

    Args:
        weights: one weight a microbatch, finite and >= 0, such as its number of tokens. None: all 1.
        microbatches: M.
        reduction: ``"mean"`` divides by the sum of the weights, ``"sum"`` does not.
        grad_scale: a further factor on every gradient; it does not change the reported loss.
    """
    normaliser = _normaliser(checked := _checked(weights, microbatches), reduction)
    try:
        is_finite = math.isfinite(grad_scale)
    except TypeError:
        is_finite = False
    if not is_finite:
        raise ConfigError(f"grad_scale is {grad_scale!r}, must be a finite number")
    return tuple(weight / normaliser * grad_scale for weight in checked)


class SharedGradientWeights(Sequence[float]):
    """`gradient_weights` of one of several replicas: known once the sum of all replicas' weights is.

    Arguments as in `gradient_weights`.
    """

    def __init__(
        self, weights: Sequence[float] | None, microbatches: int, reduction: str = "mean", grad_scale: float = 1.0
    ) -> None:
        self._weights = _checked(weights, microbatches)
        self._reduction = reduction
        self._grad_scale = grad_scale
        self._factors: tuple[float, ...] | None = None

    def normalise(self, total: float) -> None:
        """The weights of all replicas sum to ``total``; a sum of 0 is a ConfigError where a mean is asked for."""
        normaliser = _normaliser((total,), self._reduction)
        self._factors = tuple(weight / normaliser * self._grad_scale for weight in self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    @overload
    def __getitem__(self, index: int) -> float: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[float]: ...

    def __getitem__(self, index: int | slice) -> float | Sequence[float]:
        assert self._factors is not None, "the weights of the other replicas are not known yet"
        return self._factors[index]


def combine_losses(losses: Sequence[float], weights: Sequence[float] | None = None, reduction: str = "mean") -> float:
    """The loss of the step, summed in microbatch order over the microbatches whose weight is not 0.

    Arguments and errors as in `gradient_weights`.
    """
    checked = _checked(weights, len(losses))
    normaliser = _normaliser(checked, reduction)
    return sum(weight * loss for weight, loss in zip(checked, losses, strict=True) if weight) / normaliser


def _checked(weights: Sequence[float] | None, microbatches: int) -> tuple[float, ...]:
    if microbatches < 1:
        raise ConfigError(f"microbatches is {microbatches}, must be at least 1")
    if weights is None:
        return (1.0,) * microbatches
    if len(weights) != microbatches:
        raise ConfigError(f"weights has length {len(weights)}, must have {microbatches}, one for each microbatch")
    return tuple(_weight(m, weight) for m, weight in enumerate(weights))


def _weight(microbatch: int, value: Any) -> float:
    try:
        weight = float(value)  # token counts are often numbers of numpy, or tensors
    except (TypeError, ValueError):
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise ConfigError(f"weights[{microbatch}] is {value!r}, must be a finite number >= 0")
    return weight


def _normaliser(weights: tuple[float, ...], reduction: str) -> float:
    if reduction not in get_args(Reduction):
        raise ConfigError(f"reduction is {reduction!r}, must be one of: {', '.join(get_args(Reduction))}")
    if reduction == "sum":
        return 1.0
    total = sum(weights)
    if not 0 < total < math.inf:
        raise ConfigError(f"weights sum to {total}, must be positive and finite for reduction 'mean'")
    return total
