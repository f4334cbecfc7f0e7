"""Modules that reduce their own gradients over processes: they hook a backward, and count on how often it comes.

They are told by the methods that torch gives them, so that a pipeline without them never loads their packages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from rrfp.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def reduction_of_its_own(module: nn.Module) -> str | None:
    """Why the whole backward of a module is needed by what reduces its gradients, or None."""
    for part in module.modules():
        if _is_replicated(part):
            return "DistributedDataParallel reduces its gradients, by hooks on a whole backward"
        if _is_flat_sharded(part):
            return "FullyShardedDataParallel reduces its gradients, by hooks on a whole backward"
        if hasattr(part, "set_requires_gradient_sync"):  # what fully_shard makes of a module
            return "fully_shard reduces its gradients, by hooks on a whole backward"
    return None


def check_not_replicated(modules: Mapping[int, nn.Module]) -> None:
    """Refuse modules that reduce with every pair of a forward and a backward; a step has many, in any order.

    Args:
        modules: by virtual stage.

    Raises:
        ConfigError: naming the first such module.
    """
    for v, module in sorted(modules.items()):
        for path, part in module.named_modules():
            if _is_replicated(part):
                where = f"the submodule {path!r} of virtual stage {v}" if path else f"the module of virtual stage {v}"
                raise ConfigError(
                    f"{where} is in DistributedDataParallel, which reduces once for each forward and backward and "
                    "gives wrong gradients with several microbatches: must be without it; give the mesh or topology a "
                    "dp dim that is not coordinated, and rrfp sums gradients over it once a step"
                )


def sharding_groups(module: nn.Module) -> list[tuple[str, list[ProcessGroup]]]:
    """The path of each submodule in FullyShardedDataParallel, and the groups that its collectives run in."""
    found: list[tuple[str, list[ProcessGroup]]] = []
    for path, part in module.named_modules():
        if _is_flat_sharded(part):
            told: Any = (getattr(part, "process_group", None), getattr(part, "_inter_node_pg", None))
            found.append((path, [group for group in told if group is not None]))
    return found


def _is_replicated(part: nn.Module) -> bool:
    # The second is what torch.distributed._composable.replicate makes of a module.
    is_composed = hasattr(part, "set_requires_gradient_sync") and hasattr(part, "register_comm_hook")
    return isinstance(part, nn.parallel.DistributedDataParallel) or is_composed


def _is_flat_sharded(part: nn.Module) -> bool:
    return hasattr(part, "summon_full_params")
