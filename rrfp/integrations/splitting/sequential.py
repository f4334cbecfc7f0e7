"""`rrfp.split` for an ``nn.Sequential`` or a list of blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from rrfp.errors import ConfigError
from rrfp.integrations.splitting.layered import Layered, Sample


class SequentialPart(nn.Sequential):
    """Some blocks of a chain, under the names that they have in the whole.

    Args:
        blocks: by name.
        is_last: whether the output is the whole chain's.
    """

    def __init__(self, blocks: OrderedDict[str, nn.Module], *, is_last: bool) -> None:
        super().__init__(blocks)
        self._is_last = is_last

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        first, *others = self
        value = first(*arguments, **keywords)
        for block in others:
            value = block(value)
        # The next block takes one argument, also where that is a tuple or a dict, which would be spread.
        return value if self._is_last or isinstance(value, Tensor) else (value,)


class LayeredSequential(Layered):
    """A chain of blocks, each called with the output of the block before.

    Args:
        model: an ``nn.Sequential``, ``nn.ModuleList``, or list or tuple of modules.

    Raises:
        ConfigError: if a block is no module, or ``model`` has a forward of its own.
    """

    def __init__(self, model: nn.Sequential | nn.ModuleList | Sequence[nn.Module]) -> None:
        if isinstance(model, nn.Sequential) and type(model).forward is not nn.Sequential.forward:
            raise ConfigError(
                f"model is a {type(model).__name__} with a forward of its own, must be an nn.Sequential that calls its "
                "blocks in turn"
            )
        for index, block in enumerate(model):
            if not isinstance(block, nn.Module):
                raise ConfigError(f"model[{index}] is a {type(block).__name__}, must be an nn.Module")
        self.model = model if isinstance(model, nn.Sequential) else nn.Sequential(*model)
        self.before, self.layers, self.after = (), tuple(self.model), ()
        self.is_tested = True

    def parts(self, cuts: Sequence[int]) -> list[nn.Module]:
        # Not named_children(), which leaves out a block's second occurrence.
        blocks = list(self.model._modules.items())
        bounds = list(pairwise((0, *cuts, len(blocks))))
        return [
            SequentialPart(
                OrderedDict((name, block) for name, block in blocks[start:stop] if block is not None),
                is_last=stop == len(blocks),
            )
            for start, stop in bounds
        ]

    def sample(self) -> Sample | None:
        return None
