"""The one-process reference: the result that a pipeline must compute, in the plainest way.

It chains the modules of all virtual stages in one process and differentiates them by ordinary autograd, microbatches in
order. It shares with the pipeline the random forks, the arithmetic of weights and the memory format between virtual
stages, and nothing else.

Of a parameter that several modules share, every module has a copy: each copy's gradient is formed in microbatch order,
then the copies are added in the order of the modules. A pipeline does the same with copies on several stages. Autograd
itself would add both modules' shares microbatch by microbatch, which differs in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rrfp.compute.caller_context import autocast_device_types
from rrfp.compute.loss_module import with_loss
from rrfp.compute.named_tuples import is_named, with_items
from rrfp.compute.payload import canonical
from rrfp.compute.rng import RandomForks, devices_of
from rrfp.compute.weighting import combine_losses, gradient_weights
from rrfp.core.graph import Graph
from rrfp.core.tasks import Kind, Task
from rrfp.errors import ConfigError
from rrfp.graphs.declared import Graph as PartGraph
from rrfp.testing.walks import ChainWalk, GraphWalk, Kwargs, Walk


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """The results of one step.

    Attributes:
        losses: the loss of each microbatch, in order; empty without ``loss_fn``.
        loss: the step's loss, or None without ``loss_fn``.
        outputs: the last module's output for each microbatch, detached.
    """

    losses: tuple[float, ...]
    loss: float | None
    outputs: tuple[Any, ...]


def reference(
    modules: Sequence[nn.Module] | Mapping[str, nn.Module | Sequence[nn.Module]],
    inputs: Sequence[Any] | Mapping[str, Sequence[Any]],
    targets: Sequence[Any] | None = None,
    *,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    kwargs: Kwargs | Mapping[str, Kwargs] | None = None,
    weights: Sequence[float] | None = None,
    reduction: str = "mean",
    seed: int | None = 0,
    step: int = 0,
    grad_scale: float = 1.0,
    graph: PartGraph | None = None,
    visits: Mapping[str, Sequence[bool]] | None = None,
) -> ReferenceResult:
    """Run one step and add its gradients to the ``.grad`` of the modules' parameters.

    Modules share a parameter by using the same object. A ``loss_fn`` that is a module counts as a part of the last one.

    Under ``torch.no_grad()``, or without ``loss_fn``, it is a forward-only step. The caller's autocast acts on
    forwards, and not on backwards, as in a pipeline. Random numbers agree with a pipeline's wherever they are drawn in
    ``forward`` or in ``loss_fn``.

    Args:
        modules: one for each virtual stage, each reading the output of the one before (the chain); with ``graph``, the
            modules of each part, by name.
        inputs: arguments of the first module, a list by microbatch: a tensor or named tuple, a tuple (positional) or a
            dict (keywords); with ``graph``, such a list for each part that has any.
        targets: second argument of ``loss_fn``, a list by microbatch.
        loss_fn: ``loss_fn(output, target)``, a scalar tensor.
        kwargs: further keyword arguments for every module, a list by microbatch; with ``graph``, also one by part.
        weights: as in :func:`gradient_weights`. A microbatch of weight 0 is not differentiated.
        reduction: as in :func:`gradient_weights`.
        seed: seed of the random forks; None draws from torch's generators as they are.
        step: the number of the training step, a pipeline's ``first_step`` (0) for its first. For an evaluation, that of
            the training step after it.
        grad_scale: as in :func:`gradient_weights`.
        graph: of the model's parts.
        visits: with ``graph``, which microbatches visit each optional part; by default all do.

    Returns:
        Losses and outputs; the gradients are in the parameters.

    Raises:
        ConfigError: if lists differ in length, ``targets`` are missing, or the weights are not valid.
    """
    walk = _walk(modules, inputs, kwargs, graph, visits)
    factors = gradient_weights(weights, walk.microbatches, reduction, grad_scale)
    _check_lengths(walk.microbatches, targets, kwargs, needs_targets=loss_fn is not None)
    last, plain = walk.last, dict(enumerate(walk.modules))
    units = [*{**plain, **with_loss({last: plain[last]}, Graph.chain(last + 1), loss_fn)}.values()]
    forks = RandomForks(seed, frozenset().union(*map(devices_of, units)))
    copies = _Copies(units)
    losses: list[float] = []
    outputs: list[Any] = []

    def forward(m: int, v: int, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, Tensor | None]:
        output = _call(walk.modules[v], copies.of(v, walk.modules[v]), args, named)
        if loss_fn is None or targets is None or v != last:
            return output, None
        return output, _loss(loss_fn, copies, last, (output, targets[m]))

    for m in range(walk.microbatches):
        own_loss: list[Tensor] = []

        def call(v: int, args: tuple[Any, ...], named: Mapping[str, Any], m: int = m, own: Any = own_loss) -> Any:
            output, loss = forks.run(step, Task(Kind.F, m, v), forward, m, v, args, named)
            own += [] if loss is None else [loss]
            return output if v == last else _across_boundary(output)

        with torch.set_grad_enabled(torch.is_grad_enabled() and loss_fn is not None):
            outputs.append(_detached(walk.output(m, call)))
        for loss in own_loss:
            losses.append(loss.item())
            forks.run(step, Task(Kind.B, m, last), _differentiate, loss, factors[m])
    copies.add_up()
    return ReferenceResult(
        tuple(losses), combine_losses(losses, weights, reduction) if losses else None, tuple(outputs)
    )


def _walk(modules: Any, inputs: Any, kwargs: Any, graph: PartGraph | None, visits: Any) -> Walk:
    if graph is not None:
        return GraphWalk(graph, modules, inputs, kwargs, visits)
    if visits is not None:
        raise ConfigError("visits is given, must be None without graph")
    return ChainWalk(modules, inputs, kwargs)


def _check_lengths(
    count: int, targets: Sequence[Any] | None, kwargs: Kwargs | Mapping[str, Kwargs] | None, *, needs_targets: bool
) -> None:
    lists: dict[str, Sequence[Any] | None] = {"targets": targets}
    if isinstance(kwargs, Mapping):
        lists |= {f"kwargs[{name!r}]": own for name, own in kwargs.items()}
    else:
        lists["kwargs"] = kwargs
    for field, values in lists.items():
        if values is not None and len(values) != count:
            raise ConfigError(f"{field} has {len(values)} entries, must have {count}, one for each microbatch")
    if needs_targets and targets is None:
        raise ConfigError("targets is missing: loss_fn needs one for each microbatch")


def _call(module: nn.Module, parameters: dict[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call ``module`` with ``parameters`` instead of its own."""
    if parameters:
        return functional_call(module, parameters, args, dict(kwargs))
    return module(*args, **kwargs)


