"""From what a caller passes to `step` to what the ranks need: one checked plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from rrfp.compute.base import Batch
from rrfp.compute.weighting import Reduction, gradient_weights
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


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, ready to run.

    Attributes:
        step: its number, mode and M.
        batch: the caller's data.
        weights: of the microbatches' losses, None for all 1.
        sizes: how large each microbatch is, for hints; None where the caller did not tell.
    """

    step: StepId
    batch: Batch
    weights: tuple[float, ...] | None
    sizes: tuple[float, ...] | None = None


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
) -> Plan:
    """Check the arguments of a step; see `rrfp.Pipeline.step`.

    Raises:
        ConfigError: if they are no lists, disagree on M, ``kwargs`` are no dicts, or a weight or size is impossible.
    """
    lists = {"inputs": inputs, "targets": targets, "kwargs": kwargs, "weights": weights, "sizes": sizes}
    count = _microbatches(lists, microbatches)
    if not all(isinstance(each, Mapping) for each in kwargs or ()):  # anything else would become a positional argument
        raise ConfigError("kwargs must hold a dict for each microbatch")
    gradient = gradient_weights(weights, count, reduction, grad_scale)
    batch = Batch(inputs=inputs, targets=targets, kwargs=kwargs, gradient_weights=gradient)
    return Plan(StepId(number, mode, count), batch, None if weights is None else tuple(weights), _sizes(sizes))


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
