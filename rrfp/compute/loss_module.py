"""The losses of a rank, and a loss with parameters, which its virtual stage differentiates together with its module.

All code that needs a virtual stage's parameters, buffers or submodules must see both, and gets them from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from rrfp.model.graph import TaskGraph

#: The prefix of the names of the loss's parameters and buffers.
LOSS = "loss_fn"

LossFunction = Callable[[Any, Any], Tensor]


class WithLoss(nn.Module):
    """The module of the last virtual stage and the loss as one module; it cannot be called.

    The names of the module's parts do not change. The loss's parts follow with the prefix ``loss_fn``, and a further
    underscore if the module uses that name. A part of both occurs once, with the module.
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
        """The submodules of the module, then those of the loss."""
        # torch derives parameters(), buffers(), modules() and their named_ twins from this method.
        memo = set() if memo is None else memo
        yield from self.module.named_modules(memo, prefix, remove_duplicate)
        yield from self.loss.named_modules(memo, ".".join(filter(None, (prefix, self._prefix))), remove_duplicate)


def losses_by_stage(
    loss_fn: LossFunction | Mapping[int, LossFunction] | None, graph: TaskGraph
) -> Mapping[int, LossFunction]:
    """The loss of each virtual stage that computes one: those that nothing reads, where ``loss_fn`` is one function."""
    if loss_fn is None or isinstance(loss_fn, Mapping):
        return loss_fn or {}
    return {v: loss_fn for v, readers in enumerate(graph.successors) if not readers}


def with_loss(modules: Mapping[int, nn.Module], losses: Mapping[int, LossFunction]) -> dict[int, nn.Module]:
    """The modules that each virtual stage differentiates: with its loss, where that is a module.

    The parameters of any other loss, also of a function that uses modules, stay unknown to the pipeline.
    """
    return {
        v: WithLoss(module, loss) if isinstance(loss := losses.get(v), nn.Module) else module
        for v, module in modules.items()
    }


def class_name(module: nn.Module) -> str:
    """The class of a virtual stage's module, for messages."""
    return type(module.module if isinstance(module, WithLoss) else module).__name__
