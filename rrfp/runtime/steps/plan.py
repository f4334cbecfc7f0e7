"""A call of `step`: the request that its arguments make, and the plan that the ranks run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from torch import Tensor

from rrfp.compute.loss import Reduction, SharedGradientWeights, gradient_weights
from rrfp.compute.payload import is_named
from rrfp.compute.program import Batch
from rrfp.core.events import Pool
from rrfp.errors import ConfigError, misspelt
from rrfp.model.model_graph import ModelGraph, visit_lists
from rrfp.model.tasks import Mode, StepId
from rrfp.model.visits import Visits
from rrfp.plain import flag, number, or_none, whole
from rrfp.runtime.steps.deal import Deal, Home
from rrfp.runtime.steps.whole_batch import WholeBatches, is_batch


def _named_inputs(inputs: Any, graph: ModelGraph | None) -> dict[str, Any]:
    """The lists in ``inputs``, by the names that errors call them; a ConfigError where parts do not fit."""
    if graph is None or inputs is None:
        return {"inputs": inputs}
    if not isinstance(inputs, Mapping):
        raise ConfigError(
            f"inputs is of type {type(inputs).__name__}, must be a dict with a list for each part that has any, of: "
            f"{', '.join(graph.parts)}"
        )
    return _named_by_part("inputs", inputs, graph)


def _named_targets(targets: Any, graph: ModelGraph | None) -> dict[str, Any]:
    """The lists in ``targets``, by the names that errors call them; a ConfigError where parts do not fit."""
    if graph is None or targets is None or not graph.feeds.losses:
        return {"targets": targets}
    if not isinstance(targets, Mapping):
        raise ConfigError(
            f"targets is of type {type(targets).__name__}, must be a dict with a list for each part with a loss, of: "
            f"{', '.join(graph.sinks)}"
        )
    for name in targets:
        if name not in graph.sinks:
            raise ConfigError(f"targets names {name!r}, must name parts with a loss: {', '.join(graph.sinks)}")
    return {f"targets[{name!r}]": each for name, each in targets.items()}


def _named_visits(visits: Any, graph: ModelGraph | None) -> dict[str, Any]:
    """The lists in ``visits``, which `ModelGraph.visits_of` checks; a ConfigError for a model without parts."""
    if visits is None:
        return {}
    if graph is None:
        raise ConfigError("visits is given, must be None: the pipeline has no graph, so there are no parts to skip")
    return {f"visits[{name!r}]": each for name, each in visit_lists(visits).items()}


def _with_unvisited(values: Any, visits: Visits, graph: ModelGraph) -> Any:
    """``values``, with a list of placeholders for each part that no microbatch visits, if they are lists by part.

    So a step without any image needs no ``inputs["vision"]``.
    """
    if not visits.are_partial or not isinstance(values, Mapping):
        return values
    unvisited = frozenset.intersection(*visits.skipped)
    empty = (None,) * visits.microbatches
    return {name: empty for name, own in graph.numbers.items() if own.start in unvisited} | {**values}


def _named_by_part(field: str, values: Mapping[Any, Any], graph: ModelGraph) -> dict[str, Any]:
    """``values`` by part, each with the name that errors call it; a ConfigError names a part that does not exist."""
    for name in values:
        if name not in graph.parts:
            raise ConfigError(f"{field} names the part {name!r}, must be one of: {', '.join(graph.parts)}")
    return {f"{field}[{name!r}]": each for name, each in values.items()}


#: Keyword arguments by microbatch: for all modules of this process, or a list for each stage, or part, that has any. A
#: dict of keywords in place of a list is a whole batch to be cut.
Kwargs = Sequence[Mapping[str, Any]] | Mapping[int, Any] | Mapping[str, Any]

#: Inputs by microbatch, or a whole batch to be cut; by part where the model has parts.
Inputs = Sequence[Any] | Tensor | Mapping[str, Any]

#: Targets by microbatch, or a whole batch to be cut; by part where several parts have losses.
Targets = Sequence[Any] | Tensor | Mapping[str, Any]

#: A rank without data would run out of memory before another one sees that its batch has fewer rows.
MOST = 1_000_000

#: The arguments that may be whole batches, and the line that says how.
_CAN_BE_CUT = ("inputs", "targets", "kwargs")
_CUT = "pass microbatches=8 too, for 8, to cut a whole batch along dimension 0"

#: For each optional part that some microbatch skips: which microbatches visit it.
VisitArgument = Mapping[str, Sequence[bool]]


class CommonArguments(TypedDict, total=False):
    """The keyword arguments of any step."""

    kwargs: Kwargs | None
    """Further keyword arguments: a list for every module of this process, or a dict with a list for each stage that has
    any, ``{stage: [{...}, ...]}``, of which every rank takes its own stage's, or with a graph one for each part."""

    weights: Sequence[float] | None
    """Of the microbatches' losses, such as token counts, 1 by default; needed on the last virtual stage. A microbatch
    of weight 0 is in neither loss nor gradients."""

    sizes: Sequence[float] | None
    """The size of each microbatch, in any unit, for hints that read it."""

    microbatches: int | None
    """M, where no list is passed or a whole batch is to be cut."""

    visits: VisitArgument | None
    """For each optional part of the graph that some microbatch skips, M booleans; the same on all ranks of a
    replica."""


