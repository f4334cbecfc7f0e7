"""The one-process reference: the result that a pipeline must compute, in the plainest way.

It chains the modules of all virtual stages in one process and differentiates them by ordinary autograd, microbatches in
order. It shares with the pipeline the random forks, the arithmetic of weights and the memory format between virtual
stages, and nothing else.

Of a parameter that several modules share, every module has a copy: each copy's gradient is formed in microbatch order,
then the copies are added in the order of the modules. A pipeline does the same with copies on several stages. Autograd
itself would add both modules' shares microbatch by microbatch, which differs in the last bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rrfp.compute.caller_context import autocast_device_types
from rrfp.compute.loss import LossFunction, combine_losses, gradient_weights, with_loss
from rrfp.compute.payload import canonical, is_named, with_items
from rrfp.compute.rng import RandomForks, devices_of
from rrfp.errors import ConfigError
from rrfp.model.declared import Graph, Part, PartKey, part_of
from rrfp.model.declared import Graph as PartGraph
from rrfp.model.model_graph import ModelGraph
from rrfp.model.tasks import Kind, Task

#: Calls the module of a virtual stage with arguments and keyword arguments; returns its output.
Call = Callable[[int, tuple[Any, ...], Mapping[str, Any]], Any]

#: Keyword arguments by microbatch.
Kwargs = Sequence[Mapping[str, Any]]


class Walk(ABC):
    """The way of microbatches through the modules."""

    modules: Sequence[nn.Module]
    microbatches: int
    #: The virtual stages whose outputs go into losses, each with its part; "" where there is one loss.
    ends: Mapping[int, str]

    @abstractmethod
    def output(self, microbatch: int, call: Call) -> Any:
        """The output of the last module that ``microbatch`` visits; by part, with several losses."""


class ChainWalk(Walk):
    """Each module reads the output of the one before."""

    def __init__(self, modules: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Kwargs | None) -> None:
        self.modules, self.microbatches, self.ends = modules, len(inputs), {len(modules) - 1: ""}
        self._inputs = inputs
        self._kwargs = kwargs

    def output(self, microbatch: int, call: Call) -> Any:
        value = self._inputs[microbatch]
        further = {} if self._kwargs is None else self._kwargs[microbatch]
        for v in range(len(self.modules)):
            args, kwargs = spread(value)
            value = call(v, args, {**kwargs, **further})
        return value


class GraphWalk(Walk):
    """Parts in the order of their declaration, each with what it reads.

    Raises ConfigError if modules, inputs or visits do not fit the graph.
    """

    def __init__(
        self,
        graph: Graph,
        modules: Mapping[str, nn.Module | Sequence[nn.Module]],
        inputs: Mapping[str, Sequence[Any]],
        kwargs: Kwargs | Mapping[str, Kwargs] | None,
        visits: Mapping[str, Sequence[bool]] | None,
    ) -> None:
        by_part = {name: [own] if isinstance(own, nn.Module) else list(own) for name, own in modules.items()}
        counts = {name: len(own) for name, own in by_part.items()}
        wanted = {name: len(part.stages) for name, part in graph.parts.items()}
        if counts != wanted:
            raise ConfigError(f"modules has {counts} modules by part, must have {wanted}")
        lengths = {len(values) for values in inputs.values()}
        if len(lengths) != 1:
            raise ConfigError("inputs must have a list for each part that has any, all with one entry a microbatch")
        self.microbatches = lengths.pop()
        model = ModelGraph.of(graph)
        model.visits_of(visits, self.microbatches)
        self.modules = [module for name in graph.parts for module in by_part[name]]
        self._graph, self._inputs, self._kwargs = graph, inputs, kwargs
        self._visits = {} if visits is None else visits
        several = len(model.sinks) > 1
        self.ends = {model.numbers[name][-1]: name if several else "" for name in model.sinks}

    def output(self, microbatch: int, call: Call) -> Any:
        outputs: dict[Part, Any] = {}
        values: dict[int, Any] = {}
        v = 0
        for part in self._graph.parts.values():
            further = self._further(part, microbatch)
            for index in range(len(part.stages)):
                if self._is_visited(part, microbatch):
                    reads = {**({} if index else part.reads), **part.reads_all}
                    args, kwargs = self._own(part, microbatch) if index == 0 else spread(outputs[part])
                    named = {name: _value(read, outputs) for name, read in reads.items()}
                    outputs[part] = values[v] = call(v, args, {**kwargs, **further, **named})
                v += 1
        if "" in self.ends.values():
            return values[next(iter(self.ends))]
        return {part: values[end] for end, part in self.ends.items() if end in values}

    def _is_visited(self, part: Part, microbatch: int) -> bool:
        return part.name not in self._visits or bool(self._visits[part.name][microbatch])

    def _own(self, part: Part, microbatch: int) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        return spread(self._inputs[part.name][microbatch]) if part.name in self._inputs else ((), {})

    def _further(self, part: Part, microbatch: int) -> Mapping[str, Any]:
        kwargs = self._kwargs.get(part.name) if isinstance(self._kwargs, Mapping) else self._kwargs
        return {} if kwargs is None else kwargs[microbatch]


def spread(value: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments that an output, or an input of the caller, becomes."""
    if isinstance(value, Mapping):
        return (), value
    return value if isinstance(value, tuple) and not is_named(value) else (value,), {}


