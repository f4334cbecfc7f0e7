"""Where a chain of layers is cut: checked, or balanced by a cost of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import nn

from rrfp.errors import ConfigError
from rrfp.integrations.splitting.layered import Layered


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """What each piece of a model costs, in one unit of any kind.

    Attributes:
        before: of all that is ahead of the first layer.
        layers: of each layer.
        after: of all that is behind the last layer.
    """

    before: float
    layers: Sequence[float]
    after: float

    @classmethod
    def of_parameters(cls, layered: Layered) -> LayerCosts:
        """The numbers of parameters; a parameter that several pieces share counts in each."""
        layers = [_count([layer]) for layer in layered.layers]
        return cls(_count(layered.before), layers, _count(layered.after))

    def balanced(self, parts: int) -> tuple[int, ...]:
        """The cuts into so many parts whose dearest part is cheapest; of equal ones, rather even parts."""
        count, sums = len(self.layers), [0.0, *accumulate(self.layers)]

        def cost(start: int, stop: int) -> float:
            ends = (self.before if start == 0 else 0) + (self.after if stop == count else 0)
            return sums[stop] - sums[start] + ends

        # By the number of layers in the parts so far: the dearest part, the sum of squares, and the cuts.
        best: dict[int, tuple[float, float, tuple[int, ...]]] = {
            stop: (cost(0, stop), cost(0, stop) ** 2, ()) for stop in range(1, count + 1)
        }
        for _ in range(parts - 1):
            best = {
                stop: min(
                    (max(dearest, cost(start, stop)), squares + cost(start, stop) ** 2, (*cuts, start))
                    for start, (dearest, squares, cuts) in best.items()
                    if start < stop
                )
                for stop in range(min(best) + 1, count + 1)
            }
        return best[count][2]


def check_cuts(cuts: Any, layers: int, parts: int) -> tuple[int, ...]:
    """The caller's ``cuts``, if they cut ``layers`` layers into ``parts`` parts with one layer or more each.

    Raises:
        ConfigError: if they do not.
    """
    numbers = f"{parts - 1} layer number{'s' * (parts != 2)} in 1..{layers - 1}"
    wanted = f"{numbers}, ascending: the first layer of each part but the first"
    if not isinstance(cuts, list | tuple) or any(type(cut) is not int for cut in cuts):
        raise ConfigError(f"cuts is {cuts!r:.100}, must be 'parameters', 'times' or a list of {wanted}")
    if len(cuts) != parts - 1 or list(cuts) != sorted({*cuts} & {*range(1, layers)}):
        raise ConfigError(f"cuts is {list(cuts)}, must be {wanted}")
    return tuple(cuts)


def _count(modules: Sequence[nn.Module]) -> int:
    parameters = {id(each): each.numel() for module in modules for each in module.parameters()}
    return sum(parameters.values())
