"""Profiles and `make_costs`: the documented numbers, and the bitwise same table for one seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rrfp.costs import PROFILES, make_costs, microbatch_sizes
from rrfp.errors import ConfigError
from rrfp.model.placement import Layout


def test_llm_is_uniform_but_for_the_last_stage() -> None:
    costs = make_costs("llm", 3, 2, split=True)
    assert costs.weight is not None
    for rows in (costs.forward, costs.backward, costs.weight):
        assert rows == pytest.approx(np.array([[0.010] * 2, [0.010] * 2, [0.012] * 2]))
    assert make_costs("llm", 3, 2).backward == pytest.approx(2 * costs.backward)
    assert not costs.latency_forward.any()
    assert not costs.latency_backward.any()


@pytest.mark.parametrize(("stages", "vision"), [(1, 1), (2, 1), (7, 1), (8, 2), (16, 4)])
def test_mllm_has_a_vision_encoder_in_front(stages: int, vision: int) -> None:
    costs = make_costs("mllm", stages, 6, seed=3)
    plain = costs.forward / 0.010
    plain[-1] /= 1.2
    assert plain[:vision] == pytest.approx(np.tile(plain[0], (vision, 1)))
    assert plain[vision:] == pytest.approx(np.tile(plain[-1], (stages - vision, 1)))
    assert costs.backward == pytest.approx(2 * costs.forward)
    if stages > 1:
        assert not np.isclose(plain[0], plain[-1]).any()


def test_mllm_factors_have_the_documented_distribution() -> None:
    factors = make_costs("mllm", 4, 20_000, seed=1).forward / 0.010
    vision, length = factors[0] / 1.3, factors[1]
    for factor, sigma in ((vision, 0.6), (length, 0.25)):
        assert np.log(factor).mean() == pytest.approx(-sigma * sigma / 2, abs=0.02)
        assert np.log(factor).std() == pytest.approx(sigma, abs=0.02)
        assert factor.min() >= 0.2 - 1e-12
        assert factor.max() <= 5 + 1e-12
    assert vision.max() == pytest.approx(5)
    assert vision.min() == pytest.approx(0.2)
    assert abs(np.corrcoef(vision, length)[0, 1]) < 0.05


def factors_of(profile: str, stages: int, microbatches: int = 20_000) -> Any:
    """F over a plain stage's, without the output layer."""
    factors = make_costs(profile, stages, microbatches, seed=1).forward / 0.010
    factors[-1] /= 1.8 if profile == "head" else 1.2
    return factors


def test_modalities_vary_on_their_own() -> None:
    factors = factors_of("modalities", 8)
    vision, audio, text = factors[0] / 1.3, factors[2] / 1.2, factors[4]
    for rows, factor in ((factors[:2] / 1.3, vision), (factors[2:4] / 1.2, audio), (factors[4:], text)):
        assert rows == pytest.approx(np.tile(factor, (len(rows), 1)))
        assert factor.mean() == pytest.approx(1, abs=0.02)
    assert np.abs(np.corrcoef([vision, audio, text]) - np.eye(3)).max() < 0.05


def test_video_comes_in_bursts() -> None:
    vision = factors_of("video", 4, 40_000)[0] / 1.3
    assert vision.mean() == pytest.approx(1, rel=0.03)
    long = vision > 1.15  # two deviations above the one mean, and two below the other
    assert long.mean() == pytest.approx(0.08 / (0.08 + 0.25), abs=0.02)
    assert long[1:][long[:-1]].mean() == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize(("profile", "longest", "distinct"), [("zipf", 5.4875, 30), ("bimodal", 7.5 / 2.625, 2)])
def test_one_size_orders_all_stages(profile: str, longest: float, distinct: int) -> None:
    factors = factors_of(profile, 3)
    assert factors == pytest.approx(np.tile(factors[0], (3, 1)))
    assert factors[0].mean() == pytest.approx(1, rel=0.03)
    assert factors[0].max() == pytest.approx(longest, rel=1e-4)
    assert len(np.unique(factors[0].round(6))) == distinct


def test_moe_varies_by_stage() -> None:
    factors = factors_of("moe", 4)
    assert np.log(factors).std(axis=1) == pytest.approx([0.2] * 4, abs=0.01)
    assert np.abs(np.corrcoef(factors) - np.eye(4)).max() < 0.05


@pytest.mark.parametrize(("profile", "slow"), [("straggler", [1, 1, 1.5, 1]), ("head", [1, 1, 1, 1])])
def test_stages_differ_by_a_constant(profile: str, slow: list[float]) -> None:
    factors = factors_of(profile, 4)
    assert factors == pytest.approx(np.outer(slow, factors[0]))
    assert factors[0].mean() == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("placement", ["looped", "v"])
def test_a_slow_machine_is_slow_wherever_layers_are_placed_and_holds_no_more(placement: Layout) -> None:
    cut: dict[str, Any] = {"chunks": 2, "placement": placement, "split": True, "sized": True, "seed": 2}
    slow, even = (make_costs(profile, 4, 6, **cut) for profile in ("straggler", "head"))
    assert slow.held is not None
    assert even.held is not None
    for stage in range(4):
        for v in slow.virtual_stages_of(stage)[: 1 if stage == slow.stage_of(7) else 2]:  # the last has another head
            assert slow.forward[v] == pytest.approx(even.forward[v] * (1.5 if stage == 2 else 1))
            assert slow.held[v] == pytest.approx(even.held[v])


