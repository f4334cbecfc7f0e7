"""The losses of a rank's virtual stages, and the loss of a step from those of its microbatches.

A loss with parameters is differentiated together with the module of its virtual stage. All code that needs a virtual
stage's parameters, buffers or submodules must see both, and gets them from here.

A step differentiates ``sum(w_i * loss_i) / sum(w_i)`` for ``"mean"`` and ``sum(w_i * loss_i)`` for ``"sum"``. No loss
is known when the first backward starts, so the factor of each microbatch's loss depends on the weights alone.

A microbatch of weight 0, such as one without tokens, does not enter these sums, whatever its loss is: a mean over
nothing is nan, and so is 0 * nan. It is not differentiated either (see `TorchStage` for the exception).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from torch import Tensor, nn

from rrfp.compute.activations import tensors_in
from rrfp.compute.split.autograd_graph import ACCUMULATE
from rrfp.errors import ConfigError
from rrfp.log import get_logger
from rrfp.model.graph import TaskGraph
from rrfp.plain import number, one_of

logger = get_logger(__name__)

#: The prefix of the names of the loss's parameters and buffers.
LOSS = "loss_fn"

LossFunction = Callable[[Any, Any], Tensor]


class WithLoss(nn.Module):
    """The module of the last virtual stage and the loss as one module; it cannot be called."""

    # The names of the module's parts do not change. The loss's parts follow with the prefix ``loss_fn``, and a further
    # underscore if the module uses that name. A part of both occurs once, with the module.

    def __init__(self, module: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.loss = loss
        self._prefix = LOSS
        while hasattr(module, self._prefix):
            self._prefix += "_"

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The submodules of the module, then those of the loss."""
        # torch derives parameters(), buffers(), modules() and their named_ twins from this method.
        memo = set() if memo is None else memo
        yield from self.module.named_modules(memo, prefix, remove_duplicate)
        yield from self.loss.named_modules(memo, ".".join(filter(None, (prefix, self._prefix))), remove_duplicate)


def losses_by_stage(
    loss_fn: LossFunction | Mapping[int, LossFunction] | None, graph: TaskGraph
) -> Mapping[int, LossFunction]:
    if loss_fn is None or isinstance(loss_fn, Mapping):
        return loss_fn or {}
    return {v: loss_fn for v, readers in enumerate(graph.successors) if not readers}


def with_loss(modules: Mapping[int, nn.Module], losses: Mapping[int, LossFunction]) -> dict[int, nn.Module]:
    """The modules that virtual stages differentiate: with losses that are modules."""
    return {
        v: WithLoss(module, loss) if isinstance(loss := losses.get(v), nn.Module) else module
        for v, module in modules.items()
    }


def warn_of_foreign_parameters(loss: Tensor, output: Any, modules: Iterable[nn.Module]) -> None:
    """Warn of parameters that a loss function, given ``output``, gives gradients to, and that ``modules`` lack."""
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    seen = {tensor.grad_fn for tensor in tensors_in(output)}
    waiting, found = [loss.grad_fn] if seen else [], list[nn.Parameter]()
    while waiting:
        if (node := waiting.pop()) is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        parameter = getattr(node, "variable", None) if node.name() == ACCUMULATE else None
        if isinstance(parameter, nn.Parameter) and id(parameter) not in known:
            found.append(parameter)
    if found:
        text = (
            "loss_fn gives gradients to %d parameter(s) that its stage lacks, the first of shape %s: clip_grad_norm_, "
            "checks for overflow, the sums over replicas and deterministic=True may leave them out; pass the nn.Module "
            "that has them as loss_fn"
        )
        logger.warning(text, len(found), tuple(found[0].shape))


def class_name(module: nn.Module) -> str:
    """The class of a virtual stage's module, for messages."""
    return type(module.module if isinstance(module, WithLoss) else module).__name__


Reduction = Literal["mean", "sum"]


def gradient_weights(
    weights: Sequence[float] | None, microbatches: int, reduction: str = "mean", grad_scale: float = 1.0
) -> tuple[float, ...]:
    """The factor on each microbatch's loss in backward, ``grad_scale`` included."""
    normaliser = _normaliser(checked := _checked(weights, microbatches), reduction)
    number("grad_scale", grad_scale)
    return tuple(weight / normaliser * grad_scale for weight in checked)


class SharedGradientWeights(Sequence[float]):
    """`gradient_weights` of one of several replicas: known once the sum of all replicas' weights is."""

    def __init__(
        self, weights: Sequence[float] | None, microbatches: int, reduction: str = "mean", grad_scale: float = 1.0
    ) -> None:
        self._weights = _checked(weights, microbatches)
        self._reduction = reduction
        #: Of each microbatch; where replicas have exchanged some, their callers may have passed different ones.
        self.grad_scales: Sequence[float] = (float(grad_scale),) * microbatches
        self._factors: tuple[float, ...] | None = None

    def normalise(self, total: float) -> None:
        """The weights of all replicas sum to ``total``; a sum of 0 is a ConfigError where a mean is asked for."""
        normaliser = _normaliser((total,), self._reduction)
        pairs = zip(self._weights, self.grad_scales, strict=True)
        self._factors = tuple(weight / normaliser * scale for weight, scale in pairs)

    def dealt(self, weights: Sequence[float] | None, grad_scales: Sequence[float]) -> SharedGradientWeights:
        """Those of other microbatches in the same step, not normalised."""
        other = SharedGradientWeights(weights, len(grad_scales), self._reduction)
        other.grad_scales = grad_scales
        return other

    def __len__(self) -> int:
        return len(self._weights)

    def __getitem__(self, index: Any) -> Any:
        assert self._factors is not None, "the weights of the other replicas are not known yet"
        return self._factors[index]


def combine_losses(losses: Sequence[float], weights: Sequence[float] | None = None, reduction: str = "mean") -> float:
    """The loss of the step, over microbatches whose weight is not 0."""
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
    # Token counts are often numbers of numpy, or tensors.
    return tuple(number(f"weights[{m}]", weight, 0) for m, weight in enumerate(weights))


def _normaliser(weights: tuple[float, ...], reduction: str) -> float:
    if one_of(get_args(Reduction), "reduction", reduction) == "sum":
        return 1.0
    total = sum(weights)
    if not 0 < total < math.inf:
        raise ConfigError(f"weights sum to {total}, must be positive and finite for reduction 'mean'")
    return total
