"""The arguments of modules and their checks: the batch, the loss, the virtual stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rrfp.compute.activations import tensors_in
from rrfp.compute.payload import is_named, with_items
from rrfp.compute.program import Batch
from rrfp.errors import ConfigError, StageError
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Mode, StepId


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a call ``module(*args, **kwargs)``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def spread(cls, values: Iterable[Any]) -> Arguments:
        """Tuples become positional arguments, dicts keywords, other values (named tuples too) one argument each."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for value in values:
            if isinstance(value, Tensor):
                args.append(value)
            elif isinstance(value, Mapping):
                if twice := sorted(kwargs.keys() & value.keys()):
                    raise StageError(f"the keyword argument {twice[0]!r} is given twice")
                kwargs.update(value)
            elif isinstance(value, tuple) and not is_named(value):
                args.extend(value)
            else:
                args.append(value)
        return cls(tuple(args), kwargs)


def check_batch(batch: Batch, step: StepId, *, sources: Collection[str | None], ends: Mapping[str, bool]) -> None:
    """Refuse a batch that lacks data for a rank's step."""
    # ``sources`` are the parts that read nothing but their inputs; None of a pipeline without parts. ``ends`` are those
    # that read targets, each with whether it has a loss_fn; "" of a model with one loss.
    training = step.mode is Mode.TRAIN
    _check_parts(batch, step, sources, ends)
    first, last = None in sources, bool(ends)
    for field, used, needed, where in (
        ("inputs", first, first, "of the first virtual stage"),
        ("targets", last, last and training, "that computes the loss"),
        ("kwargs", True, False, None),
        ("gradient_weights", last and training, True, "that computes the loss"),
    ):
        values = getattr(batch, field)
        if isinstance(values, Mapping):  # of lists by part, which were checked before
            continue
        if used and (needed if values is None else len(values) != step.microbatches):
            problem = "is missing" if values is None else f"has length {len(values)}"
            wanted = f"a list of {step.microbatches}"
            if values is None:
                wanted += f" on the rank {where}"
            misplaced = "; the labels are in the inputs" if field == "targets" and _with_labels(batch.inputs) else ""
            raise ConfigError(f"{field} {problem}, must be {wanted}, one for each microbatch{misplaced}")


def _check_parts(batch: Batch, step: StepId, sources: Collection[str | None], ends: Mapping[str, bool]) -> None:
    training, missing = step.mode is Mode.TRAIN, f"is missing, must be a list of {step.microbatches} on the rank of the"
    for end, has_loss in ends.items():
        if not has_loss and (training or batch.targets is not None):
            where = f"for part {end!r}" if end else "on the rank that computes the loss"
            reason = "a training step needs it" if training else "targets are given, but nothing to compare them with"
            raise ConfigError(f"loss_fn is missing {where}: {reason}")
        if end and training and (not isinstance(batch.targets, Mapping) or end not in batch.targets):
            raise ConfigError(f"targets[{end!r}] {missing} part's last module, one for each microbatch")
    for part in sources:
        if part is not None and (not isinstance(batch.inputs, Mapping) or part not in batch.inputs):
            raise ConfigError(f"inputs[{part!r}] {missing} part's first module, one for each microbatch")


def _with_labels(inputs: Sequence[Any] | Mapping[str, Sequence[Any]] | None) -> bool:
    """Whether the labels are among a model's keyword arguments, as transformers takes them."""
    listed = () if inputs is None or isinstance(inputs, Mapping) else inputs
    return any(isinstance(each, Mapping) and "labels" in each for each in listed)


def check_loss(loss: object, microbatch: int, *, differentiable: bool) -> Tensor:
    """Check and return what ``loss_fn`` returned; a StageError if it does not fit."""
    if not isinstance(loss, Tensor):
        raise StageError(f"loss_fn returned a {type(loss).__name__}, must return a scalar floating tensor")
    if loss.dim() != 0 or not loss.is_floating_point():
        raise StageError(
            f"loss_fn returned a {loss.dtype} tensor of shape {tuple(loss.shape)}, must return a scalar "
            "floating tensor (shape ()): the mean over the microbatch"
        )
    if differentiable and not loss.requires_grad:
        raise StageError(f"the loss of microbatch {microbatch} does not require grad; was it, or the output, detached?")
    return loss


def requires_grad(value: Any) -> bool:
    """Whether any tensor in a nesting of tuples, lists and dicts requires grad."""
    if isinstance(value, Tensor):
        return value.requires_grad
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return any(map(requires_grad, items))


def detached(value: Any, needs_copy: Callable[[Tensor], bool]) -> Any:
    """``value`` with its tensors detached, and cloned where ``needs_copy`` says so."""
    if isinstance(value, Tensor):
        value = value.detach() if value.requires_grad else value
        return value.clone() if needs_copy(value) else value
    if not requires_grad(value) and not any(map(needs_copy, tensors_in(value))):
        return value
    if isinstance(value, Mapping):
        return {key: detached(item, needs_copy) for key, item in value.items()}
    items = [detached(item, needs_copy) for item in value]
    if is_named(value):
        return with_items(value, items)
    return tuple(items) if isinstance(value, tuple) else items


def check_placement(modules: Mapping[int, nn.Module], graph: TaskGraph) -> None:
    """Refuse modules that are not those of one stage."""
    stages = [graph.placement.virtual_stages(stage) for stage in range(graph.placement.stages)]
    if tuple(sorted(modules)) not in stages:
        choices = " or ".join(map(str, stages))
        raise ConfigError(
            f"modules has the virtual stages {tuple(sorted(modules))}, must have those of one stage: {choices}"
        )
