"""`simulate_tensor_parallel`: names in, the same figures as for single ranks out, and what coordination cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rrfp.costs import make_costs
from rrfp.errors import ConfigError
from rrfp.lab.cluster.coordination import Agreement, Independent, Leader
from rrfp.lab.cluster.simulation import simulate_tensor_parallel
from rrfp.lab.generators.latency import rank_latencies
from rrfp.lab.simulation import simulate
from rrfp.memory.admission import Limit

COSTS = make_costs("mllm", 4, 12, latency="spike")
KEYS = {"makespan", "lower_bound", "ratio", "busy", "peak", "received_peak", "limit", "order", "start", "tp"}


@pytest.mark.parametrize("coordination", ["leader", "agreement"])
def test_a_group_of_one_is_simulate(coordination: Any) -> None:
    alone = simulate(COSTS, hint="bf", limit="1f1b").to_json()
    told = dict(simulate_tensor_parallel(COSTS, 1, coordination=coordination, hint="bf", limit="1f1b").to_json())
    tp = told.pop("tp")
    assert told == alone
    assert (tp["ranks"], tp["coordination"], tp["rounds_per_task"]) == (1, coordination, 0)
    assert tp["coordination_seconds"] == [0, 0, 0, 0]


def test_a_strict_schedule_is_simulated_with_the_slowest_messages() -> None:
    slowest = rank_latencies(COSTS, "spike", 3, seed=5).slowest(COSTS)
    alone = dict(simulate(slowest, strict="1f1b").to_json())
    simulated = simulate_tensor_parallel(COSTS, 3, strict="1f1b", latency="spike", seed=5)
    told = dict(simulated.to_json())
    assert told.pop("tp")["coordination"] == "independent"
    assert (simulated.coordination, simulated.simulation.costs) == (Independent(), slowest)
    assert told.pop("received_peak") >= alone.pop("received_peak")
    assert told == alone


@pytest.mark.parametrize("coordination", ["leader", "agreement", Leader(depth=2), Agreement(0.001)])
@pytest.mark.parametrize("limit", [None, 2, Limit(2, rule="paper")])
def test_groups_are_never_faster_than_the_bound_of_their_slowest_rank(coordination: Any, limit: Any) -> None:
    costs = make_costs("mllm", 2, 12, chunks=2, latency="spike", split=True)
    simulated = simulate_tensor_parallel(costs, 4, coordination=coordination, hint="bfw", limit=limit)
    told = simulated.to_json()
    assert set(told) == KEYS
    assert told["ratio"] >= 1
    assert told["limit"] == [4, 4] if limit is None else [2, 2]
    tp = told["tp"]
    idle = 2 * told["makespan"] - sum(told["busy"])
    assert sum(tp["coordination_seconds"]) + sum(tp["blocked_seconds"]) == pytest.approx(idle)
    assert tp["coordination_share"] == pytest.approx(sum(tp["coordination_seconds"]) / 2 / told["makespan"])
    assert tp["rounds_per_task"] >= 1


def refusal(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        simulate_tensor_parallel(COSTS, options.pop("tp", 2), **options)
    return str(caught.value)


def test_what_does_not_go_together_is_refused() -> None:
    assert refusal() == refusal(hint="bf", strict="1f1b") == "exactly one of hint and strict is needed"
    alone = "goes with a hint; a strict schedule is the same order on every rank"
    assert refusal(strict="1f1b", limit=3) == f"limit {alone}"
    assert refusal(strict="1f1b", coordination="leader") == f"coordination {alone}"
    assert refusal(hint="bf", coordination="vote") == "coordination is 'vote', must be one of: leader, agreement"
    assert "the limit is in bytes, and the cost table has none" in refusal(hint="bf", limit=Limit(bytes=9))
    sized = replace(COSTS, held=COSTS.forward)
    with pytest.raises(ConfigError, match="limit: bytes must be None, simulated groups count microbatches"):
        simulate_tensor_parallel(sized, 2, hint="bf", limit=Limit(bytes=9))
    assert refusal(hint="bf", tp=0) == "tp is 0, must be a whole number >= 1"
