"""What the slot-aware hint and pyramids are for, on fixed workloads that they were not tuned on.

The engine is deterministic, so these are exact numbers, not timings; they stand a few tenths below what was measured.
`benchmarks/hints/run.py` shows the whole grid.
"""

from __future__ import annotations

from functools import cache
from statistics import fmean

import numpy as np
import pytest
from batches import long

from rrfp.costs import CostTable, make_costs, microbatch_sizes
from rrfp.engine.engine import run
from rrfp.hints.registry import create_hint
from rrfp.memory.admission import Limit

MICROBATCHES = 64
SEEDS = (0, 1, 2)


@cache
def table(profile: str, stages: int, jitter: str, seed: int, split: bool) -> CostTable:
    return make_costs(profile, stages, MICROBATCHES, split=split, jitter=jitter, seed=seed)


def sizes(profile: str, stages: int, seed: int, error: float = 0.0) -> list[float]:
    """What a trainer knows, off by a lognormal error."""
    known = np.array(microbatch_sizes(profile, stages, MICROBATCHES, seed=seed))
    return list(known * np.exp(error * np.random.default_rng(seed).standard_normal(MICROBATCHES)))


def gain(
    hint: str,
    limit: str,
    *,
    profile: str = "mllm",
    stages: int = 8,
    jitter: str = "J1",
    split: bool = True,
    error: float = 0.0,
) -> float:
    """Percent less makespan than bfw within the same limit, mean over the seeds."""
    gains = []
    for seed in SEEDS:
        costs = table(profile, stages, jitter, seed, split)
        limits = [Limit.resolve(str(stages) if limit == "n" else limit, i, stages) for i in range(stages)]
        makespans = [
            run(costs, [create_hint(name) for _ in limits], limits, sizes=sizes(profile, stages, seed, error)).makespan
            for name in (hint, "bfw")
        ]
        gains.append(100 * (1 - makespans[0] / makespans[1]))
    return fmean(gains)


@pytest.mark.parametrize(
    ("limit", "jitter", "least"), [("1f1b", "J0", 2.3), ("1f1b", "J3", 3.5), ("n", "J0", 2.1), ("n", "J3", 2.8)]
)
def test_slot_aware_beats_bfw_in_equal_tight_memory(limit: str, jitter: str, least: float) -> None:
    assert gain("slot-aware", limit, jitter=jitter) >= least


@pytest.mark.parametrize(
    ("limit", "jitter", "least"), [("1f1b", "J0", 4.1), ("1f1b", "J3", 4.7), ("n", "J0", 4.1), ("n", "J3", 4.2)]
)
def test_pyramids_add_to_it_where_sizes_are_known(limit: str, jitter: str, least: float) -> None:
    assert gain("slot-aware-pyramid", limit, jitter=jitter) >= least


def test_the_gain_grows_with_the_pipeline() -> None:
    assert gain("slot-aware-pyramid", "n", stages=16, jitter="J0") >= 9.5


def test_sizes_off_by_a_tenth_keep_most_of_the_gain() -> None:
    exact, rough = (gain("slot-aware-pyramid", "n", error=error) for error in (0.0, 0.1))
    assert rough >= 0.75 * exact


@pytest.mark.parametrize("hint", ["slot-aware", "slot-aware-pyramid"])
@pytest.mark.parametrize(
    ("profile", "limit", "split"),
    [("llm", "1f1b", True), ("llm", "n", True), ("llm", "2n", True), ("mllm", "2n", True), ("mllm", "1f1b", False)],
)
@pytest.mark.parametrize("jitter", [long("J0"), "J3"])
def test_where_there_is_nothing_to_gain_nothing_is_lost(
    hint: str, profile: str, limit: str, split: bool, jitter: str
) -> None:
    assert gain(hint, limit, profile=profile, jitter=jitter, split=split) >= -0.1
