"""`rrfp.split`: a whole model into the modules of its pipeline stages."""

import math
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rrfp.compute.activations import tensors_in
from rrfp.compute.without_values import NotesEmptyBuffers
from rrfp.errors import ConfigError
from rrfp.hints import Placement
from rrfp.integrations.splitting.cuts import LayerCosts, check_cuts
from rrfp.integrations.splitting.layered import (
    Layered,
    MeasuredLayers,
    Sample,
    check_hooks_and_forward,
    check_shared_buffers,
    evaluating,
)
from rrfp.integrations.splitting.layered import measure as layer_times
from rrfp.integrations.splitting.stages import Split
from rrfp.pipeline.plan_file import Plan, PlanSpec
from rrfp.plain import flag, or_none, whole


class SequentialPart(NotesEmptyBuffers, nn.Sequential):
    """Some blocks of a chain, under the names of the whole."""

    def __init__(self, blocks: OrderedDict[str, nn.Module], *, is_last: bool) -> None:
        super().__init__(blocks)
        self._is_last = is_last

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        first, *others = self
        value = first(*arguments, **keywords)
        for block in others:
            value = block(value)
        # The next block takes one argument, also where that is a tuple or a dict, which would be spread.
        return value if self._is_last or isinstance(value, Tensor) else (value,)


class LayeredSequential(Layered):
    """A chain of blocks, each called with the output of the block before."""

    def __init__(
        self,
        # An ``nn.Sequential``, ``nn.ModuleList``, or list or tuple of modules.
        model: nn.Sequential | nn.ModuleList | Sequence[nn.Module],
    ) -> None:
        if isinstance(model, nn.Sequential) and type(model).forward is not nn.Sequential.forward:
            raise ConfigError(
                f"model is a {type(model).__name__} with a forward of its own, must be an nn.Sequential that calls its "
                "blocks in turn"
            )
        for index, block in enumerate(model):
            if not isinstance(block, nn.Module):
                raise ConfigError(f"model[{index}] is a {type(block).__name__}, must be an nn.Module")
        if isinstance(model, nn.Sequential):
            check_hooks_and_forward(model)
        self.model = model if isinstance(model, nn.Sequential) else nn.Sequential(*model)
        self.before, self.layers, self.after = (), tuple(self.model), ()
        self.is_tested = True

    def parts(self, cuts: Sequence[int]) -> list[nn.Module]:
        # Not named_children(), which leaves out a block's second occurrence.
        blocks = list(self.model._modules.items())
        bounds = list(pairwise((0, *cuts, len(blocks))))
        return [
            SequentialPart(
                OrderedDict((name, block) for name, block in blocks[start:stop] if block is not None),
                is_last=stop == len(blocks),
            )
            for start, stop in bounds
        ]

    def sample(self) -> Sample | None:
        return None


#: The base class of all models of transformers, which is not imported for this.
_LIBRARY_MODEL = ("transformers.modeling_utils", "PreTrainedModel")


