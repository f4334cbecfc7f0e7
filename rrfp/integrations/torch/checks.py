"""What `ScheduleRRFP` refuses before a step: arguments that do not fit, and stages whose collectives would not."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from rrfp import Limit, Topology
from rrfp.errors import ConfigError
from rrfp.integrations.torch import private
from rrfp.integrations.torch.private import Stage

#: Arguments of `rrfp.Pipeline` that mean nothing here, with the reason.
OTHERWISE = {
    "chunks": "the stages say it",
    "placement": "the stages of all ranks say it",
    "loss_fn": "pass it as the third argument",
    "reduction": "use scale_grads, which is torch's",
    "seed": "torch's stages draw from torch's generators",
    "first_step": "torch's stages draw from torch's generators",
    "topology": "the stages' group says it; see mesh",
    "name": "it has one of its own",
    "rendezvous": "ranks meet in torch's default store",
    "loop": "it blocks",
    "ties": "torch's stages have no shared parameters",
    "share_replicas": "torch's stages run the microbatches of their own replica",
}

#: For how many microbatches the last `ScheduleRRFP` has prepared the buffers of a stage.
PREPARED: WeakKeyDictionary[Stage, int] = WeakKeyDictionary()


def check_stages(stages: Any) -> list[Stage]:
    """The stages in ascending order."""
    listed = list(stages) if isinstance(stages, list | tuple) else [stages]
    if not listed:
        raise ConfigError("stages is empty, must hold the stages of this rank")
    for index, stage in enumerate(listed):
        if not isinstance(stage, Stage):
            raise ConfigError(f"stages[{index}] is a {type(stage).__name__}, must be a PipelineStage")
    first = listed[0]
    for name in ("num_stages", "group", "group_size", "device"):
        for index, stage in enumerate(listed[1:], 1):
            if getattr(stage, name) != getattr(first, name):
                raise ConfigError(
                    f"stages[{index}].{name} is {getattr(stage, name)}, must be stages[0]'s: {getattr(first, name)}"
                )
    indices = sorted(stage.stage_index for stage in listed)
    if len(set(indices)) < len(indices):
        raise ConfigError(f"stages have the indices {indices}, must have each once")
    return sorted(listed, key=lambda stage: stage.stage_index)


def check_microbatches(n_microbatches: Any) -> None:
    if type(n_microbatches) is not int or n_microbatches < 1:
        raise ConfigError(f"n_microbatches is {n_microbatches!r}, must be a whole number >= 1")


def check_init_timeout(init_timeout: Any) -> None:
    is_number = isinstance(init_timeout, int | float) and not isinstance(init_timeout, bool)
    if not is_number or not 0 < init_timeout < float("inf"):
        raise ConfigError(f"init_timeout is {init_timeout!r}, must be a finite number of seconds above 0")


def check_mesh(mesh: Any, coordinate: Any, stage: Stage) -> None:
    """Refuse dims to coordinate without a mesh, and a mesh on which ``stage`` lies elsewhere."""
    if mesh is None:
        if coordinate is not None:
            raise ConfigError("coordinate goes with mesh, which is None")
        return
    names = getattr(mesh, "mesh_dim_names", None)
    if names is None or "pp" not in names:
        raise ConfigError(f"mesh has the dims {names}, must be a DeviceMesh with a dim 'pp'")
    at = (mesh.get_local_rank("pp"), mesh["pp"].size())
    if at != (stage.group_rank, stage.group_size):
        raise ConfigError(
            f"mesh: this is rank {at[0]} of {at[1]} along 'pp', must be the stages' in their group: "
            f"{stage.group_rank} of {stage.group_size}"
        )


def check_options(options: Mapping[str, Any], stages: Sequence[Stage]) -> None:
    """Refuse options of `rrfp.Pipeline` that do not go with torch's stages."""
    refused = [f"{name} ({OTHERWISE[name]})" for name in options if name in OTHERWISE]
    if refused:
        raise ConfigError(f"ScheduleRRFP does not take {', '.join(refused)}")
    limit = Limit.resolve(options.get("limit"), 0, 1)
    if limit.bytes is not None:
        raise ConfigError(
            f"limit: bytes is {limit.bytes}, must be None: torch's stages do not report the bytes that they hold"
        )
    if options.get("deterministic") and options.get("split"):
        for stage in stages:
            if stage.dw_builder is not None:
                raise ConfigError(
                    f"deterministic is True with split=True, but stage {stage.stage_index} has a dw_builder, which "
                    "forms gradients in the order of backwards: must be False, or split=False"
                )


