"""Embedding tables with sparse gradients, and their refusal before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from rrfp.compute.gradients.module_reduction import submodules
from rrfp.errors import ConfigError
from rrfp.model.graph import TextOf, numbered


def sparse_tables(modules: Mapping[int, nn.Module], text_of: TextOf = numbered) -> Iterator[tuple[str, Tensor]]:
    """The embeddings with ``sparse=True`` and a trained weight."""
    for where, part in submodules(modules, text_of):
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad:
            yield where, part.weight


def check_not_sparse(modules: Mapping[int, nn.Module], because: str, text_of: TextOf = numbered) -> None:
    """Refuse tables with sparse gradients, for the reason ``because``."""
    for where, _ in sparse_tables(modules, text_of):
        raise ConfigError(f"{where} has sparse=True, must be sparse=False: {because}")


def check_ties_not_sparse(
    modules: Mapping[int, nn.Module], tied: Mapping[str, list[Tensor]], text_of: TextOf = numbered
) -> None:
    """Refuse tied tables with sparse gradients."""
    names = {id(parameter): name for name, parameters in tied.items() for parameter in parameters}
    for where, weight in sparse_tables(modules, text_of):
        if (name := names.get(id(weight))) is not None:
            raise ConfigError(
                f"{where} has sparse=True, must be sparse=False: its weight is in the tie {name!r}, whose copies add "
                "dense gradients"
            )
