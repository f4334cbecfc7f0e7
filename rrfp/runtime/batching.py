"""The arguments of `step`, checked and made into one plan for the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from torch import Tensor

from rrfp.compute.named_tuples import is_named
from rrfp.compute.program import Batch
from rrfp.compute.weighting import Reduction, gradient_weights, shared_gradient_weights
from rrfp.core.tasks import Mode, StepId
from rrfp.core.visits import Skipped
from rrfp.errors import ConfigError
from rrfp.graphs.model_graph import ModelGraph
from rrfp.runtime.part_arguments import named_by_part, named_inputs, named_targets, named_visits, with_unvisited

#: Keyword arguments by microbatch: for all modules of this process, or a list for each stage, or part, that has any.
Kwargs = (
    Sequence[Mapping[str, Any]] | Mapping[int, Sequence[Mapping[str, Any]]] | Mapping[str, Sequence[Mapping[str, Any]]]
)

#: Inputs by microbatch; by part where the model has parts.
Inputs = Sequence[Any] | Mapping[str, Sequence[Any]]

#: Targets by microbatch; by part where several parts have losses.
Targets = Sequence[Any] | Mapping[str, Sequence[Any]]

#: For each optional part that some microbatch skips: which microbatches visit it.
VisitArgument = Mapping[str, Sequence[bool]]


class CommonArguments(TypedDict, total=False):
    """The keyword arguments of any step; `rrfp.Pipeline.step` says what they mean."""

    kwargs: Kwargs | None
    weights: Sequence[float] | None
    sizes: Sequence[float] | None
    microbatches: int | None
    visits: VisitArgument | None


class EvaluateArguments(CommonArguments, total=False):
    """The keyword arguments of an evaluation."""

    return_outputs: bool | None


class StepArguments(CommonArguments, total=False):
    """The keyword arguments of a training step."""

    grad_scale: float
    reduce_gradients: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, ready to run.

    Attributes:
        step: its number, mode and M.
        batch: the caller's data, and the number of the training step; see `batch_of`.
        weights: of the microbatches' losses, None for all 1.
        sizes: how large each microbatch is, for hints; None where the caller passes none.
        reduction: how losses combine.
        grad_scale: a further factor on every gradient, with that of a GradScaler.
        loss_scale: the factor of a GradScaler, the same on all ranks; None without one.
        reduce_gradients: whether gradients are summed over replicas at the end.
        kwargs: by stage, where the caller passes them so.
        refused: calls before this one whose arguments were refused.
        skipped: by microbatch the virtual stages that it skips; empty: none does.
    """

    step: StepId
    batch: Batch
    weights: tuple[float, ...] | None
    sizes: tuple[float, ...] | None
    reduction: Reduction
    grad_scale: float
    loss_scale: float | None
    reduce_gradients: bool
    kwargs: Mapping[int, Sequence[Mapping[str, Any]]] | None
    refused: int
    skipped: tuple[Skipped, ...] = ()

    def batch_of(self, stage: int) -> Batch:
        """The caller's data for one stage of this process."""
        return self.batch if self.kwargs is None else replace(self.batch, kwargs=self.kwargs.get(stage))

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
        """Set the gradient weights of the batch, now that the weights of all replicas sum to ``total``.

        A sum of 0 is a ConfigError where a mean is asked for.
        """
        own = (1.0,) * self.step.microbatches if self.weights is None else self.weights
        factors = self.batch.gradient_weights
        assert isinstance(factors, list), "the step was planned for one replica"
        factors[:] = shared_gradient_weights(own, total, self.reduction, self.grad_scale)


def plan_step(
    number: int,
    mode: Mode,
    reduction: Reduction,
    inputs: Inputs | None = None,
    targets: Targets | None = None,
    kwargs: Kwargs | None = None,
    weights: Sequence[float] | None = None,
    sizes: Sequence[float] | None = None,
    microbatches: int | None = None,
    grad_scale: float = 1.0,
    reduce_gradients: bool = True,
    return_outputs: bool | None = None,
    visits: VisitArgument | None = None,
    *,
    training_step: int = 0,
    stages: int = 1,
    graph: ModelGraph | None = None,
    is_shared: bool = False,
    refused: int = 0,
    loss_scale: float | None = None,
) -> Plan:
    """Check the arguments of a step; see `rrfp.Pipeline.step`.

    Args:
        number: of the step, evaluations counted.
        mode: training or forward only.
        reduction: how losses combine.
        training_step: see `rrfp.Batch`.
        stages: of the pipeline; ``kwargs`` may be given by stage.
        graph: of the model's parts, if it has any; ``inputs``, ``kwargs`` and ``visits`` are then given by part.
        is_shared: whether several replicas share the step, so that the weights' sum is known only later.
        refused: calls before this one whose arguments were refused.
        loss_scale: the factor of a GradScaler.

    Raises:
        ConfigError: if they are no lists, disagree on M, ``kwargs`` are no dicts or for a stage that does not exist, or
            a weight or size is impossible.
    """
    named_kwargs = _named_kwargs(kwargs, stages, graph)
    lists = named_inputs(inputs, graph) | named_targets(targets, graph) | named_kwargs
    lists |= {"weights": weights, "sizes": sizes, **named_visits(visits, graph)}
    count = _microbatches(lists, microbatches)
    for name, dicts in named_kwargs.items():
        for m, each in enumerate(dicts or ()):
            if not isinstance(each, Mapping):  # it would become a positional argument
                raise ConfigError(f"{name}[{m}] is of type {type(each).__name__}, must be a dict")
    if type(reduce_gradients) is not bool:
        raise ConfigError(f"reduce_gradients is {reduce_gradients!r}, must be True or False")
    if return_outputs is not None and type(return_outputs) is not bool:
        raise ConfigError(f"return_outputs is {return_outputs!r}, must be True, False or None")
    is_by_stage = isinstance(kwargs, Mapping) and not any(type(key) is str for key in kwargs)
    by_stage: Any = kwargs if is_by_stage else None
    shared_kwargs: Any = None if is_by_stage else kwargs
    gradient: Sequence[float] = gradient_weights(weights, count, "sum" if is_shared else reduction, grad_scale)
    if loss_scale is not None:
        grad_scale, gradient = grad_scale * loss_scale, tuple(factor * loss_scale for factor in gradient)
    factors = list(gradient) if is_shared else gradient
    skipped = () if graph is None else graph.skipped(visits, count)
    if graph is not None:
        inputs = with_unvisited({} if inputs is None else inputs, skipped, graph)
        targets = with_unvisited(targets, skipped, graph)
    batch = Batch(inputs, targets, shared_kwargs, factors, return_outputs, training_step)
    return Plan(
        StepId(number, mode, count),
        batch,
        None if weights is None else tuple(weights),
        _sizes(sizes),
        reduction,
        grad_scale,
        loss_scale,
        reduce_gradients,
        by_stage,
        refused,
        skipped,
    )


