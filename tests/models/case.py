"""A real model and how it is cut: what a file of this folder provides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """One microbatch, for the pipeline and for the unsplit model.

    Attributes:
        inputs: what the first stage is called with.
        whole: keyword arguments of the unsplit model.
        target: what `Case.loss` compares with.
        kwargs: keyword arguments of every stage.
        weight: how much its mean loss counts.
    """

    inputs: Any
    whole: Mapping[str, Any]
    target: Any = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of a library.

    Attributes:
        build: the whole model, with random weights, as the library makes it.
        cut: its stages, made of the whole model's own blocks; together they hold every parameter that learns.
        draw: microbatch m, of a size that depends on m.
        loss: ``loss(output, target)``, for the last stage.
        whole_loss: the same of what the unsplit model returns.
        assigns: whether other parameters, of new values, take the place of all of them between two steps.
    """

    build: Callable[[], nn.Module]
    cut: Callable[[Any], Sequence[nn.Module]]
    draw: Callable[[torch.Generator, int], Microbatch]
    loss: Callable[[Any, Any], Tensor]
    whole_loss: Callable[[Any, Any], Tensor]
    assigns: bool = False


def of_logits(loss: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    """The loss of a whole model that returns logits among others."""
    return lambda output, target: loss(output.logits, target)


def own_loss(output: Any, target: Any) -> Tensor:
    """The loss of a whole model that is given the labels."""
    loss: Tensor = output.loss
    return loss


def loss_inside(output: Tensor, target: None) -> Tensor:
    """The loss of a last stage that is given the labels."""
    return output


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def draw_floats(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def draw_integers(generator: torch.Generator, below: int, *shape: int) -> Tensor:
    return torch.randint(below, shape, generator=generator)