class EvaluateArguments(CommonArguments, total=False):
    """The keyword arguments of an evaluation."""

    return_outputs: bool | None
    """Whether the result's ``outputs`` hold the outputs of the last virtual stage, detached, on its rank: True, False,
    or None for True where no loss is computed. Where several parts have losses, each output is a dict by part."""


class StepArguments(CommonArguments, total=False):
    """The keyword arguments of a training step."""

    grad_scale: float
    """A factor on every gradient, 1.0 by default; the reported loss is without it."""

    reduce_gradients: bool
    """False leaves gradients unreduced over data-parallel replicas, for all but the last of several steps that
    accumulate."""


_KNOWN = {
    Mode.TRAIN: frozenset(StepArguments.__annotations__),
    Mode.FORWARD: frozenset(EvaluateArguments.__annotations__),
}


@dataclass(frozen=True, slots=True)
class StepRequest:
    """The arguments of one call, as the caller passed them; `rrfp.Pipeline.step` explains them."""

    mode: Mode
    inputs: Inputs | None = None
    targets: Targets | None = None
    kwargs: Kwargs | None = None
    weights: Sequence[float] | None = None
    sizes: Sequence[float] | None = None
    microbatches: int | None = None
    visits: VisitArgument | None = None
    grad_scale: float = 1.0
    reduce_gradients: bool = True
    return_outputs: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "microbatches", or_none(whole, "microbatches", self.microbatches, 1, MOST))
        flag("reduce_gradients", self.reduce_gradients)
        or_none(flag, "return_outputs", self.return_outputs)

    @classmethod
    def of(
        cls,
        mode: Mode,
        inputs: Inputs | None,
        targets: Targets | None,
        arguments: StepArguments | EvaluateArguments,
    ) -> StepRequest:
        """The request of a call with these ``arguments``; a ConfigError names one that there is not."""
        for name in arguments:
            if name not in (known := _KNOWN[mode]):
                allowed = ", ".join(["inputs", "targets", *sorted(known)])
                wrong = misspelt(name, ["inputs", "targets", *known])
                raise ConfigError(f"unknown argument {wrong}, must be one of: {allowed}")
        return cls(mode, inputs, targets, **arguments)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, ready to run."""

    step: StepId
    #: The caller's data, and the number of the training step; see `batch_of`.
    batch: Batch
    #: Of the microbatches' losses, None for all 1.
    weights: tuple[float, ...] | None
    #: How large each microbatch is, for hints; None where the caller passes none.
    sizes: tuple[float, ...] | None
    visits: Visits
    reduction: Reduction
    #: The factor of a GradScaler, the same on all ranks; None without one.
    loss_scale: float | None
    #: Whether gradients are summed over replicas at the end.
    reduce_gradients: bool
    #: By stage, where the caller passes them so.
    kwargs: Mapping[int, Sequence[Mapping[str, Any]]] | None
    #: Calls before this one whose arguments were refused.
    refused: int
    #: Which microbatches replicas run, where they have exchanged some.
    deal: Deal | None = None
    #: Where replicas claim forwards: how; and whose caller has each microbatch, which are those of all replicas then.
    pool: Pool | None = None
    homes: tuple[Home, ...] = ()

    def batch_of(self, stage: int) -> Batch:
        """The caller's data for one stage of this process."""
        return self.batch if self.kwargs is None else replace(self.batch, kwargs=self.kwargs.get(stage))

    def given(self, replica: int) -> int:
        """How many microbatches the caller of ``replica``, this rank's, has."""
        if self.homes:
            return sum(home.replica == replica for home in self.homes)
        return self.step.microbatches if self.deal is None else self.deal.given(replica)

    def homes_of(self, replica: int) -> Sequence[Home]:
        """Whose caller has each microbatch of ``replica``, this rank's; empty where replicas do not share the step."""
        return self.homes if self.deal is None else self.deal.homes[replica]

    @property
    def name(self) -> str:
        """The user-visible step number: training steps, from ``first_step`` on."""
        number = self.batch.training_step
        return f"training step {number}" if self.step.mode is Mode.TRAIN else f"an evaluation before step {number}"

    @property
    def total_weight(self) -> float:
        """The sum of the weights of this replica's microbatches."""
        return float(self.step.microbatches if self.weights is None else sum(self.weights))


