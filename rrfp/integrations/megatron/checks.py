"""What the integration does not run, refused by the name of the flag at the first call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from torch import nn

from rrfp import Limit
from rrfp.errors import ConfigError, Faults
from rrfp.pipeline.options import OptionArguments, complete

#: The default limit: as much as Megatron's own schedule holds.
WINDOW = "megatron"

_OWN_ORDER = "it relies on the order of tasks of Megatron's own schedule"
_UNPROVEN = "it was never run with RRFP"

#: Flags of a configuration that are refused unless they are off: why.
REFUSED: Mapping[str, str] = {
    "overlap_moe_expert_parallel_comm": "it makes one task of a forward and a backward",
    "delay_wgrad_compute": "it belongs to overlap_moe_expert_parallel_comm",
    "overlap_dispatch_backward_with_experts_wgrad": "it delays weight gradients, and " + _UNPROVEN,
    "fine_grained_activation_offloading": "it counts microbatches in the order of Megatron's own schedule",
    "hybrid_context_parallel": "it is a schedule of its own",
    "moe_paged_stash": _OWN_ORDER,
    "moe_expert_rank_capacity_factor": "its runner captures the whole step as a CUDA graph",
    "enable_cuda_graph": "a graph is captured in the order of Megatron's own schedule",
    "external_cuda_graph": "a graph is captured in the order of Megatron's own schedule",
    "cuda_graph_impl": "a graph is captured in the order of Megatron's own schedule",
    "use_ring_exchange_p2p": "tensors travel over RRFP's transports",
    "fp8": _UNPROVEN,
    "fp4": _UNPROVEN,
}

#: Of these axes each forward gathers weights, so their ranks must run tasks in one order: the sizes that are refused.
WEIGHT_GATHERING = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")

#: Options of `rrfp.Pipeline` that Megatron decides, and how.
DECIDED: Mapping[str, str] = {
    "order": "code of Megatron's counts on natural order",
    "strict": "fixed orders are Megatron's own: leave enable() out",
    "replay": "code of Megatron's counts on natural order",
    "split": "Megatron's backward is whole",
    "unsplittable": "Megatron's backward is whole",
    "chunks": "the model list has them",
    "placement": "Megatron's chunks are looped",
    "loss_fn": "forward_step_func has it",
    "reduction": "forward_step_func and the configuration decide it",
    "seed": "Megatron draws from its own generators",
    "partition": "the model has its own",
    "check_replicas": "Megatron sums gradients itself",
    "share_replicas": "each replica has a pipeline of its own, and Megatron's iterators have its microbatches",
    "first_step": "steps are Megatron's",
    "lane": "tasks need a thread",
}

#: Wrappers that gather parameters inside tasks.
SHARDED = ("FullyShardedDataParallel", "MegatronFSDP", "TorchFullyShardedDataParallel", "FSDP")


def check_options(options: Mapping[str, Any]) -> None:
    """Raise a ConfigError for options that do not fit, that Megatron decides, or for a limit on bytes."""
    with Faults() as faults:
        for name, reason in DECIDED.items():
            if name in options:
                faults.keep(f"{name} must not be passed: {reason}")
        if (limit := options.get("limit")) is not None and limit != WINDOW:
            with faults.kept():
                if Limit.resolve(limit, 0, 1, f", an rrfp.Limit, or {WINDOW!r}").bytes is not None:
                    raise ConfigError(
                        f"limit is {limit!r}, must count microbatches: what Megatron's activations hold is not measured"
                    )
        left = {name: value for name, value in options.items() if name not in DECIDED and name != "limit"}
        with faults.kept():
            complete(cast("OptionArguments", {**left, "order": "natural"}))


def check_config(config: Any) -> None:
    """Raise a ConfigError that names every flag which is on and refused."""
    with Faults() as faults:
        for name, reason in REFUSED.items():
            value = getattr(config, name, None)
            if value not in (None, False, "none"):
                faults.keep(f"{name} is {value!r}, must be off with RRFP: {reason}")
        for name in WEIGHT_GATHERING:
            if (size := getattr(config, name, 1)) not in (None, 1):
                faults.keep(f"{name} is {size!r}, must be 1 with RRFP: tasks would gather weights")


def check_model(chunks: Sequence[nn.Module], model_type: Any) -> None:
    """Raise a ConfigError for parameters that are sharded, or a model with an encoder and a decoder."""
    for chunk in chunks:
        for wrapper in wrapped(chunk):
            if wrapper in SHARDED:
                raise ConfigError(
                    f"model is wrapped in {wrapper}, must not be: its ranks gather parameters inside tasks, and each "
                    "replica runs tasks in an order of its own; DistributedDataParallel with the distributed optimizer "
                    "runs"
                )
    if getattr(model_type, "name", "") == "encoder_and_decoder":
        raise ConfigError("model has the type encoder_and_decoder, must be encoder_or_decoder: its skip edges need two")


def wrapped(chunk: nn.Module) -> Iterator[str]:
    """The classes of a chunk and of what it wraps."""
    inner: Any = chunk
    while isinstance(inner, nn.Module):
        yield type(inner).__name__
        inner = getattr(inner, "module", None)


def check_groups(communicator: Any, groups: Any) -> None:
    """Raise a ConfigError unless both or neither are passed, and they are of one model."""
    if (communicator is None) != (groups is None):
        passed, missing = ("pg_collection", "p2p_communicator")[:: 1 if communicator is None else -1]
        raise ConfigError(f"{passed} is passed without {missing}: must be both or neither")
    for name, value in (("p2p_communicator", communicator), ("pg_collection", groups)):
        if type(value).__name__.startswith("MultiModule"):
            raise ConfigError(f"{name} is a {type(value).__name__}, must be of one model: pipelines of several modules "
                              "are not run")  # fmt: skip
    for name in ("tp", "cp", "pp") if groups is not None else ():
        if getattr(groups, name, None) is None:
            raise ConfigError(f"pg_collection has no {name}, must have tp, cp and pp")