def _named_kwargs(kwargs: Any, stages: int, graph: ModelGraph | None) -> dict[str, Any]:
    """The lists in ``kwargs``, by the names that errors call them."""
    if not isinstance(kwargs, Mapping):
        return {"kwargs": kwargs}
    if graph is not None and any(type(key) is str for key in kwargs):
        return named_by_part("kwargs", kwargs, graph)
    for stage in kwargs:
        if type(stage) is not int or not 0 <= stage < stages:
            known = ", ".join(map(str, range(stages)))
            raise ConfigError(
                f"kwargs names the stage {stage!r}, must be one of: {known}; for all stages write a list with one "
                "dict a microbatch"
            )
    return {f"kwargs[{stage}]": dicts for stage, dicts in kwargs.items()}


def _sizes(sizes: Sequence[Any] | None) -> tuple[float, ...] | None:
    return None if sizes is None else tuple(_size(f"sizes[{m}]", size) for m, size in enumerate(sizes))


def _size(name: str, size: Any) -> float:
    try:
        number = float(size)  # token counts are often numbers of numpy, or tensors
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigError(f"{name} is {size!r}, must be a finite number >= 0")
    return number


def _microbatches(lists: Mapping[str, Any], microbatches: Any) -> int:
    """M, which all arguments must agree on."""
    if microbatches is not None and type(microbatches) is not int:
        raise ConfigError(f"microbatches is {microbatches!r}, must be a whole number")
    lengths: dict[str, int] = {} if microbatches is None else {"microbatches": microbatches}
    for name, values in lists.items():
        if values is None:
            continue
        if not isinstance(values, Sequence) or isinstance(values, str | bytes) or is_named(values):
            is_numbers = name in ("weights", "sizes") and isinstance(values, Tensor)
            line = f": write {name}.tolist()" if is_numbers else _cut(": write", name, values)
            raise ConfigError(
                f"{name} is of type {type(values).__name__}, must be a list with one entry a microbatch{line}"
            )
        lengths[name] = len(values)
    if not lengths:
        raise ConfigError("microbatches is needed on a rank that is given no inputs, targets, kwargs or weights")
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        tuples = (name for name, values in lists.items() if type(values) is tuple and _holds_tensors(values))
        hints = [_cut(f"; if {name} is one whole batch, write", name, lists[name]) for name in tuples]
        raise ConfigError(f"the number of microbatches differs between arguments ({counts}){''.join(hints)}")
    name, count = next(iter(lengths.items()))
    if count < 1:
        is_number = name == "microbatches"
        fault = f"is {count}, must be at least 1" if is_number else "is empty, must hold at least 1 microbatch"
        raise ConfigError(f"{name} {fault}")

    return count


def _cut(before: str, name: str, batch: Any) -> str:
    """The end of an error: the line that cuts a whole batch into microbatches, after ``before``; else nothing."""
    if isinstance(batch, Tensor):
        line = f"list({name}.chunk(8))"
    elif isinstance(batch, Mapping) and _holds_tensors(batch.values()):
        line = f"[dict(zip({name}, parts)) for parts in zip(*(x.chunk(8) for x in {name}.values()))]"
    elif is_named(batch) and _holds_tensors(batch):
        line = f"[{type(batch).__name__}(*parts) for parts in zip(*(x.chunk(8) for x in {name}))]"
    elif isinstance(batch, tuple):
        line = f"list(zip(*(x.chunk(8) for x in {name})))"
    else:
        return ""
    return f"{before} {line} for 8 microbatches"


def _holds_tensors(values: Iterable[Any]) -> bool:
    return all(isinstance(value, Tensor) for value in values)