def split(
    model: nn.Module | Sequence[nn.Module],
    stages: int | None = None,
    cuts: Sequence[int] | Literal["parameters", "times"] | None = None,
    placement: Literal["looped", "v"] = "looped",
    *,
    at: Sequence[str] | None = None,
    chunks: int | None = None,
    check: bool | None = None,
    sample: Any = None,
    measure: bool = False,
    plan: PlanSpec | None = None,
) -> Split:
    """Cut a whole model into the modules of a pipeline's stages.

    Nothing is copied: parameters and saved buffers stay the model's own, under the model's own names.

    Args:
        model: a decoder of transformers whose config has a ``base_model_pp_plan`` (Llama, Qwen3, Mistral, Gemma 2,
            OLMo 2, Qwen3-MoE and others), bare or for causal language modelling; a GPT-2; an ``nn.Sequential``, or a
            list of blocks of which each is called with the output of the one before. Any other module with ``at``.
        stages: N, the number of pipeline stages; needed without ``plan``.
        cuts: the first layer of each virtual stage but the first; or how to balance the stages, each with all of its
            chunks: ``"parameters"`` (the default) evens out their numbers of parameters, ``"times"`` the measured
            seconds of a forward and a backward. Every rank must get the same: where several ranks measure,
            ``torch.distributed`` must be initialised, and rank 0's cuts count.
        placement: ``"looped"`` or ``"v"``, where a stage has several chunks.
        at: names of submodules, in the order in which they run: ahead of each the model may be cut, so the layers are
            what lies between them. torch.fx follows the forward of the model, and of modules that have one of these
            inside; it must be the same in training and in evaluation. Only inputs that ``sample`` has can be given in a
            step, without it those that have no default.
        chunks: C, the parts that each stage holds; by default as many as ``cuts`` makes, otherwise 1 when looped and 2
            in a V.
        check: whether to run the whole model and its parts on ``sample`` and compare outputs and all gradients, which
            needs memory for two gradients of each parameter. By default this is done for a family of transformers that
            RRFP's tests do not cover, and with ``at``.
        sample: a tiny batch to check and to measure with: inputs of the model, as an entry of ``inputs`` of a step. A
            model of transformers needs none.
        measure: whether to measure each layer's seconds and bytes on ``sample``, for `Split.save_layers`, from whose
            file `rrfp plan` moves layers between stages.
        plan: a file that `rrfp plan` wrote, or the dict in it, instead of ``stages``, ``cuts``, ``placement`` and
            ``chunks``. The pipelines of the stages then have its options too.

    Returns:
        The stages: one for each rank, or all of them for `rrfp.local`.

    Raises:
        ConfigError: if the arguments do not fit, naming the allowed values, or if the parts do not compute what the
            whole model computes, naming the parameter and the deviation.
    """
    batch = None if sample is None else Sample(sample)
    layered = _layered(model, at, batch)
    planned = None if plan is None else Plan.read(plan)
    if planned is not None:
        placed = None if placement in ("looped", planned.placement) else placement
        given = {"stages": stages, "cuts": cuts, "placement": placed, "chunks": chunks}
        cuts = _planned_cuts(planned, len(layered.layers), given)
        stages, placement, chunks = planned.stages, planned.placement, planned.chunks
    layout = _layout(stages, placement, chunks, cuts)
    count, virtual_stages = len(layered.layers), layout.num_virtual_stages
    if virtual_stages > count:
        plural = "s" * (layout.chunks > 1)
        raise ConfigError(
            f"stages is {stages}, with {layout.chunks} chunk{plural} each: must make at most {count} "
            f"part{'s' * (count != 1)}, one for each layer"
        )
    or_none(flag, "check", check)
    batch = batch or layered.sample()
    measured = _measured(layered, cuts, batch) if flag("measure", measure) or cuts == "times" else None
    if cuts is None or isinstance(cuts, str):
        chosen = _costs(layered, cuts or "parameters", measured).balanced(layout)
    else:
        chosen = check_cuts(cuts, count, virtual_stages)
    parts = layered.parts(chosen)
    check_shared_buffers(layered, parts)
    if check or (check is None and not layered.is_tested):
        reason = "check=True" if check else "the check that check=False leaves out"
        check_parts(layered, parts, _needed(layered, batch, reason))
    return Split.of(parts, layout, chosen, layered, measured, planned)


def _layered(model: Any, at: Any, sample: Sample | None) -> Layered:
    if at is not None:
        from rrfp.integrations.splitting.traced import LayeredTraced

        return LayeredTraced(model, at, sample)
    if isinstance(model, nn.Sequential | nn.ModuleList | list | tuple):
        return LayeredSequential(model)
    if any((base.__module__, base.__name__) == _LIBRARY_MODEL for base in type(model).__mro__):
        from rrfp.integrations.splitting.decoder import LayeredDecoder

        return LayeredDecoder(model)
    by_name = ", or come with at=, names of submodules ahead of which to cut it"
    unwrap = ": pass model.get_base_model()" if hasattr(model, "get_base_model") else by_name
    raise ConfigError(
        f"model is a {type(model).__name__}, must be a model of transformers, an nn.Sequential or a list of "
        f"modules{unwrap}"
    )


def _layout(stages: Any, placement: Any, chunks: Any, cuts: Any) -> Placement:
    stages, chunks = whole("stages", stages, 1), or_none(whole, "chunks", chunks, 1)
    if chunks is None:
        chunks = 2 if placement == "v" else 1
        if isinstance(cuts, list | tuple) and (len(cuts) + 1) % stages == 0:
            chunks = (len(cuts) + 1) // stages
    return Placement(stages, chunks, placement)


