"""Simulated limits on bytes: kept to the byte, and beside a limit on microbatches at the same peak bytes."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from sim.shell.runs import run_shell_steps

from rrfp import Hint
from rrfp.costs import CostTable, make_costs, microbatch_sizes
from rrfp.engine.engine import run
from rrfp.errors import ConfigError
from rrfp.hints.registry import create_hint
from rrfp.lab.generators.multimodal import GraphName, multimodal_costs, multimodal_sizes
from rrfp.lab.simulation import Simulation, simulate
from rrfp.lab.sweep.experiment import Experiment as Run
from rrfp.lab.sweep.experiment import SimulatedMethod
from rrfp.lab.sweep.workloads import Workload
from rrfp.memory.admission import Limit
from rrfp.model.tasks import Mode


def uneven(seed: int) -> CostTable:
    """Eight stages; one microbatch in four takes, and holds, seven times as much as the others."""
    factors = np.where(np.random.default_rng(seed).random(32) < 0.25, 2.8, 0.4)
    rows = np.tile(factors, (8, 1))
    no_latency = np.zeros((7, 32))
    return CostTable(8, 1, "looped", 32, rows, rows, rows, no_latency, no_latency, 1000 * rows)


@pytest.mark.parametrize("limit", ["1f1b", "n"])
def test_own_bytes_are_faster_than_counting_at_the_same_peak_bytes(limit: str) -> None:
    gains = []
    for seed in range(6):
        costs = uneven(seed)
        sizes = costs.forward[0].tolist()
        counted = simulate(costs, hint="slot-aware-pyramid", limit=limit, sizes=sizes)
        by_bytes = simulate(costs, hint="slot-aware-pyramid", limit=f"bytes:{limit}", sizes=sizes)
        most = tuple(peaks.num_bytes for peaks in counted.peaks)
        assert by_bytes.limits_in_bytes == most
        assert all(peaks.num_bytes <= bytes_ for peaks, bytes_ in zip(by_bytes.peaks, most, strict=True))
        gains.append(1 - by_bytes.makespan / counted.makespan)
    assert fmean(gains) > 0.05
    assert min(gains) > -0.01


def test_without_sizes_the_inputs_of_each_forward_show_them() -> None:
    costs = uneven(1)
    limit = 1000 * 2.8 * 3
    result = simulate(costs, hint="f-priority", limit=Limit(bytes=int(limit)))
    assert max(peaks.num_bytes for peaks in result.peaks) <= limit
    assert max(peaks.held for peaks in result.peaks) > 6, "small ones fit in number"


@pytest.mark.parametrize("hint", ["bf", "slot-aware-pyramid", "f-priority"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_limit_below_one_microbatch_runs_one_after_the_other(hint: str, chunks: int) -> None:
    costs = make_costs("mllm", 3, 5, chunks=chunks, placement="v", split=True, sized=True)
    result = simulate(costs, hint=hint, limit=Limit(bytes=1))
    assert [peaks.held for peaks in result.peaks] == [chunks] * 3


def test_where_both_are_given_both_hold() -> None:
    costs = uneven(2)
    result = simulate(costs, hint="f-priority", limit=Limit(4, 6000))
    assert max(peaks.held for peaks in result.peaks) == 4
    assert max(peaks.num_bytes for peaks in result.peaks) <= 6000


def test_the_answer_shows_the_bytes() -> None:
    answer = simulate(uneven(3), hint="bf", limit="bytes:1f1b").to_json()
    assert answer["limit"] is None
    assert all(held <= most for held, most in zip(answer["peak_bytes"], answer["limit_bytes"], strict=True))
    assert "peak_bytes" not in simulate(uneven(3), hint="bf", limit="1f1b").to_json()


def test_a_workload_has_bytes_where_a_method_counts_them_and_the_same_times() -> None:
    workload = Workload(profile="mllm", stages=4, microbatches=8, split=True, jitter="J2", seed=3)
    counted, by_bytes = (
        Run(workload, SimulatedMethod(hint="bf", limit=limit)).simulate() for limit in ("n", "bytes:n")
    )
    assert isinstance(counted, Simulation)
    assert isinstance(by_bytes, Simulation)
    assert counted.costs.held is None
    assert by_bytes.costs.held is not None
    assert replace(by_bytes.costs, held=None) == counted.costs
    planned = make_costs("mllm", 4, 8, split=True, seed=3)
    assert by_bytes.costs.held == pytest.approx(planned.forward * 1e8)
    assert microbatch_sizes("mllm", 4, 8, seed=3) == pytest.approx(by_bytes.costs.held.sum(axis=0) * 3e-8)


def test_a_limit_on_bytes_is_checked_as_the_limit_in_it() -> None:
    with pytest.raises(ConfigError, match="limit is 'many', must be"):
        SimulatedMethod(hint="bf", limit="bytes:many")
    workload = Workload(profile="llm", stages=2, microbatches=2, tp=2)
    with pytest.raises(ConfigError, match="limit is 'bytes:n', must count microbatches with tp"):
        Run(workload, SimulatedMethod(hint="bf", limit="bytes:n")).simulate()


@pytest.mark.parametrize("graph", ["chain", "branch"])
@pytest.mark.parametrize("seed", [1, 3])
def test_steps_with_messages_and_a_history_take_as_long_as_simulated(graph: GraphName, seed: int) -> None:
    """Each forward leaves an output of the same size beside what it holds, in proportion to nothing.

    On the first stages microbatches without an image hold nothing else.
    """
    costs, sizes = multimodal_costs(graph, 4, 16, skip=False, seed=seed), multimodal_sizes(16, seed=seed)
    limits = [Limit(bytes=8_000_000)] * 4

    def hints() -> list[Hint]:
        return [create_hint("bf") for _ in limits]

    simulated = run(costs, hints(), limits, sizes=sizes).makespan
    steps = run_shell_steps(costs, hints(), limits, [Mode.TRAIN] * 3, sizes=sizes, output_bytes=50_000)
    assert steps[0].makespan < 1.1 * simulated
    assert all(step.makespan < 1.05 * simulated for step in steps[1:])
    assert all(peaks.num_bytes <= 8_000_000 for step in steps for peaks in step.peaks)