def ranks_in_order(mesh: DeviceMesh | None, coordinate: Sequence[str] | None) -> frozenset[int]:
    """The ranks that run tasks in the same order as this one, itself included."""
    if mesh is None:
        return frozenset({dist.get_rank()})
    topology = Topology.from_mesh(mesh, ("tp",) if coordinate is None else coordinate)
    ranks = mesh.mesh.flatten().tolist()
    return frozenset(ranks[rank] for rank in topology.group)


def check_collectives(stage: Stage, in_order: Collection[int]) -> None:
    """Refuse collectives inside tasks, unless all ranks that join in them run tasks in the same order: ``in_order``."""
    module, name = stage.submod, f"stage {stage.stage_index}"
    if (part := next(private.resharded(module), None)) is not None:
        raise ConfigError(
            f"{name}: reshard_after_forward is True on {_named(part)}, must be False: every forward and backward would "
            "gather its parameters, and the ranks that gather together are in pipelines of their own, each with its "
            "own order of tasks"
        )
    if not isinstance(module, FSDPModule):
        for path, part_module in _parts(module):
            if isinstance(part_module, FSDPModule | DistributedDataParallel):
                kind = "fully_shard" if isinstance(part_module, FSDPModule) else "DistributedDataParallel"
                raise ConfigError(
                    f"{name}: {kind} is applied to {_named(path)}, must be applied to the stage's module too (then "
                    "torch's stage reduces once a step): gradients would be reduced in every backward"
                )
    for what, members in _with_collectives(module):
        if len(members) > 1 and not members.issubset(in_order):
            raise ConfigError(
                f"{name}: {what} over the ranks {sorted(members)}, so tasks have collectives, and the ranks that join "
                "in them must be of this stage and run tasks in the same order: pass mesh=, whose dims are pp and "
                "theirs, and coordinate= with the name of the latter"
            )


def _with_collectives(module: nn.Module) -> Iterator[tuple[str, frozenset[int]]]:
    """What has collectives in every forward or backward, and the ranks that join in them."""
    for name, members in private.sharded_otherwise(module):
        yield f"parameter {name!r} is a DTensor", members
    for path, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            yield f"{_named(path)} is a SyncBatchNorm", frozenset(dist.get_process_group_ranks(part.process_group))


def check_prepared(stages: Sequence[Stage], microbatches: int) -> None:
    """Refuse stages whose buffers, which this schedule has prepared, another schedule has replaced by fewer or more."""
    for stage in stages:
        if (prepared := PREPARED[stage]) != microbatches:
            raise ConfigError(
                f"n_microbatches is {microbatches}, must be {prepared}: another schedule has prepared stage "
                f"{stage.stage_index} since, for {prepared} microbatches; build this one again to use it now"
            )


def check_loss(loss_fn: Any, loss_kwargs: Any = None) -> None:
    """Refuse what is no loss function, and what are no keywords of one."""
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigError(f"loss_fn is {loss_fn!r:.80}, must be callable: loss_fn(output, target), or None")
    if loss_kwargs is not None and not isinstance(loss_kwargs, Mapping):
        raise ConfigError(f"loss_kwargs is {loss_kwargs!r:.80}, must be a dict of keywords of loss_fn, or None")


def check_no_loss(**of_a_loss: Any) -> None:
    """Refuse arguments of a step that only a ``loss_fn`` uses: the step would train nothing."""
    if passed := [name for name, value in of_a_loss.items() if value is not None]:
        raise ConfigError(
            f"loss_fn is None, must be a function of output and target, as {' and '.join(passed)} is passed: without "
            "it there is no loss and no backward"
        )


def check_cut(args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, arg_mbs: Any, kwarg_mbs: Any) -> None:
    """Refuse a whole batch beside one that is cut, and microbatches of the wrong types."""
    whole = {"positional arguments": bool(args), "target": target is not None, **dict.fromkeys(kwargs, True)}
    if extra := [name for name, is_passed in whole.items() if is_passed]:
        raise ValueError(f"{', '.join(extra)} with arg_mbs, kwarg_mbs or target_mbs: a batch is whole, or cut")
    for name, values, wanted in (("arg_mbs", arg_mbs, tuple), ("kwarg_mbs", kwarg_mbs, dict)):
        if not isinstance(values, list | None):
            raise TypeError(
                f"{name} is a {type(values).__name__}, must be a list with a {wanted.__name__} a microbatch"
            )
        for m, value in enumerate(values or ()):
            if not isinstance(value, wanted):
                raise TypeError(f"{name}[{m}] is a {type(value).__name__}, must be a {wanted.__name__}")


def _parts(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The parts of ``module`` that wrap gradients by themselves: of a module in DDP none."""
    is_ddp = isinstance(module, DistributedDataParallel)
    return [] if is_ddp else [(path, part) for path, part in module.named_modules() if path]


def _named(path: str) -> str:
    return repr(path) if path else "the stage's module"