@pytest.mark.parametrize("placement", ["looped", "v"])
def test_chunks_cut_the_layers_of_each_stage_but_not_the_output_layer(placement: Layout) -> None:
    whole = make_costs("mllm", 4, 3, split=True)
    costs = make_costs("mllm", 4, 3, chunks=3, placement=placement, split=True)
    assert costs.weight is not None
    assert whole.weight is not None
    for cut, full in ((costs.forward, whole.forward), (costs.backward, whole.backward), (costs.weight, whole.weight)):
        layers = full.copy()
        layers[-1] /= 1.2
        expected = np.repeat(layers, 3, axis=0) / 3  # in depth order, wherever they are placed
        expected[-1] += 0.2 * layers[-1]
        assert cut == pytest.approx(expected)
    assert costs.work().sum() == pytest.approx(whole.work().sum())


def test_a_v_lays_the_first_layers_and_the_last_on_one_stage() -> None:
    """On one chunk only stage 0 has vision; in a V the stages 0 and 1 have half of it each."""
    vision, text, *_ = make_costs("mllm", 4, 1).forward[:, 0]
    costs = make_costs("mllm", 4, 1, chunks=2, placement="v")
    work = [sum(costs.forward[v, 0] for v in costs.virtual_stages_of(stage)) for stage in range(4)]
    mixed = vision / 2 + text / 2
    assert work == pytest.approx([mixed + 0.2 * text, mixed, text, text])


def test_split_and_unsplit_agree_to_the_last_bit() -> None:
    options: dict[str, Any] = {"jitter": "J3", "latency": "spike", "seed": 5, "step": 2}
    for profile in PROFILES:
        split, unsplit = (make_costs(profile, 5, 9, split=s, **options) for s in (True, False))
        assert split.to_unsplit() == unsplit
        assert split.weight is not None


@pytest.mark.parametrize("profile", PROFILES)
def test_tables_depend_on_seed_and_step_alone(profile: str) -> None:
    first = make_costs(profile, 4, 8, seed=1, step=1, jitter="J2", latency="wire")
    assert make_costs(profile, 4, 8, seed=1, step=1, jitter="J2", latency="wire") == first
    for seed, step in ((2, 1), (1, 2), (1 + 2**32, 1)):
        assert make_costs(profile, 4, 8, seed=seed, step=step, jitter="J2", latency="wire") != first
    longer = make_costs(profile, 4, 12, seed=1, step=1, jitter="J2", latency="wire")
    assert np.array_equal(longer.forward[:, :8], first.forward)
    assert np.array_equal(longer.backward[:, :8], first.backward)


@pytest.mark.parametrize(
    ("arguments", "digest"),
    [
        ({"profile": "llm", "stages": 4, "microbatches": 24}, "ced60d9496f00440"),
        (
            {
                "profile": "mllm",
                "stages": 8,
                "microbatches": 64,
                "chunks": 2,
                "placement": "v",
                "split": True,
                "seed": 42,
                "step": 3,
                "jitter": "J3",
                "latency": "spike",
            },
            "ff4e0e1a747eb3d0",
        ),
    ],
)
def test_golden_digests(arguments: dict[str, Any], digest: str) -> None:
    """Published numbers are only comparable while these hold: a change here is a change of every benchmark."""
    assert make_costs(**arguments).digest() == digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"profile": "gpt"},
            "profile is 'gpt', must be one of: llm, mllm, modalities, video, zipf, bimodal, moe, straggler, head",
        ),
        ({"stages": 0}, "stages is 0, must be a whole number >= 1"),
        ({"microbatches": 2.5}, "microbatches is 2.5, must be a whole number >= 1"),
        ({"chunks": 0}, "chunks is 0, must be a whole number >= 1"),
        ({"placement": "w"}, "placement is 'w', must be one of: looped, v"),
        ({"seed": -1}, "seed is -1, must be a whole number >= 0"),
        ({"step": None}, "step is None, must be a whole number >= 0"),
        ({"jitter": "J4"}, "jitter is 'J4', must be one of: J0, J1, J2, J3"),
        ({"jitter": ["J0"]}, "jitter is ['J0'], must be one of: J0, J1, J2, J3"),
        (
            {"latency": "slow"},
            "latency is 'slow', must be one of: none, constant, constant:SECONDS, wire, spike, bimodal",
        ),
    ],
)
def test_bad_arguments_name_what_is_allowed(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"profile": "llm", "stages": 2, "microbatches": 2} | changes
    with pytest.raises(ConfigError) as caught:
        make_costs(**arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize("profile", PROFILES)
def test_sizes_are_the_time_of_each_microbatch_without_jitter_and_latency(profile: str) -> None:
    costs = make_costs(profile, 5, 7, split=True, seed=3, step=2)
    assert costs.weight is not None
    total = (costs.forward + costs.backward + costs.weight).sum(axis=0)
    assert microbatch_sizes(profile, 5, 7, seed=3, step=2) == pytest.approx(total.tolist())


def test_microbatches_of_equal_costs_have_equal_sizes() -> None:
    assert len(set(microbatch_sizes("llm", 7, 20))) == 1


def test_sizes_refuse_what_costs_refuse() -> None:
    with pytest.raises(ConfigError, match="profile is 'gpt', must be one of: llm, mllm, modalities, video"):
        microbatch_sizes("gpt", 2, 2)
