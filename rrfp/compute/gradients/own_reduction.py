"""Modules that reduce their own gradients over processes: they hook a backward, and count on how often it comes.

They are told by the methods that torch gives them, so that a pipeline without them never loads their packages.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from rrfp.errors import ConfigError


def reduction_of_its_own(module: nn.Module) -> str | None:
    """Why the whole backward of a module is needed by what reduces its gradients, or None."""
    if any(hasattr(part, "set_requires_gradient_sync") for part in module.modules()):  # what fully_shard makes of one
        return "fully_shard reduces its gradients, by hooks on a whole backward"
    return None


def check_wrappers(modules: Mapping[int, nn.Module]) -> None:
    """Refuse modules that reduce with every pair of a forward and a backward; a step has many, in any order.

    Args:
        modules: by virtual stage.

    Raises:
        ConfigError: naming the first such module.
    """
    for v, module in sorted(modules.items()):
        for path, part in module.named_modules():
            if (found := _wrapper(part)) is not None:
                name, remedy = found
                where = f"the submodule {path!r} of virtual stage {v}" if path else f"the module of virtual stage {v}"
                raise ConfigError(
                    f"{where} is in {name}, which reduces once for each forward and backward and gives wrong gradients "
                    f"with several microbatches: must be without it; {remedy}"
                )


def _wrapper(part: nn.Module) -> tuple[str, str] | None:
    """What reduces the gradients of ``part`` in the wrong way, and what to do instead; None where nothing does."""
    # The second is what torch.distributed._composable.replicate makes of a module.
    is_composed = hasattr(part, "set_requires_gradient_sync") and hasattr(part, "register_comm_hook")
    if isinstance(part, nn.parallel.DistributedDataParallel) or is_composed:
        remedy = (
            "give the mesh or topology a dp dim that is not coordinated, and rrfp sums gradients over it once a step"
        )
        return "DistributedDataParallel", remedy
    if hasattr(part, "summon_full_params"):
        remedy = "shard with torch.distributed.fsdp.fully_shard, and name the dim of its mesh in coordinate"
        return "FullyShardedDataParallel", remedy
    return None
