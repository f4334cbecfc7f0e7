"""Tables whose gradients are sparse: who has them, and where they are refused before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from rrfp.errors import ConfigError


def sparse_tables(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The path and weight of each submodule of torch that is made with ``sparse=True`` and learns."""
    for path, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad:
            yield path, part.weight


def check_not_sparse(modules: Mapping[int, nn.Module], because: str) -> None:
    """Refuse tables with sparse gradients.

    Args:
        modules: by virtual stage.
        because: what cannot add sparse gradients, for the message.

    Raises:
        ConfigError: naming the first such submodule.
    """
    for v, module in sorted(modules.items()):
        for path, _ in sparse_tables(module):
            raise ConfigError(f"{_describe(path, v)} has sparse=True, must be sparse=False: {because}")


def check_ties_not_sparse(modules: Mapping[int, nn.Module], tied: Mapping[str, list[Tensor]]) -> None:
    """Refuse ties of tables with sparse gradients.

    Args:
        modules: by virtual stage.
        tied: the parameters of each tie.

    Raises:
        ConfigError: naming the first such submodule and its tie.
    """
    names = {id(parameter): name for name, parameters in tied.items() for parameter in parameters}
    for v, module in sorted(modules.items()):
        for path, weight in sparse_tables(module):
            if (name := names.get(id(weight))) is not None:
                raise ConfigError(
                    f"{_describe(path, v)} has sparse=True, must be sparse=False: its weight is in the tie {name!r}, "
                    "whose copies add dense gradients"
                )


def _describe(path: str, virtual_stage: int) -> str:
    what = f"the submodule {path!r}" if path else "the module"
    return f"{what} of virtual stage {virtual_stage}"
