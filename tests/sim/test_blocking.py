"""1F1B with blocking sends: timelines by hand, and what holds against the engine's eager 1F1B on random tables."""

from __future__ import annotations

import numpy as np
import pytest
from batches import examples
from hypothesis import given
from hypothesis import strategies as st
from sim.tables import table, tables

from rrfp.core.usage import WaitCause
from rrfp.costs import CostTable
from rrfp.engine.engine import graph_of, run
from rrfp.engine.record import EngineResult
from rrfp.errors import ConfigError
from rrfp.hints.registry import create_strict
from rrfp.lab.blocking import run_blocking
from rrfp.memory.admission import Limit
from rrfp.model.tasks import Kind
from rrfp.schedules.registry import make_schedule
from rrfp.trace.spans import MessageSpan, WaitSpan


def eager(costs: CostTable) -> EngineResult:
    return run(costs, [create_strict("1f1b") for _ in range(costs.stages)], [Limit()] * costs.stages)


def timeline(result: EngineResult) -> list[str]:
    """A line a stage: every task with its start and end."""
    return [" ".join(f"{span.task}:{span.start:g}-{span.end:g}" for span in stage) for stage in result.spans]


def transfers(result: EngineResult) -> list[str]:
    """Every message with its start and end."""
    assert all(message.sent is not None and message.arrived is not None for message in result.messages)
    return [f"{message.task}:{message.sent:g}-{message.arrived:g}" for message in result.messages]


#: Two stages, two microbatches, F = 1, B = 2, every message 1.
TWO = table([[1, 1], [1, 1]], [[2, 2], [2, 2]], latency=1)


def test_two_microbatches_by_hand() -> None:
    # Stage 1 has posted its receive at 0, so F0 travels 1-2, and stage 0 waits for it before F1: 2-3.
    # Stage 1: F0 2-3, B0 3-5. Its batch (send B0, receive F1) meets stage 0's (send F1, receive B0, since 3) at 5: 5-6.
    # Stage 0: B0 6-8, then receives. Stage 1: F1 6-7, B1 7-9, sends 9-10. Stage 0: B1 10-12.
    result = run_blocking(TWO)
    assert timeline(result) == ["F0@0:0-1 F1@0:2-3 B0@0:6-8 B1@0:10-12", "F0@1:2-3 B0@1:3-5 F1@1:6-7 B1@1:7-9"]
    assert transfers(result) == ["F0@0:1-2", "F1@0:5-6", "B0@1:5-6", "B1@1:9-10"]
    assert result.makespan == 12


def test_eager_sends_save_a_unit_there() -> None:
    # Stage 0: F0 0-1, F1 1-2. Stage 1: F0 2-3, B0 3-5 (back at 6), F1 5-6, B1 6-8 (back at 9). Then 6-8 and 9-11.
    assert timeline(eager(TWO)) == ["F0@0:0-1 F1@0:1-2 B0@0:6-8 B1@0:9-11", "F0@1:2-3 B0@1:3-5 F1@1:5-6 B1@1:6-8"]


def test_waits_are_for_input_while_a_stage_communicates_and_drained_after_its_last_send() -> None:
    result = run_blocking(TWO)
    spans = {cause: [(w.stage, w.start, w.end) for w in result.waits if w.cause is cause] for cause in WaitCause}
    assert spans[WaitCause.INPUT] == [(1, 0, 2), (0, 1, 2), (0, 3, 6), (1, 5, 6), (0, 8, 10), (1, 9, 10)]
    assert spans[WaitCause.DRAINED] == [(1, 10, 12)]
    assert spans[WaitCause.MEMORY] == []


def test_a_batch_ends_with_the_slower_of_its_transfers() -> None:
    # Forwards travel for 2, backwards for 1; F = B = 1. F0 travels 1-3. Stage 0: F1 3-4; stage 1: F0 3-4, B0 4-5.
    # The batch of both starts at 5: B0 is back at 6, F1 there at 7, and both stages go on at 7.
    # Stage 0: B0 7-8, F2 8-9; stage 1: F1 7-8, B1 8-9. The next batch: B1 9-10, F2 9-11.
    # Stage 0: B1 11-12; stage 1: F2 11-12, B2 12-13, sends 13-14. Stage 0: B2 14-15.
    ones = np.ones((2, 3))
    costs = CostTable(2, 1, "looped", 3, ones, ones, None, 2 * ones[:1], ones[:1])
    result = run_blocking(costs)
    assert timeline(result) == [
        "F0@0:0-1 F1@0:3-4 B0@0:7-8 F2@0:8-9 B1@0:11-12 B2@0:14-15",
        "F0@1:3-4 B0@1:4-5 F1@1:7-8 B1@1:8-9 F2@1:11-12 B2@1:12-13",
    ]
    assert transfers(result) == ["F0@0:1-3", "F1@0:5-7", "B0@1:5-6", "F2@0:9-11", "B1@1:9-10", "B2@1:13-14"]


