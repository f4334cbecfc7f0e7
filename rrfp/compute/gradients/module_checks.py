"""What modules do with gradients by themselves, and which cannot run: those that reduce once a backward, sparse tables.

Modules that reduce their own gradients over processes do so by hooks on backward that count its calls. They are
recognised by the methods that torch gives them, so a pipeline without them never loads their packages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from rrfp.errors import ConfigError
from rrfp.model.graph import TextOf, numbered


def needs_whole_backward(module: nn.Module) -> str | None:
    """Why hooks that reduce gradients need a whole backward; or None."""
    if any(hasattr(part, "set_requires_gradient_sync") for part in module.modules()):  # fully_shard adds this method
        return "fully_shard reduces its gradients, by hooks on a whole backward"
    return None


def shard_again(modules: Iterable[nn.Module]) -> None:
    """Let ``fully_shard`` put back parameters that an evaluation gathered."""
    for module in modules:
        for part in module.modules():
            reshard: Any = getattr(part, "reshard", None)
            if reshard is not None and hasattr(part, "set_requires_gradient_sync"):
                reshard()


def check_wrappers(modules: Mapping[int, nn.Module], text_of: TextOf = numbered) -> None:
    """Refuse modules that reduce once for each forward and backward."""
    for where, part in submodules(modules, text_of):
        if (wrapper := _wrapper(part)) is not None:
            name, remedy = wrapper
            raise ConfigError(
                f"{where} is in {name}, which reduces once for each forward and backward and gives wrong gradients "
                f"with several microbatches: must be without it; {remedy}"
            )


def submodules(modules: Mapping[int, nn.Module], text_of: TextOf) -> Iterator[tuple[str, nn.Module]]:
    """Every submodule of the virtual stages, with its display name."""
    for v, module in sorted(modules.items()):
        for path, part in module.named_modules():
            yield f"the submodule {path!r} of {text_of(v)}" if path else f"the module of {text_of(v)}", part


def _wrapper(part: nn.Module) -> tuple[str, str] | None:
    """The wrapper that ``part`` is, and the remedy; None if it is no wrapper."""
    # torch.distributed._composable.replicate adds both methods and changes no class.
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


def sparse_tables(modules: Mapping[int, nn.Module], text_of: TextOf = numbered) -> Iterator[tuple[str, Tensor]]:
    """The embeddings with ``sparse=True`` and a trained weight."""
    for where, part in submodules(modules, text_of):
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad:
            yield where, part.weight


def check_not_sparse(modules: Mapping[int, nn.Module], because: str, text_of: TextOf = numbered) -> None:
    for where, _ in sparse_tables(modules, text_of):
        raise ConfigError(f"{where} has sparse=True, must be sparse=False: {because}")


def check_ties_not_sparse(
    modules: Mapping[int, nn.Module], tied: Mapping[str, list[Tensor]], text_of: TextOf = numbered
) -> None:
    names = {id(parameter): name for name, parameters in tied.items() for parameter in parameters}
    for where, weight in sparse_tables(modules, text_of):
        if (name := names.get(id(weight))) is not None:
            raise ConfigError(
                f"{where} has sparse=True, must be sparse=False: its weight is in the tie {name!r}, whose copies add "
                "dense gradients"
            )
