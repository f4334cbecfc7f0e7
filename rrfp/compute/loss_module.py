"""A loss with parameters: the last virtual stage differentiates it together with its module.

So whatever asks for a virtual stage's parameters, buffers or submodules has to see both. That is decided here alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from rrfp.core.graph import Graph

#: What the names of the loss's parameters and buffers begin with.
LOSS = "loss_fn"


class WithLoss(nn.Module):
    """The module of the last virtual stage and the loss, as one.

    The module's parts keep their names; those of the loss follow with the prefix ``loss_fn``, and an underscore more
    where the module has that name itself. What both have counts once, with the module. For parameters, buffers and
    submodules only: it cannot be called.

    Args:
        module: the module.
        loss: the loss.
    """

    def __init__(self, module: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.loss = loss
        self._prefix = LOSS
        while hasattr(module, self._prefix):
            self._prefix += "_"

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Those of the module, then those of the loss; ``parameters``, ``buffers`` and ``modules`` follow from them."""
        memo = set() if memo is None else memo
        yield from self.module.named_modules(memo, prefix, remove_duplicate)
        yield from self.loss.named_modules(memo, ".".join(filter(None, (prefix, self._prefix))), remove_duplicate)


def with_loss(modules: Mapping[int, nn.Module], graph: Graph, loss_fn: Any) -> dict[int, nn.Module]:
    """Everything that each virtual stage differentiates: its module, and on the last one a loss that is a module.

    Any other ``loss_fn``, also one that uses modules, is the caller's own: nobody sees its parameters.

    Args:
        modules: by virtual stage.
        graph: which of them is the last.
        loss_fn: the loss, or None.
    """
    if not isinstance(loss_fn, nn.Module):
        return dict(modules)
    return {v: module if graph.successors[v] else WithLoss(module, loss_fn) for v, module in modules.items()}


def class_name(module: nn.Module) -> str:
    """The class of a virtual stage's module, for messages."""
    return type(module.module if isinstance(module, WithLoss) else module).__name__
