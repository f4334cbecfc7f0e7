"""Theorem 6.1: BF stays within its bound while memory is ample, and passes it under a tight limit."""

from __future__ import annotations

import numpy as np
import pytest
from batches import batches
from sim.shell.theorem import theorem_6_1
from sim.tables import table

from rrfp.costs import CostTable
from rrfp.engine.engine import run
from rrfp.errors import ConfigError
from rrfp.hints.priorities import BackwardForward
from rrfp.memory.admission import Limit

INSTANCES, QUICK = 1000, 250


def bf(costs: CostTable, limit: int | None) -> float:
    stages = range(costs.stages)
    return run(costs, [BackwardForward() for _ in stages], [Limit(limit)] * costs.stages).makespan


def instance(seed: int) -> CostTable:
    """Up to 6 stages and 10 microbatches: arbitrary times, few levels with many ties, one level a stage, extremes."""
    random = np.random.default_rng(seed)
    stages, microbatches = (int(random.integers(1, most + 1)) for most in (6, 10))
    shape, style = (stages, microbatches), seed % 4

    def matrix() -> np.ndarray:
        if style == 0:
            return random.exponential(1.0, shape)
        if style == 1:
            return random.integers(1, 5, shape).astype(float)
        if style == 2:
            return np.repeat(random.exponential(1.0, (stages, 1)), microbatches, axis=1)
        return random.choice([0.0, 1.0, 30.0], shape)

    none = np.zeros((stages - 1, microbatches))
    return CostTable(stages, 1, "looped", microbatches, matrix(), matrix(), None, none, none)


@pytest.mark.parametrize("first", batches(INSTANCES, QUICK, QUICK))
@pytest.mark.parametrize("spare", [None, 0, 3], ids=["unlimited", "limit M", "limit M + 3"])
def test_bf_stays_within_the_bound_on_random_instances(spare: int | None, first: int) -> None:
    for seed in range(first, first + QUICK):
        costs = instance(seed)
        limit = None if spare is None else costs.microbatches + spare
        assert bf(costs, limit) <= theorem_6_1(costs) * (1 + 1e-12), f"instance {seed}: {costs!r}"


def test_the_bound_is_tight_where_the_last_stage_is_the_slowest() -> None:
    # F = 1+2+2+2 = 7, B = 3+3+3+1 = 10, no excess. Stage 1 is busy from 1: 3 x (2 + 3), and B2 on stage 0 takes 1 more.
    costs = table([[1] * 3, [2] * 3], [[1] * 3, [3] * 3])
    assert theorem_6_1(costs) == 17
    assert bf(costs, None) == 17


def test_every_term_of_the_bound_by_hand() -> None:
    # Forward only: stage 0 ends 4, 5, 11; stage 1 ends 5, 8, 12: F = 12. Microbatches 1, 2: (3 - 3) + (6 - 1) = 5.
    # Backward only: stage 1 ends 1, 2, 7; stage 0 ends 3, 7, 8: B = 8. Microbatches 0, 1: (2 - 1) + (4 - 1) = 4.
    costs = table([[4, 1, 6], [1, 3, 1]], [[2, 4, 1], [1, 1, 5]])
    assert theorem_6_1(costs) == 12 + 8 + 5 + 4


def test_a_limit_of_one_passes_the_bound() -> None:
    # All times 1, two stages, two microbatches: F = B = 3 and no excess, so 6. Holding one microbatch, stage 0 waits
    # for its backward before the next forward: F0 there 0-1, 1-2, B0 back 2-3, 3-4, then the same for 1: 8.
    costs = table([[1, 1], [1, 1]], [[1, 1], [1, 1]])
    assert theorem_6_1(costs) == 6
    assert [bf(costs, limit) for limit in (1, 2, None)] == [8, 6, 6]


def test_a_limit_below_the_number_of_stages_passes_the_bound_on_equal_stages() -> None:
    # All times 1, three stages, three microbatches: F = B = 5, so 10. Holding two, stage 0 starts F2 when B0 is back:
    # F0 0-1, 1-2, 2-3, B0 3-4, 4-5, 5-6; F2 6-7, 7-8, 8-9, B2 9-10, 10-11, 11-12.
    costs = table([[1] * 3] * 3, [[1] * 3] * 3)
    assert theorem_6_1(costs) == 10
    assert [bf(costs, limit) for limit in (2, 3)] == [12, 10]


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (table([[1], [1]], [[1], [1]], chunks=2), "Theorem 6.1 takes 1 chunk a stage, the costs have 2"),
        (
            table([[1]], [[1]], [[1]]),
            "Theorem 6.1 takes unsplit backward, the costs are split (see CostTable.to_unsplit)",
        ),
        (
            table([[1], [1]], [[1], [1]], latency=0.5),
            "Theorem 6.1 takes no communication, the costs have latencies above 0",
        ),
    ],
)
def test_costs_outside_the_theorem_are_refused(costs: CostTable, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        theorem_6_1(costs)
    assert str(caught.value) == message
