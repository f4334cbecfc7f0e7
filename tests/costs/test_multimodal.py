"""The multimodal model: the same work and bytes as a chain, a branch and co-located."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rrfp.errors import ConfigError
from rrfp.lab.generators.multimodal import GRAPHS, GraphName, multimodal_costs, multimodal_sizes


def test_eight_stages_hold_two_one_and_five_tenths_of_the_parts() -> None:
    branch = multimodal_costs("branch", 8, 4)
    assert branch.graph is not None
    assert branch.graph.names == ("vision.0", "vision.1", "audio", *(f"lm.{i}" for i in range(5)))
    assert branch.graph.stage_of == tuple(range(8))
    assert set(branch.edges()) == {(0, 1), (1, 3), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7)}


def test_a_stage_whose_share_is_of_two_parts_has_a_virtual_stage_for_each() -> None:
    branch = multimodal_costs("branch", 4, 4)
    assert branch.graph is not None
    named = dict(zip(branch.graph.names, branch.graph.stage_of, strict=True))
    assert named == {"vision": 0, "audio": 1, "lm.0": 1, "lm.1": 2, "lm.2": 3}
    assert multimodal_costs("chain", 4, 4).chunks == 1


def test_a_colocated_model_has_a_share_of_each_part_on_every_stage() -> None:
    costs = multimodal_costs("colocated", 4, 8, seed=3)
    assert [costs.chunks_of(stage) for stage in range(4)] == [3] * 4
    assert np.allclose(costs.work(), costs.work().mean())


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("skip", [False, True])
def test_all_graphs_have_the_same_work_and_bytes_of_each_microbatch(stages: int, skip: bool) -> None:
    tables = [multimodal_costs(graph, stages, 6, skip=skip, seed=2) for graph in ("chain", "branch", "colocated")]
    sizes = multimodal_sizes(6, seed=2)
    for costs in tables:
        assert costs.stages == stages
        assert np.allclose(costs.forward.sum(axis=0) + costs.backward.sum(axis=0), sizes)
        assert costs.held is not None
        assert np.allclose(
            costs.held.sum(axis=0), np.array(sizes) / 3 * 1e8, atol=3 * stages
        )  # a byte where nothing is
    assert np.allclose(tables[0].work(), tables[1].work())


def test_the_work_has_the_mean_of_the_parts_whatever_the_shares() -> None:
    for images, sounds in ((1, 1), (0.6, 0.4), (0.3, 0.2)):
        costs = multimodal_costs("branch", 8, 2000, images=images, sounds=sounds)
        assert np.allclose(costs.forward.mean(axis=1), 0.01, rtol=0.1)


def test_what_has_nothing_to_do_is_skipped_or_visited_for_no_time() -> None:
    skips, visits = (multimodal_costs("branch", 8, 50, skip=skip) for skip in (True, False))
    assert visits.skipped == ()
    absent = {(m, v) for m, skipped in enumerate(skips.skipped) for v in skipped}
    assert absent == {(m, v) for v in (0, 1, 2) for m in range(50) if visits.forward[v, m] == 0}
    assert 0.25 < sum(1 for _, v in absent if v == 0) / 50 < 0.55
    assert np.array_equal(skips.forward, visits.forward)


def test_microbatches_do_not_depend_on_their_number() -> None:
    few, many = (multimodal_costs("colocated", 4, count, seed=1) for count in (3, 9))
    assert np.array_equal(few.forward, many.forward[:, :3])
    assert few.skipped == many.skipped[:3]


def test_split_tables_agree_with_whole_ones() -> None:
    options: dict[str, Any] = {"seed": 4, "latency": "wire", "jitter": "J1"}
    for name in GRAPHS:
        graph: GraphName = name  # type: ignore[assignment]
        split = multimodal_costs(graph, 4, 5, split=True, **options)
        assert split.to_unsplit() == multimodal_costs(graph, 4, 5, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"graph": "tree"}, "graph is 'tree', must be one of: chain, branch, colocated"),
        ({"images": 0}, "images is 0, must be a share of microbatches, more than 0 and at most 1"),
        ({"sounds": 1.5}, "sounds is 1.5, must be a share of microbatches, more than 0 and at most 1"),
        ({"stages": 0}, "stages is 0, must be a whole number >= 1"),
        ({"latency": "x"}, "latency is 'x', must be one of: none, constant, constant:SECONDS, wire, spike, bimodal"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"graph": "branch", "stages": 2, "microbatches": 2}
    with pytest.raises(ConfigError) as caught:
        multimodal_costs(**(arguments | changes))
    assert str(caught.value) == message