def _loss(loss_fn: Callable[[Any, Any], Tensor], copies: _Copies, last: int, args: tuple[Any, Any]) -> Tensor:
    if isinstance(loss_fn, nn.Module) and (parameters := copies.of(last, loss_fn)):
        loss: Tensor = functional_call(loss_fn, parameters, args)
        return loss
    return loss_fn(*args)


class _Copies:
    """Copies of shared parameters: the same memory, and a separate gradient for each module but the first."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        first: dict[int, int] = {}
        #: For each module the copies of its parameters.
        self._of: list[dict[nn.Parameter, nn.Parameter]] = []
        #: Each shared parameter with its copies, in the order of modules.
        self._all: list[tuple[nn.Parameter, nn.Parameter]] = []
        for v, module in enumerate(modules):
            copies: dict[nn.Parameter, nn.Parameter] = {}
            for parameter in module.parameters():
                if first.setdefault(id(parameter), v) != v:
                    copies[parameter] = copy = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
                    self._all.append((parameter, copy))
            self._of.append(copies)

    def of(self, index: int, part: nn.Module) -> dict[str, Tensor]:
        """The copies that replace parameters of ``part``, which belongs to module ``index``, by name."""
        copies = self._of[index]
        return {name: copies[parameter] for name, parameter in part.named_parameters() if parameter in copies}

    def add_up(self) -> None:
        """Add the copies' gradients to those of the parameters."""
        for parameter, copy in self._all:
            if copy.grad is not None:
                parameter.grad = copy.grad if parameter.grad is None else parameter.grad.add_(copy.grad)


def _differentiate(loss: Tensor, factor: float) -> None:
    if not (factor and torch.is_grad_enabled() and loss.requires_grad):
        return
    with ExitStack() as stack:
        for device_type in autocast_device_types():
            stack.enter_context(torch.autocast(device_type, enabled=False))
        (loss * factor).backward()  # type: ignore[no-untyped-call]


class _Boundary(torch.autograd.Function):
    """Between two virtual stages: row-major memory, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same values in new memory."""
        return canonical(x.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """The gradient."""
        return canonical(gradients[0])


def _across_boundary(value: Any) -> Any:
    cross: Callable[[Tensor], Tensor] = _Boundary.apply
    return _each(lambda tensor: cross(tensor) if tensor.requires_grad else canonical(tensor), value)


def _detached(value: Any) -> Any:
    return _each(Tensor.detach, value)


def _each(function: Callable[[Tensor], Any], value: Any) -> Any:
    """``value`` with ``function`` applied to every tensor in it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _each(function, item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_each(function, item) for item in value]
        if is_named(value):
            return with_items(value, items)
        return tuple(items) if isinstance(value, tuple) else items
    return value