def test_a_rendezvous_costs_time_without_any_latency() -> None:
    # Three stages, no latency. Stage 1 runs F0 1-11, so stage 0 can hand F1 over at 11 only, and starts the long F2
    # then: 11-21. Eager it ran 2-12, in the shadow of F0 on stage 1.
    costs = table([[1, 1, 10], [10, 1, 1], [1, 1, 1]], [[1] * 3] * 3)
    assert timeline(run_blocking(costs))[0] == "F0@0:0-1 F1@0:1-2 F2@0:11-21 B0@0:21-22 B1@0:23-24 B2@0:25-26"
    assert timeline(eager(costs))[0] == "F0@0:0-1 F1@0:1-2 F2@0:2-12 B0@0:14-15 B1@0:16-17 B2@0:18-19"


def test_on_split_costs_the_gradient_leaves_after_the_weight_task() -> None:
    # F0 0-1, there at 2, F 2-3, B 3-4, W 4-6, travels 6-7; B 7-8, W 8-10.
    costs = table([[1], [1]], [[1], [1]], [[2], [2]], latency=1)
    assert timeline(run_blocking(costs)) == ["F0@0:0-1 B0@0:7-8 W0@0:8-10", "F0@1:2-3 B0@1:3-4 W0@1:4-6"]


@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (3, 1)])
@pytest.mark.parametrize("stages", range(1, 6))
def test_equal_stages_without_latency_take_the_textbook_time(stages: int, forward: int, backward: int) -> None:
    for microbatches in range(1, 9):
        costs = table([[forward] * microbatches] * stages, [[backward] * microbatches] * stages)
        assert run_blocking(costs).makespan == (microbatches + stages - 1) * (forward + backward)


@given(tables(most_chunks=1))
@examples(300)
def test_no_task_starts_earlier_than_with_eager_sends(costs: CostTable) -> None:
    blocking, free = run_blocking(costs), eager(costs)
    for ours, theirs in zip(blocking.spans, free.spans, strict=True):
        assert [span.task for span in ours] == [span.task for span in theirs]
        assert all(slow.start >= fast.start for slow, fast in zip(ours, theirs, strict=True))
    assert blocking.makespan >= free.makespan


@given(tables(most_chunks=1))
@examples(200)
def test_both_ends_of_a_transfer_compute_nothing(costs: CostTable) -> None:
    result = run_blocking(costs)
    assert len(result.messages) == 2 * (costs.stages - 1) * costs.microbatches
    for message in result.messages:
        assert message.sent is not None
        assert message.arrived is not None
        assert message.arrived == message.sent + latency_of(costs, message)
        for stage in (message.source, message.target):
            for span in result.spans[stage]:
                assert span.end <= message.sent or span.start >= message.arrived, f"{span} during {message}"


def latency_of(costs: CostTable, message: MessageSpan) -> float:
    matrix = costs.latency_forward if message.task.kind is Kind.F else costs.latency_backward
    return float(matrix[min(message.source, message.target), message.task.microbatch])


@given(tables(most_chunks=1))
@examples(100)
def test_it_holds_what_strict_1f1b_holds(costs: CostTable) -> None:
    schedule, graph = make_schedule("1f1b", graph_of(costs), costs.microbatches), graph_of(costs)
    result = run_blocking(costs)
    assert [tuple(span.task for span in stage) for stage in result.spans] == list(schedule.orders)
    assert [peaks.held for peaks in result.peaks] == [schedule.peak_held(i, graph) for i in range(costs.stages)]
    assert [peaks.received for peaks in result.peaks] == [int(costs.stages > 1)] * costs.stages


@given(tables(most_chunks=1))
@examples(100)
def test_a_lane_is_busy_or_waits_at_every_instant(costs: CostTable) -> None:
    result = run_blocking(costs)
    assert tuple(sorted(result.waits, key=lambda wait: (wait.start, wait.stage))) == result.waits
    for stage, spans in enumerate(result.spans):
        waits: list[WaitSpan] = [wait for wait in result.waits if wait.stage == stage]
        pieces = sorted([(s.start, s.end) for s in spans if s.start < s.end] + [(w.start, w.end) for w in waits])
        starts, ends = [start for start, _ in pieces], [end for _, end in pieces]
        assert [*starts, result.makespan] == [0.0, *ends]


@given(tables(most_chunks=1))
@examples(100)
def test_split_costs_take_as_long_as_the_same_work_unsplit(costs: CostTable) -> None:
    assert run_blocking(costs).makespan == pytest.approx(run_blocking(costs.to_unsplit()).makespan, rel=1e-12)


@given(st.integers(1, 5), st.integers(1, 8), st.integers(0, 2**32 - 1))
@examples(200)
def test_without_latency_and_jitter_it_is_as_fast_as_eager_sends(stages: int, microbatches: int, seed: int) -> None:
    times = np.random.default_rng(seed).integers(0, 20, (2, stages, 1)).astype(float)
    forward, backward = np.repeat(times, microbatches, axis=2)
    none = np.zeros((stages - 1, microbatches))
    costs = CostTable(stages, 1, "looped", microbatches, forward, backward, None, none, none)
    assert run_blocking(costs).makespan == eager(costs).makespan


def test_the_same_costs_give_the_same_result() -> None:
    assert run_blocking(TWO) == run_blocking(TWO)


def test_several_chunks_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        run_blocking(table([[1], [1]], [[1], [1]], chunks=2))
    assert str(caught.value) == "chunks is 2, must be 1 with blocking sends"