@dataclass(frozen=True, slots=True)
class StepPlanner:
    """Makes plans for the steps of one pipeline."""

    reduction: Reduction = "mean"
    #: N; ``kwargs`` may be given by stage.
    stages: int = 1
    #: Of the model's parts, if it has any; ``inputs``, ``kwargs`` and ``visits`` are then given by part.
    model: ModelGraph | None = None
    #: Whether several replicas share a step, so that the sum of the weights is known only later.
    is_shared: bool = False

    def plan(
        self,
        request: StepRequest,
        number: int = 0,
        training_step: int = 0,
        refused: int = 0,
        loss_scale: float | None = None,
    ) -> StepPlan:
        """Check ``request`` against the pipeline; a ConfigError says what does not fit. See `StepPlan`."""
        request = self._cut(request)
        count = self._microbatches(request)
        inputs, targets, visits = request.inputs, request.targets, Visits(count)
        if self.model is not None:
            visits = self.model.visits_of(request.visits, count)
            inputs = _with_unvisited({} if inputs is None else inputs, visits, self.model)
            targets = _with_unvisited(targets, visits, self.model)
        kwargs: Any = request.kwargs
        is_by_stage = isinstance(kwargs, Mapping) and not any(type(key) is str for key in kwargs)
        lists: tuple[Any, Any, Any] = inputs, targets, None if is_by_stage else kwargs  # nothing is whole any more
        return StepPlan(
            StepId(number, request.mode, count),
            Batch(*lists, self._factors(request, count, loss_scale), request.return_outputs, training_step),
            None if request.weights is None else tuple(request.weights),
            _sizes(request.sizes),
            visits,
            self.reduction,
            loss_scale,
            request.reduce_gradients,
            kwargs if is_by_stage else None,
            refused,
        )

    def _cut(self, request: StepRequest) -> StepRequest:
        """``request`` with lists by microbatch in place of whole batches."""
        fields = {"inputs": request.inputs, "targets": request.targets, "kwargs": request.kwargs}
        if request.microbatches is None or all(values is None for values in fields.values()):
            return request
        kwargs = request.kwargs
        is_uncut = self.model is None and isinstance(kwargs, Mapping) and any(type(key) is str for key in kwargs)
        named = _named_inputs(request.inputs, self.model) | _named_targets(request.targets, self.model)
        named |= {"kwargs": kwargs} if is_uncut else _named_kwargs(kwargs, self.stages, self.model)
        batches = WholeBatches(named, request.microbatches, trains=request.mode is Mode.TRAIN)
        cut = {field: batches.replaced(field, values) for field, values in fields.items()}
        is_mean = request.weights is None and self.reduction == "mean"
        return replace(request, **cut, weights=batches.weights() if is_mean else request.weights)

    def _microbatches(self, request: StepRequest) -> int:
        """M, on which all lists of ``request`` agree."""
        kwargs = _named_kwargs(request.kwargs, self.stages, self.model)
        lists = _named_inputs(request.inputs, self.model) | _named_targets(request.targets, self.model) | kwargs
        lists |= {"weights": request.weights, "sizes": request.sizes, **_named_visits(request.visits, self.model)}
        count = _microbatches(lists, request.microbatches)
        for name, dicts in kwargs.items():
            for m, each in enumerate(dicts or ()):
                if not isinstance(each, Mapping):  # it would become a positional argument
                    raise ConfigError(f"{name}[{m}] is of type {type(each).__name__}, must be a dict")
        return count

    def _factors(self, request: StepRequest, count: int, loss_scale: float | None) -> Sequence[float]:
        """The factor on each microbatch's loss in backward."""
        reduction: Reduction = "sum" if self.is_shared else self.reduction
        factors = gradient_weights(request.weights, count, reduction, request.grad_scale)
        scale = 1.0 if loss_scale is None else loss_scale
        if self.is_shared:
            return SharedGradientWeights(request.weights, count, self.reduction, request.grad_scale * scale)
        return factors if loss_scale is None else tuple(factor * scale for factor in factors)


