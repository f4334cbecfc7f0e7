"""Do the parts of a model compute what the whole one computes? Tried on one batch, gradients included."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rrfp.errors import ConfigError
from rrfp.integrations.splitting.layered import Layered, Sample, evaluating, tensors_of

#: The largest deviation allowed, in units of the dtype's epsilon times the largest entry. Both sides run the same
#: operations; only sums of gradients of a tensor that is used more than twice may be added in another order.
TOLERANCE = 32


def check_parts(layered: Layered, parts: Sequence[nn.Module], sample: Sample) -> None:
    """Compare output and gradients of the parts, one after the other, with those of the whole, in eval mode.

    Needs memory for two gradients of each parameter; writes no ``.grad``.
    """
    learning = {name: each for name, each in layered.model.named_parameters() if each.requires_grad}
    with torch.random.fork_rng(), torch.enable_grad(), evaluating(layered.model, *parts):
        output, loss = layered.run(sample)
        wanted = _results(output, loss, learning)
        output = _output(layered, parts, sample)
        if loss is not None and layered.loss_fn is not None:
            loss = layered.loss_fn(output, sample.target)
        actual = _results(output, loss, learning)
    deviations = {name: _deviation(actual.get(name), tensor) for name, tensor in wanted.items()}
    worst = max(deviations, key=lambda name: deviations[name], default=None)
    if worst is not None and deviations[worst] > 1:
        raise ConfigError(
            f"model is a {type(layered.model).__name__} whose parts do not compute what the whole computes: the "
            f"{worst} deviates by {_size(actual.get(worst), wanted[worst])}; it must be cut by hand"
        )


def _output(layered: Layered, parts: Sequence[nn.Module], sample: Sample) -> Any:
    try:
        return sample.call(*parts)
    except Exception as error:
        raise ConfigError(
            f"model is a {type(layered.model).__name__} whose parts do not run one after the other "
            f"({type(error).__name__}: {error}); it must be cut by hand"
        ) from error


#: Tensors by name: outputs and gradients.
_Results = dict[str, Tensor | None]


def _results(output: Any, loss: Tensor | None, parameters: Mapping[str, nn.Parameter]) -> _Results:
    """Floating outputs, the loss, and the gradients of the loss, or of the outputs' squares where there is none."""
    named = output.items() if isinstance(output, Mapping) else [("", output)]
    outputs = {
        f"output {name}".strip() + (f"[{index}]" if index else ""): tensor
        for name, value in named
        for index, tensor in enumerate(tensors_of(value))
        if tensor.is_floating_point()
    }
    results: _Results = {name: tensor.detach() for name, tensor in outputs.items()}
    if loss is None:
        loss = torch.stack([tensor.square().sum() for tensor in outputs.values()]).sum()
    else:
        results["loss"] = loss.detach()
    if not parameters or not loss.requires_grad:
        return results
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return results | {f"gradient of {name}": each for name, each in zip(parameters, gradients, strict=True)}


def _deviation(actual: Tensor | None, wanted: Tensor | None) -> float:
    """How far apart two tensors are, in units of what is allowed; infinite where only one exists or shapes differ."""
    if actual is None or wanted is None:
        return 0.0 if actual is wanted else math.inf
    share = _share(actual, wanted)
    return math.inf if math.isnan(share) else share / (TOLERANCE * torch.finfo(wanted.dtype).eps)


def _share(actual: Tensor, wanted: Tensor) -> float:
    """The largest difference, as a share of the largest entry of ``wanted``."""
    if actual.shape != wanted.shape:
        return math.inf
    actual = actual.to(wanted.dtype)
    if torch.allclose(actual, wanted, rtol=0, atol=0, equal_nan=True):
        return 0.0
    difference, largest = (float(each.abs().max()) for each in (actual - wanted, wanted))
    return difference / largest if largest else math.inf


def _size(actual: Tensor | None, wanted: Tensor | None) -> str:
    if actual is None or wanted is None:
        return "all of it: the parts have none" if actual is None else "all of it: the whole has none"
    return f"{_share(actual, wanted):.1e} of its largest entry"
