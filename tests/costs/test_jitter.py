"""Jitter against the formula of Table 6, written out task by task."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rrfp.costs import JITTER_LEVELS, CostTable, make_costs, with_jitter

LEVELS = ["J1", "J2", "J3"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("split", [False, True])
def test_delays_follow_the_formula(level: str, split: bool) -> None:
    costs = make_costs("mllm", 3, 40, seed=8, split=split)
    jittered = with_jitter(costs, level, seed=8, step=4)
    plain = costs.to_unsplit()
    p, floor, alpha = {"J1": (0.1, 5e-3, 0.5), "J2": (0.2, 10e-3, 1.0), "J3": (0.3, 15e-3, 1.5)}[level]
    for v in range(3):
        stream = np.random.SeedSequence(8, spawn_key=(1, 4, v))  # 1 is jitter; then the step and the virtual stage
        uniforms = np.random.Generator(np.random.PCG64(stream)).random((40, 2, 2)).tolist()
        e = None
        for m in range(40):
            for kind, name in enumerate("FB"):
                c = plain.duration(name, v, m)
                e = c if e is None else 0.9 * e + 0.1 * c
                hit, amount = uniforms[m][kind]
                delay = alpha * max(floor, e) * (0.5 + amount) if hit < p else 0.0
                before, after = (t.duration(name, v, m) for t in (costs, jittered))
                assert after == before + delay
    assert jittered.split == split
    if jittered.weight is not None and costs.weight is not None:
        assert np.array_equal(jittered.weight, costs.weight)


@pytest.mark.parametrize("chunks", [2, 3])
def test_the_floor_is_a_stages_and_its_chunks_share_it(chunks: int) -> None:
    """Tasks far below the floor: each delay is a chunk's part of the floor, so a stage is delayed as by one chunk."""
    short = [[1e-6] * 400] * (2 * chunks)
    none = [[0.0] * 400] * (2 * chunks - 1)
    costs = CostTable(2, chunks, "looped", 400, short, short, None, none, none)  # type: ignore[arg-type]
    delays = with_jitter(costs, "J3", seed=1).forward - costs.forward
    assert delays[delays > 0].max() == pytest.approx(1.5 * 0.015 * 1.5 / chunks, rel=0.02)
    assert delays.mean() * chunks == pytest.approx(0.3 * 1.5 * 0.015, rel=0.1)


def test_j0_changes_nothing() -> None:
    costs = make_costs("mllm", 3, 9)
    assert with_jitter(costs, "J0", seed=1) == costs


def test_a_hit_stays_a_hit_and_grows_with_the_level() -> None:
    costs = make_costs("llm", 4, 200)
    delays = [with_jitter(costs, level, seed=2).forward - costs.forward for level in LEVELS]
    for weaker, stronger in itertools.pairwise(delays):
        assert (stronger[weaker > 0] > weaker[weaker > 0]).all()
    shares = [(delay > 0).mean() for delay in delays]
    assert shares == pytest.approx([JITTER_LEVELS[level].probability for level in LEVELS], abs=0.05)


def test_costs_do_not_decide_who_is_hit() -> None:
    """The same uniforms serve every method, profile and number of microbatches."""
    hits = []
    for profile in ("llm", "mllm"):
        costs = make_costs(profile, 4, 30)
        hits.append(with_jitter(costs, "J3", seed=2).backward > costs.backward)
    assert np.array_equal(hits[0], hits[1])


def test_virtual_stages_and_steps_are_hit_apart() -> None:
    costs = make_costs("llm", 2, 30, chunks=2)
    hits = [with_jitter(costs, "J3", step=step).forward > costs.forward for step in (0, 1)]
    rows = {row.tobytes() for hit in hits for row in hit}
    assert len(rows) == 8
