"""Latencies of tensor-parallel ranks: rank 0 is the table's own, the others draw on their own from the same model."""

from __future__ import annotations

import numpy as np
import pytest

from rrfp.costs import make_costs
from rrfp.errors import ConfigError
from rrfp.lab.generators.latency import RankLatencies, rank_latencies

SPIKY = make_costs("mllm", 4, 500, seed=3, latency="spike")


@pytest.mark.parametrize("model", ["spike", "wire", "shuffled", "constant:0.5"])
def test_rank_0_travels_as_the_table_says(model: str) -> None:
    drawn = rank_latencies(SPIKY, model, 3, seed=3)
    assert (drawn.ranks, drawn.forward.shape, drawn.backward.shape) == (3, (3, 500, 3), (3, 500, 3))
    assert (drawn.forward[:, :, 0] == SPIKY.latency_forward).all()
    assert (drawn.backward[:, :, 0] == SPIKY.latency_backward).all()


def test_ranks_draw_from_the_same_distribution_and_each_on_its_own() -> None:
    drawn = rank_latencies(SPIKY, "spike", 4, seed=3)
    by_rank = np.concatenate([drawn.forward, drawn.backward]).reshape(-1, 4)
    assert np.abs(np.corrcoef(by_rank.T) - np.eye(4)).max() < 0.08
    assert by_rank.mean(axis=0) == pytest.approx(by_rank.mean(), rel=0.1)
    assert np.quantile(by_rank, 0.4, axis=0) == pytest.approx(np.quantile(by_rank, 0.4), rel=0.1)


@pytest.mark.parametrize("model", ["spike", "shuffled"])
def test_a_rank_draws_the_same_however_many_there_are_and_differently_by_seed_and_step(model: str) -> None:
    few, many = (rank_latencies(SPIKY, model, tp, seed=3) for tp in (2, 5))
    assert (few.forward == many.forward[:, :, :2]).all()
    for other in (rank_latencies(SPIKY, model, 2, seed=4), rank_latencies(SPIKY, model, 2, seed=3, step=1)):
        assert (few.forward[:, :, 1] != other.forward[:, :, 1]).mean() > 0.9


def test_shuffled_keeps_what_each_edge_took() -> None:
    drawn = rank_latencies(SPIKY, "shuffled", 3)
    for cube in (drawn.forward, drawn.backward):
        ordered = np.sort(cube, axis=1)
        assert (ordered == ordered[:, :, :1]).all()
        assert (cube[:, :, 1] != cube[:, :, 0]).mean() > 0.9


def test_constant_models_leave_nothing_to_draw() -> None:
    costs = make_costs("llm", 3, 4, latency="constant")
    drawn = rank_latencies(costs, "constant", 3)
    assert (drawn.forward == 0.001).all()
    assert (drawn.backward == 0.001).all()


@pytest.mark.parametrize("model", ["spike", "shuffled"])
def test_a_handover_on_one_stage_takes_no_time_on_any_rank(model: str) -> None:
    costs = make_costs("llm", 2, 3, chunks=2, placement="v", latency="spike")
    drawn = rank_latencies(costs, model, 3)
    assert [bool(cube.any()) for cube in drawn.forward] == [True, False, True]
    assert rank_latencies(make_costs("llm", 1, 3), model, 2).forward.shape == (0, 3, 2)


def test_the_slowest_rank_makes_the_groups_table() -> None:
    drawn = rank_latencies(SPIKY, "spike", 3, seed=3)
    slowest = drawn.slowest(SPIKY)
    assert (slowest.latency_forward == drawn.forward.max(axis=2)).all()
    assert (slowest.latency_backward == drawn.backward.max(axis=2)).all()
    assert (slowest.forward == SPIKY.forward).all()
    assert RankLatencies.same_on_all(SPIKY, 3).slowest(SPIKY) == SPIKY


def test_cubes_are_copied_and_read_only() -> None:
    given = np.zeros((1, 2, 2))
    drawn = RankLatencies(given, given)
    given[:] = 1
    assert not drawn.forward.any()
    with pytest.raises(ValueError, match="read-only"):
        drawn.backward[0, 0, 0] = 1


@pytest.mark.parametrize(
    ("forward", "backward", "message"),
    [
        (np.zeros((1, 2)), np.zeros((1, 2)), "forward has shape (1, 2), must be edges x microbatches x ranks"),
        (np.zeros((1, 2, 0)), np.zeros((1, 2, 0)), "forward has shape (1, 2, 0), must be edges x microbatches x ranks"),
        (np.zeros((1, 2, 3)), np.zeros((1, 2, 4)), "backward has shape (1, 2, 4), must be forward's (1, 2, 3)"),
        (np.zeros((1, 2, 3)), np.full((1, 2, 3), -1.0), "backward must hold finite numbers >= 0 only"),
        (np.full((1, 2, 3), np.nan), np.zeros((1, 2, 3)), "forward must hold finite numbers >= 0 only"),
    ],
)
def test_bad_cubes_are_refused(forward: np.ndarray, backward: np.ndarray, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RankLatencies(forward, backward)
    assert str(caught.value) == message


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match="latency is 'fast', must be one of: none, constant, constant:SECONDS, wire, spike, bimodal, shuffled",
    ):
        rank_latencies(SPIKY, "fast", 2)
    with pytest.raises(ConfigError, match="tp is 0, must be a whole number >= 1"):
        rank_latencies(SPIKY, "spike", 0)
    with pytest.raises(ConfigError, match="latencies have shape"):
        RankLatencies(np.zeros((1, 2, 2)), np.zeros((1, 2, 2))).slowest(SPIKY)
