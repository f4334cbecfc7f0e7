"""From what a caller passes to `step` to what the ranks need: one checked plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from rrfp.compute.base import Batch
from rrfp.compute.weighting import Reduction, gradient_weights, shared_gradient_weights
from rrfp.core.tasks import Mode, StepId
from rrfp.errors import ConfigError


class EvaluateArguments(TypedDict, total=False):
    """The keyword arguments of an evaluation; `rrfp.Pipeline.step` says what they mean."""

    kwargs: Sequence[Mapping[str, Any]] | None
    weights: Sequence[float] | None
    sizes: Sequence[float] | None
    microbatches: int | None


class StepArguments(EvaluateArguments, total=False):
    """The keyword arguments of a training step."""

    grad_scale: float
    reduce_gradients: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, ready to run.

    Attributes:
        step: its number, mode and M.
        batch: the caller's data, and the number of the training step.
        weights: of the microbatches' losses, None for all 1.
        sizes: how large each microbatch is, for hints; None where the caller did not tell.
        reduction: how losses combine.
        grad_scale: a further factor on every gradient.
        reduce_gradients: whether gradients are summed over replicas at the end.
    """

    step: StepId
    batch: Batch
    weights: tuple[float, ...] | None
    sizes: tuple[float, ...] | None = None
    reduction: Reduction = "mean"
    grad_scale: float = 1.0
    reduce_gradients: bool = True

    @property
    def name(self) -> str:
        """The step as people count: training steps, from ``first_step`` on."""
        number = self.batch.training_step
        return f"training step {number}" if self.step.mode is Mode.TRAIN else f"an evaluation before step {number}"

    @property
    def total_weight(self) -> float:
        """The sum of the weights of this replica's microbatches."""
        return float(self.step.microbatches if self.weights is None else sum(self.weights))

    def normalise(self, total: float) -> None:
        """The weights of all replicas sum to ``total``: say so to whoever was given the batch.

        Raises:
            ConfigError: if that is 0, where a mean is asked for.
        """
        own = (1.0,) * self.step.microbatches if self.weights is None else self.weights
        factors = self.batch.gradient_weights
        assert isinstance(factors, list), "the step was planned for one replica"
        factors[:] = shared_gradient_weights(own, total, self.reduction, self.grad_scale)


def plan_step(
    number: int,
    mode: Mode,
    reduction: Reduction,
    inputs: Sequence[Any] | None = None,
    targets: Sequence[Any] | None = None,
    kwargs: Sequence[Mapping[str, Any]] | None = None,
    weights: Sequence[float] | None = None,
    sizes: Sequence[float] | None = None,
    microbatches: int | None = None,
    grad_scale: float = 1.0,
    reduce_gradients: bool = True,
    *,
    training_step: int = 0,
    is_shared: bool = False,
) -> Plan:
    """Check the arguments of a step; see `rrfp.Pipeline.step`.

    Args:
        number: of the step, evaluations counted.
        mode: training or forward only.
        reduction: how losses combine.
        training_step: see `rrfp.Batch`.
        is_shared: whether several replicas share the step, so that the weights' sum is known only later.

    Raises:
        ConfigError: if they are no lists, disagree on M, ``kwargs`` are no dicts, or a weight or size is impossible.
    """
    lists = {"inputs": inputs, "targets": targets, "kwargs": kwargs, "weights": weights, "sizes": sizes}
    count = _microbatches(lists, microbatches)
    if not all(isinstance(each, Mapping) for each in kwargs or ()):  # anything else would become a positional argument
        raise ConfigError("kwargs must hold a dict for each microbatch")
    if type(reduce_gradients) is not bool:
        raise ConfigError(f"reduce_gradients is {reduce_gradients!r}, must be True or False")
    gradient: Sequence[float] = gradient_weights(weights, count, "sum" if is_shared else reduction, grad_scale)
    batch = Batch(inputs, targets, kwargs, list(gradient) if is_shared else gradient, training_step)
    return Plan(
        StepId(number, mode, count),
        batch,
        None if weights is None else tuple(weights),
        _sizes(sizes),
        reduction,
        grad_scale,
        reduce_gradients,
    )


def _sizes(sizes: Sequence[Any] | None) -> tuple[float, ...] | None:
    for m, size in enumerate(sizes or ()):
        if not isinstance(size, int | float) or not 0 <= size < math.inf:
            raise ConfigError(f"sizes[{m}] is {size!r}, must be a number >= 0")
    return None if sizes is None else tuple(map(float, sizes))


def _microbatches(lists: Mapping[str, Any], microbatches: Any) -> int:
    """M, as all arguments tell it."""
    if microbatches is not None and type(microbatches) is not int:
        raise ConfigError(f"microbatches is {microbatches!r}, must be a whole number")
    lengths: dict[str, int] = {} if microbatches is None else {"microbatches": microbatches}
    for name, values in lists.items():
        if values is None:
            continue
        if not isinstance(values, Sequence) or isinstance(values, str | bytes):
            raise ConfigError(f"{name} is a {type(values).__name__}, must be a list with one entry a microbatch")
        lengths[name] = len(values)
    if not lengths:
        raise ConfigError("microbatches is needed on a rank that is given no inputs, targets, kwargs or weights")
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise ConfigError(f"the number of microbatches differs between arguments ({told})")
    name, count = next(iter(lengths.items()))
    if count < 1:
        raise ConfigError(f"{name} tells {count} microbatches, must be at least 1")
    return count
