"""Trains a model as a pipeline and, unsplit, in a plain loop; compares losses and gradients of every step."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from models.case import Case, Microbatch
from models.catalogue import Configuration, build
from torch import Tensor, nn

from rrfp.pipeline.faces import BlockingPipeline

STEPS, MICROBATCHES, MAX_NORM = 3, 5, 1.0

#: Of the largest entry of a gradient, or where that is tiny of `FLOOR` times the model's largest.
TOLERANCE, FLOOR = 1e-11, 1e-4

#: Gradients by the parameter's name in the whole model.
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Step:
    """What one step gave.

    Attributes:
        loss: of the step, a mean by weight.
        losses: of the microbatches.
        gradients: of all parameters that have one, before they are clipped.
        norm: of all gradients together.
        buffers: by their names in the whole model, after the step; those that are saved.
    """

    loss: float
    losses: tuple[float, ...]
    gradients: Gradients
    norm: float
    buffers: dict[str, Tensor]


def batch_of(case: Case, step: int) -> list[Microbatch]:
    generator = torch.Generator().manual_seed(step)
    return [case.draw(generator, m + step) for m in range(MICROBATCHES)]


def train_plainly(case: Case) -> list[Step]:
    """Train the unsplit model, a microbatch at a time."""
    model = build(case)
    optimizer = optimizer_of(model)
    steps = []
    for number in range(STEPS):
        batch = batch_of(case, number)
        shares = [each.weight / sum(each.weight for each in batch) for each in batch]
        losses = []
        for microbatch, share in zip(batch, shares, strict=True):
            loss = case.whole_loss(model(**microbatch.whole), microbatch.target)
            (share * loss).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        mean = sum(share * loss for share, loss in zip(shares, losses, strict=True))
        gradients = gradients_of(model, model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()
        steps.append(Step(mean, tuple(losses), gradients, norm, buffers_of(model, model)))
        optimizer = stepped(case, optimizer, model)
    return steps


def train(
    case: Case, pipe: BlockingPipeline, configuration: Configuration, model: nn.Module, here: nn.Module
) -> list[Step]:
    """Train a pipeline, or one rank of it.

    Args:
        model: the whole model, for the names.
        here: as much of it as this process trains.
    """
    optimizer = optimizer_of(here)
    steps = []
    for number in range(STEPS):
        batch = batch_of(case, number)
        weights = [each.weight for each in batch]
        result = pipe.step(
            [each.inputs for each in batch],
            [each.target for each in batch],
            kwargs=[each.kwargs for each in batch],
            weights=weights,
            sizes=weights if configuration.hint is None else None,
        )
        assert result.loss is not None
        gradients = gradients_of(model, here)
        norm = pipe.clip_grad_norm_(MAX_NORM)
        steps.append(Step(result.loss, tuple(result.losses), gradients, norm, buffers_of(model, here)))
        optimizer = stepped(case, optimizer, here)
    return steps


def stepped(case: Case, optimizer: torch.optim.Optimizer, here: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer's step; returns the optimizer of the next step."""
    optimizer.step()
    optimizer.zero_grad()
    if not case.assigns:
        return optimizer
    here.load_state_dict({name: 0.9 * each for name, each in here.state_dict().items()}, assign=True)
    return optimizer_of(here)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in module.parameters() if each.requires_grad], lr=1e-2)


def gradients_of(model: nn.Module, here: nn.Module) -> Gradients:
    """Copies of the gradients of ``here``, by the names of ``model``."""
    names = names_in(model, here)
    return {
        name: each.grad.clone() for name, each in model.named_parameters() if name in names and each.grad is not None
    }


def names_in(model: nn.Module, here: nn.Module) -> set[str]:
    """The names that ``model`` has for parameters and saved buffers of ``here``."""
    own = {id(each) for each in here.state_dict(keep_vars=True).values()}
    return {name for name, each in model.state_dict(keep_vars=True).items() if id(each) in own}


def buffers_of(model: nn.Module, here: nn.Module) -> dict[str, Tensor]:
    names = names_in(model, here)
    return {name: each.clone() for name, each in model.named_buffers() if name in names}


def errors(
    actual: Sequence[Step], wanted: Sequence[Step], names: Set[str] | None = None, *, in_order: bool = False
) -> list[float]:
    """Of each step the largest error of a loss, the norm or a gradient, relative as `TOLERANCE` says; NaN is infinite.

    Args:
        names: of the parameters and buffers that ``actual`` is about; all by default.
        in_order: whether forwards ran in the order of microbatches, so that running statistics must agree too.
    """
    return [_largest_error(*steps, names, in_order) for steps in zip(actual, wanted, strict=True)]


def _largest_error(actual: Step, wanted: Step, names: Set[str] | None, in_order: bool) -> float:
    found = [abs(actual.loss - wanted.loss) / abs(wanted.loss), abs(actual.norm - wanted.norm) / wanted.norm]
    found += [abs(a - b) / abs(b) for a, b in zip(actual.losses, wanted.losses, strict=True)]
    floor = FLOOR * max(map(largest, wanted.gradients.values()))
    found += _tensor_errors(actual.gradients, wanted.gradients, names, floor)
    if in_order:
        found += _tensor_errors(actual.buffers, wanted.buffers, names, 1.0)
    return max(math.inf if math.isnan(each) else each for each in found)


def _tensor_errors(
    actual: dict[str, Tensor], wanted: dict[str, Tensor], names: Set[str] | None, floor: float
) -> list[float]:
    expected = {name: tensor for name, tensor in wanted.items() if names is None or name in names}
    assert actual.keys() == expected.keys()
    return [largest(actual[name] - tensor) / max(largest(tensor), floor) for name, tensor in expected.items()]


def largest(tensor: Tensor) -> float:
    """The largest magnitude; NaN where there is one."""
    return float(tensor.abs().max())