def _value(read: Part | PartKey, outputs: Mapping[Part, Any]) -> Any:
    output = outputs.get(part_of(read))
    return output if output is None or isinstance(read, Part) else output[read.key]


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """The results of one step.

    Attributes:
        losses: the loss of each microbatch, in order; empty without ``loss_fn``.
        loss: the step's loss, or None without ``loss_fn``.
        outputs: the last module's output for each microbatch, detached; by part, where there are several losses.
        part_losses: the step's loss by part, where there are several.
    """

    losses: tuple[float, ...]
    loss: float | None
    outputs: tuple[Any, ...]
    part_losses: Mapping[str, float] = field(default_factory=dict)


def reference(
    modules: Sequence[nn.Module] | Mapping[str, nn.Module | Sequence[nn.Module]],
    inputs: Sequence[Any] | Mapping[str, Sequence[Any]],
    targets: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None,
    *,
    loss_fn: LossFunction | Mapping[str, LossFunction] | None = None,
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
        targets: second argument of ``loss_fn``, a list by microbatch; with several losses, one by part.
        loss_fn: ``loss_fn(output, target)``, a scalar tensor; with several losses, one for each part that no other
            reads.
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
    answers = _by_end("targets", targets, walk)
    losses = _by_end("loss_fn", loss_fn, walk)
    _check_lengths(walk, answers, kwargs, needs_targets=loss_fn is not None)
    units = [*with_loss(dict(enumerate(walk.modules)), losses).values()]
    forks = RandomForks(seed, frozenset().union(*map(devices_of, units)))
    copies = _Copies(units)
    values: dict[int, list[float]] = {v: [] for v in losses}
    outputs: list[Any] = []

    def forward(m: int, v: int, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, Tensor | None]:
        output = _call(walk.modules[v], copies.of(v, walk.modules[v]), args, named)
        return output, _loss(losses[v], copies, v, (output, answers[v][m])) if v in losses else None

    for m in range(walk.microbatches):
        own: dict[int, Tensor] = {}

        def call(v: int, args: tuple[Any, ...], named: Mapping[str, Any], m: int = m, own: Any = own) -> Any:
            output, loss = forks.run(step, Task(Kind.F, m, v), forward, m, v, args, named)
            if loss is not None:
                own[v] = loss
            return output if v in walk.ends else _across_boundary(output)

        with torch.set_grad_enabled(torch.is_grad_enabled() and loss_fn is not None):
            outputs.append(_detached(walk.output(m, call)))
        for v, each in values.items():
            each.append(own[v].item() if v in own else 0.0)
        if own:
            forks.run(step, Task(Kind.B, m, max(own)), _differentiate, own.values(), factors[m])
    copies.add_up()
    return _result(walk, values, outputs, weights, reduction)


def _result(
    walk: Walk, values: Mapping[int, list[float]], outputs: list[Any], weights: Sequence[float] | None, reduction: str
) -> ReferenceResult:
    by_part = {walk.ends[v]: combine_losses(each, weights, reduction) for v, each in sorted(values.items())}
    by_microbatch = zip(*(values[v] for v in sorted(values)), strict=True)
    loss = _sum(by_part.values()) if by_part else None
    part_losses = by_part if len(walk.ends) > 1 else {}
    return ReferenceResult(tuple(map(_sum, by_microbatch)), loss, tuple(outputs), part_losses)


def _by_end(field: str, by_part: Any, walk: Walk) -> dict[int, Any]:
    """What each virtual stage with a loss has; refuses other parts."""
    if by_part is None:
        return {}
    if len(walk.ends) == 1:
        return dict.fromkeys(walk.ends, by_part)
    if not isinstance(by_part, Mapping) or by_part.keys() != set(walk.ends.values()):
        raise ConfigError(f"{field} must be a dict with the parts {', '.join(walk.ends.values())}")
    return {v: by_part[part] for v, part in walk.ends.items()}


def _sum(values: Iterable[float]) -> float:
    """One value as it is, to the last bit."""
    first, *further = values
    return sum(further, first)


def _walk(modules: Any, inputs: Any, kwargs: Any, graph: PartGraph | None, visits: Any) -> Walk:
    if graph is not None:
        return GraphWalk(graph, modules, inputs, kwargs, visits)
    if visits is not None:
        raise ConfigError("visits is given, must be None without graph")
    return ChainWalk(modules, inputs, kwargs)


def _check_lengths(
    walk: Walk, targets: Mapping[int, Any], kwargs: Kwargs | Mapping[str, Kwargs] | None, *, needs_targets: bool
) -> None:
    count = walk.microbatches
    lists: dict[str, Sequence[Any] | None] = {
        f"targets[{part!r}]" if part else "targets": targets.get(v) for v, part in walk.ends.items()
    }
    if isinstance(kwargs, Mapping):
        lists |= {f"kwargs[{name!r}]": own for name, own in kwargs.items()}
    else:
        lists["kwargs"] = kwargs
    for name, values in lists.items():
        if values is not None and len(values) != count:
            raise ConfigError(f"{name} has {len(values)} entries, must have {count}, one for each microbatch")
    if needs_targets and not targets:
        raise ConfigError("targets is missing: loss_fn needs one for each microbatch")


def _call(module: nn.Module, parameters: dict[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if parameters:
        return functional_call(module, parameters, args, dict(kwargs))
    return module(*args, **kwargs)


def _loss(loss_fn: LossFunction, copies: _Copies, end: int, args: tuple[Any, Any]) -> Tensor:
    if isinstance(loss_fn, nn.Module) and (parameters := copies.of(end, loss_fn)):
        loss: Tensor = functional_call(loss_fn, parameters, args)
        return loss
    return loss_fn(*args)


class _Copies:
    """Copies of shared parameters: the same memory, separate gradients."""

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
        """The copies that replace parameters of module ``index``, by name."""
        copies = self._of[index]
        return {name: copies[parameter] for name, parameter in part.named_parameters() if parameter in copies}

    def add_up(self) -> None:
        for parameter, copy in self._all:
            if copy.grad is not None:
                parameter.grad = copy.grad if parameter.grad is None else parameter.grad.add_(copy.grad)


def _differentiate(losses: Collection[Tensor], factor: float) -> None:
    roots = [loss * factor for loss in losses if loss.requires_grad]
    if not (factor and torch.is_grad_enabled() and roots):
        return
    with ExitStack() as stack:
        for device_type in autocast_device_types():
            stack.enter_context(torch.autocast(device_type, enabled=False))
        torch.autograd.backward(roots)


class _Boundary(torch.autograd.Function):
    """Between two virtual stages: row-major memory, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same values in new memory."""
        return canonical(x.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
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