def _planned_cuts(plan: Plan, layers: int, given: Mapping[str, Any]) -> Sequence[int] | None:
    """The plan's cuts, if it has any; a ConfigError for another model or arguments of its own."""
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"{name} is {value!r} beside a plan, which has it: must not be passed")
    if plan.layers not in (None, layers):
        raise ConfigError(f"plan is for a model of {plan.layers} layers, must be for {layers}, as this one has")
    return plan.cuts


def _costs(layered: Layered, by: str, measured: MeasuredLayers | None) -> LayerCosts:
    if by == "parameters":
        return LayerCosts.of_parameters(layered)
    if by != "times" or measured is None:
        raise ConfigError(f"cuts is {by!r}, must be 'parameters', 'times' or a list of layer numbers")
    return measured.costs


def _measured(layered: Layered, cuts: Any, sample: Sample | None) -> MeasuredLayers:
    """Each layer's times, where several ranks measure those of rank 0."""
    reason = "cuts='times'" if cuts == "times" else "measure=True"
    batch = _needed(layered, sample, reason)
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            what = "cuts is 'times'" if cuts == "times" else "measure is True"
            raise ConfigError(
                f"{what}, measured anew on each rank: initialise torch.distributed, so that rank 0's are used, "
                "or pass the cuts that one process has measured"
            )
        return layer_times(layered, batch)
    message = [layer_times(layered, batch) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(message, src=0)
    [times] = message
    assert times is not None
    return times


def _needed(layered: Layered, sample: Sample | None, reason: str) -> Sample:
    if sample is None:
        raise ConfigError(f"sample is missing, must be a tiny batch of inputs of this model: {reason} needs it")
    if any(parameter.is_meta for parameter in layered.model.parameters()):
        raise ConfigError(f"model is on the meta device, must have weights: {reason} needs them")
    return sample


#: The largest deviation allowed, in units of the dtype's epsilon times the largest entry. Both sides run the same
#: operations; only sums of gradients of a tensor that is used more than twice may be added in another order.
TOLERANCE = 32


def check_parts(layered: Layered, parts: Sequence[nn.Module], sample: Sample) -> None:
    """Compare the parts' output and gradients with the whole's, in eval mode."""
    # Needs memory for two gradients of each parameter; writes no ``.grad``.
    learning = {name: each for name, each in layered.model.named_parameters() if each.requires_grad}
    with torch.random.fork_rng(), torch.enable_grad(), evaluating(layered.model, *parts):
        output, loss = layered.run(sample)
        wanted = _results(output, loss, learning)
    with torch.random.fork_rng(), torch.enable_grad(), evaluating(layered.model, *parts):
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
    """Floating outputs, the loss, and gradients of it or of squares."""
    named = output.items() if isinstance(output, Mapping) else [("", output)]
    outputs = {
        f"output {name}".strip() + (f"[{index}]" if index else ""): tensor
        for name, value in named
        for index, tensor in enumerate(tensors_in(value))
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
    """How far apart two tensors are, in units of what is allowed."""
    if actual is None or wanted is None:
        return 0.0 if actual is wanted else math.inf
    if actual.dtype != wanted.dtype:
        return math.inf
    share = _share(actual, wanted)
    return math.inf if math.isnan(share) else share / (TOLERANCE * torch.finfo(wanted.dtype).eps)


def _share(actual: Tensor, wanted: Tensor) -> float:
    """The largest difference, as a share of the largest entry of ``wanted``."""
    if actual.shape != wanted.shape:
        return math.inf
    if torch.allclose(actual, wanted, rtol=0, atol=0, equal_nan=True):
        return 0.0
    difference, largest = (float(each.abs().max()) for each in (actual - wanted, wanted))
    return difference / largest if largest else math.inf


def _size(actual: Tensor | None, wanted: Tensor | None) -> str:
    if actual is None or wanted is None:
        return "all of it: the parts have none" if actual is None else "all of it: the whole has none"
    if actual.dtype != wanted.dtype:
        return f"its dtype: {actual.dtype} in the parts, {wanted.dtype} in the whole"
    return f"{_share(actual, wanted):.1e} of its largest entry"
