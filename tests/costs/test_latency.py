"""Latency models: the documented distributions, independent draws, nothing between chunks of one stage."""

from __future__ import annotations

import numpy as np
import pytest

from rrfp.costs import CostTable, make_costs, with_latency
from rrfp.errors import ConfigError


def drawn(model: str, **options: int) -> CostTable:
    return with_latency(make_costs("llm", 5, 5_000), model, **options)


@pytest.mark.parametrize(("model", "seconds"), [("none", 0), ("constant", 0.001), ("constant:2e-3", 0.002)])
def test_fixed_latencies(model: str, seconds: float) -> None:
    costs = drawn(model)
    assert (costs.latency_forward == seconds).all()
    assert (costs.latency_backward == seconds).all()


def test_wire_is_lognormal() -> None:
    costs = drawn("wire")
    for rows in (costs.latency_forward, costs.latency_backward):
        assert np.median(rows) == pytest.approx(0.0004, rel=0.03)
        assert np.log(rows).std() == pytest.approx(0.5, rel=0.03)


def test_spike_is_the_same_wire_with_spikes() -> None:
    wire, spike = drawn("wire", seed=3), drawn("spike", seed=3)
    for calm, spiky in (
        (wire.latency_forward, spike.latency_forward),
        (wire.latency_backward, spike.latency_backward),
    ):
        added = spiky - calm
        spikes = added[added > 0]
        assert len(spikes) / added.size == pytest.approx(0.21, abs=0.01)
        assert spikes.mean() == pytest.approx(0.015, rel=0.03)
        assert spikes.max() <= 0.030 + 1e-12
        assert (added >= 0).all()


def test_bimodal_has_both_statistics_of_the_papers_messages() -> None:
    costs = drawn("bimodal")
    for rows in (costs.latency_forward, costs.latency_backward):
        p5, p25, p50, p75, p95 = np.quantile(rows, [0.05, 0.25, 0.5, 0.75, 0.95])
        assert (p95 - p5) / p50 == pytest.approx(58.74, rel=0.05)
        assert (p75 - p25) / p50 == pytest.approx(50.80, rel=0.05)
        assert (rows > 0.02).mean() == pytest.approx(0.375, abs=0.01)
        assert rows.max() < 0.032


@pytest.mark.parametrize("model", ["wire", "spike", "bimodal"])
def test_messages_and_directions_draw_on_their_own(model: str) -> None:
    tables = [drawn(model, seed=seed, step=step) for seed, step in ((0, 0), (1, 0), (0, 1))]
    assert drawn(model) == tables[0]
    rows = np.concatenate([t for table in tables for t in (table.latency_forward, table.latency_backward)])
    correlation = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(correlation).max() < 0.08


@pytest.mark.parametrize("model", ["constant", "wire", "spike", "bimodal"])
def test_a_handover_on_one_stage_takes_no_time(model: str) -> None:
    costs = with_latency(make_costs("llm", 2, 3, chunks=2, placement="v"), model)
    assert [bool(row.any()) for row in costs.latency_forward] == [True, False, True]
    assert [bool(row.any()) for row in costs.latency_backward] == [True, False, True]
    assert with_latency(make_costs("llm", 1, 3), model).latency_forward.shape == (0, 3)


def test_durations_are_left_alone() -> None:
    before = make_costs("mllm", 4, 6, split=True, jitter="J2")
    after = with_latency(before, "spike")
    assert with_latency(after, "none") == before


@pytest.mark.parametrize("model", ["", "fast", "wire:1", "none:"])
def test_unknown_models_are_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=f"^latency is '{model}', must be one of: none, constant, constant:SECONDS"):
        drawn(model)


@pytest.mark.parametrize("seconds", ["", "x", "-1", "nan", "inf"])
def test_bad_seconds_are_refused(seconds: str) -> None:
    with pytest.raises(ConfigError, match=f"^latency is 'constant:{seconds}', its seconds must be a finite"):
        drawn(f"constant:{seconds}")