def _named_kwargs(kwargs: Any, stages: int, graph: ModelGraph | None) -> dict[str, Any]:
    """The lists in ``kwargs``, by the names that errors call them."""
    if not isinstance(kwargs, Mapping):
        return {"kwargs": kwargs}
    if graph is not None and any(type(key) is str for key in kwargs):
        return _named_by_part("kwargs", kwargs, graph)
    for stage in kwargs:
        if type(stage) is not int or not 0 <= stage < stages:
            known = ", ".join(map(str, range(stages)))
            raise ConfigError(
                f"kwargs names the stage {stage!r}, must be one of: {known}; for all stages write a list with one "
                f"dict a microbatch{f', or {_CUT}' if type(stage) is str else ''}"
            )
    return {f"kwargs[{stage}]": dicts for stage, dicts in kwargs.items()}


def _sizes(sizes: Sequence[Any] | None) -> tuple[float, ...] | None:
    return None if sizes is None else tuple(number(f"sizes[{m}]", size, 0) for m, size in enumerate(sizes))


def _microbatches(lists: Mapping[str, Any], microbatches: Any) -> int:
    lengths: dict[str, int] = {} if microbatches is None else {"microbatches": microbatches}
    for name, values in lists.items():
        if values is None:
            continue
        if not isinstance(values, Sequence) or isinstance(values, str | bytes) or is_named(values):
            is_numbers = name in ("weights", "sizes") and isinstance(values, Tensor)
            cut = f"; {_CUT}" if is_batch(values) and name.startswith(_CAN_BE_CUT) else ""
            if microbatches is not None and name.startswith(_CAN_BE_CUT):
                cut = ", or what can be cut: a tensor, or a dict or tuple of tensors"
            line = f": write {name}.tolist()" if is_numbers else cut
            raise ConfigError(
                f"{name} is of type {type(values).__name__}, must be a list with one entry a microbatch{line}"
            )
        lengths[name] = len(values)
    if not lengths:
        raise ConfigError("microbatches is needed on a rank that is given no inputs, targets, kwargs or weights")
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        tuples = [name for name, values in lists.items() if type(values) is tuple and name.startswith(_CAN_BE_CUT)]
        hint = f"; if {' and '.join(tuples)} is a whole batch, {_CUT}" if tuples else ""
        raise ConfigError(f"the number of microbatches differs between arguments ({counts}){hint}")
    name, count = next(iter(lengths.items()))
    if count < 1:
        raise ConfigError(f"{name} is empty, must hold at least 1 microbatch")
    return count
