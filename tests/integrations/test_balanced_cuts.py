"""Cuts that balance stages: with several chunks it is their sums that count."""

from __future__ import annotations

import random
from itertools import combinations, pairwise
from statistics import mean
from typing import Any

import pytest
from batches import long
from torch import nn

import rrfp
from rrfp.hints import Placement
from rrfp.integrations.splitting.cuts import LayerCosts


def dearest(costs: LayerCosts, placement: Placement, cuts: tuple[int, ...]) -> float:
    """The cost of the dearest stage."""
    bounds = pairwise((0, *cuts, len(costs.layers)))
    parts = [sum(costs.layers[start:stop]) for start, stop in bounds]
    parts[0] += costs.before
    parts[-1] += costs.after
    return max(sum(parts[v] for v in placement.virtual_stages(stage)) for stage in range(placement.stages))


def case(seed: int) -> tuple[LayerCosts, Placement]:
    draw = random.Random(seed)
    layers = [draw.choice([1.0, 1.0, 1.3, 2.0]) for _ in range(draw.randint(8, 13))]
    placement = Placement(draw.randint(2, 4), draw.choice([1, 2]), draw.choice(["looped", "v"]))
    return LayerCosts(draw.random(), layers, 4 * draw.random()), placement


@pytest.mark.parametrize("seeds", [range(20), long(range(20, 200))], ids=str)
def test_the_dearest_stage_is_close_to_the_cheapest_that_there_is(seeds: range) -> None:
    shares = []
    for costs, placement in map(case, seeds):
        cuts = costs.balanced(placement)
        everywhere = combinations(range(1, len(costs.layers)), placement.num_virtual_stages - 1)
        best = min(dearest(costs, placement, each) for each in everywhere)
        shares.append(dearest(costs, placement, cuts) / best)
        assert placement.chunks > 1 or shares[-1] == pytest.approx(1)
    assert mean(shares) < 1.005
    assert max(shares) < 1.1


def test_equal_layers_are_cut_evenly() -> None:
    for placement in (Placement(4, 2), Placement(4, 2, "v"), Placement(2, 4), Placement(8)):
        assert LayerCosts(0, [1] * 16, 0).balanced(placement) == tuple(range(2, 16, 2))


@pytest.mark.parametrize("placement", ["looped", "v"])
def test_behind_a_large_embedding_a_stage_has_less_of_its_other_chunk(placement: Any) -> None:
    """The chunk with the embedding alone is the dearest, however the rest is cut."""
    chain = nn.Sequential(nn.Linear(15, 8, bias=False), *(nn.Linear(1, 8, bias=False) for _ in range(16)))
    stages = rrfp.split(chain, 2, chunks=2, placement=placement)
    assert [sum(each.numel() for each in stage.parameters()) for stage in stages] == [128, 120]
