"""Where to cut a chain of layers: as the caller says, or balanced by what each layer costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from typing import TYPE_CHECKING, Any

from rrfp.errors import ConfigError
from rrfp.hints import Placement

if TYPE_CHECKING:  # rrfp plan cuts without torch
    from torch import nn

    from rrfp.integrations.splitting.layered import Layered


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """What each piece of a model costs, in any unit."""

    #: Of all that is ahead of the first layer.
    before: float
    layers: Sequence[float]
    #: Of all that is behind the last layer.
    after: float

    @classmethod
    def of_parameters(cls, layered: Layered) -> LayerCosts:
        """The numbers of parameters; shared ones count in each piece."""
        layers = [_count([layer]) for layer in layered.layers]
        return cls(_count(layered.before), layers, _count(layered.after))

    def balanced(self, placement: Placement, factors: Sequence[float] | None = None) -> tuple[int, ...]:
        """The cuts whose dearest stage is cheapest; of equals, the most even. ``factors`` say how slow each stage is.

        With several chunks a stage it is a search from the cuts whose dearest part is cheapest: it takes the best move
        of two cuts, or of neighbouring ones together, until none gains anything.
        """
        slow = factors or (1.0,) * placement.stages
        factor_of = [slow[placement.stage_of(v)] for v in range(placement.num_virtual_stages)]
        cost = self._cost(factor_of)
        cuts = self._balanced_parts(placement.num_virtual_stages, cost)
        if placement.chunks == 1:
            return cuts
        stages = [placement.virtual_stages(stage) for stage in range(placement.stages)]

        def rating(cuts: Sequence[int]) -> tuple[float, float, float]:
            parts = [cost(v, *bounds) for v, bounds in enumerate(pairwise((0, *cuts, len(self.layers))))]
            sums = [sum(parts[v] for v in own) for own in stages]
            return max(sums), sum(each**2 for each in sums), sum(each**2 for each in parts)

        ranges = [range(*ends) for ends in combinations(range(placement.num_virtual_stages), 2)]
        moves = [[(index, step) for index in each] for each in ranges for step in (-2, -1, 1, 2)]
        single = [(index, step) for index in range(len(cuts)) for step in (-1, 1)]
        moves += [[*pair] for pair in combinations(single, 2)]

        def neighbours() -> Iterator[tuple[int, ...]]:
            for move in moves:
                moved = [*cuts]
                for index, step in move:
                    moved[index] += step
                if all(start < stop for start, stop in pairwise((0, *moved, len(self.layers)))):
                    yield tuple(moved)

        while (best := min(neighbours(), key=rating, default=cuts)) and rating(best) < rating(cuts):
            cuts = best
        return cuts

    def _cost(self, factor_of: Sequence[float]) -> Callable[[int, int, int], float]:
        """What a part costs, by its number, its first layer and the next part's first."""
        count, sums = len(self.layers), [0.0, *accumulate(self.layers)]

        def cost(part: int, start: int, stop: int) -> float:
            ends = (self.before if start == 0 else 0) + (self.after if stop == count else 0)
            return factor_of[part] * (sums[stop] - sums[start] + ends)

        return cost

    def _balanced_parts(self, parts: int, cost: Callable[[int, int, int], float]) -> tuple[int, ...]:
        """The cuts whose dearest part is cheapest; of equals, the most even."""
        count = len(self.layers)
        # By the number of layers in the parts so far: the dearest part, the sum of squares, and the cuts.
        best: dict[int, tuple[float, float, tuple[int, ...]]] = {
            stop: (cost(0, 0, stop), cost(0, 0, stop) ** 2, ()) for stop in range(1, count + 1)
        }
        for part in range(1, parts):
            best = {
                stop: min(
                    (max(dearest, own := cost(part, start, stop)), squares + own**2, (*cuts, start))
                    for start, (dearest, squares, cuts) in best.items()
                    if start < stop
                )
                for stop in range(min(best) + 1, count + 1)
            }
        return best[count][2]


def check_cuts(cuts: Any, layers: int, parts: int) -> tuple[int, ...]:
    """The caller's ``cuts``, if each part has a layer or more."""
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
