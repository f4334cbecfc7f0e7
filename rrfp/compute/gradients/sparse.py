"""Embedding tables with sparse gradients, and their refusal before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from rrfp.errors import ConfigError
from rrfp.model.graph import TextOf, numbered


def sparse_tables(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The embeddings with ``sparse=True`` and a trained weight."""
    for path, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad:
            yield path, part.weight


def check_not_sparse(modules: Mapping[int, nn.Module], because: str, text_of: TextOf = numbered) -> None:
    """Refuse tables with sparse gradients, for the reason ``because``."""
    for v, module in sorted(modules.items()):
        for path, _ in sparse_tables(module):
            raise ConfigError(f"{_describe(path, text_of(v))} has sparse=True, must be sparse=False: {because}")


def check_ties_not_sparse(
    modules: Mapping[int, nn.Module], tied: Mapping[str, list[Tensor]], text_of: TextOf = numbered
) -> None:
    """Refuse tied tables with sparse gradients."""
    names = {id(parameter): name for name, parameters in tied.items() for parameter in parameters}
    for v, module in sorted(modules.items()):
        for path, weight in sparse_tables(module):
            if (name := names.get(id(weight))) is not None:
                raise ConfigError(
                    f"{_describe(path, text_of(v))} has sparse=True, must be sparse=False: its weight is in the tie "
                    f"{name!r}, whose copies add dense gradients"
                )


def _describe(path: str, where: str) -> str:
    what = f"the submodule {path!r}" if path else "the module"
    return f"{what} of {where}"
