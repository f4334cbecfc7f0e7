"""Tensor-parallel groups against timelines worked out by hand: who waits for whom, and what coordination costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sim.tables import table
from sim.tp_cases import FirstCome, latencies

from rrfp import Hint, View
from rrfp.core.ready_set import ReadySet
from rrfp.core.stage_core import StageCore
from rrfp.core.usage import WaitCause
from rrfp.costs import make_costs
from rrfp.engine.engine import run
from rrfp.errors import ConfigError, DeadlockError, ProtocolError
from rrfp.hints.registry import create_hint, create_strict
from rrfp.lab.cluster.coordination import Agreement, Coordination, GroupCounts, Independent, Leader
from rrfp.lab.cluster.simulation import TensorParallelResult, run_tensor_parallel
from rrfp.lab.generators.latency import RankLatencies, rank_latencies
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Task
from rrfp.trace.spans import WaitSpan

#: Two stages, one microbatch, every task takes 1.
COSTS = table([[1], [1]], [[1], [1]])
#: F takes 0.5 to rank 0 and 1 to rank 1; B takes 1 and 0.5.
CROSSED = latencies([[[0.5, 1.0]]], [[[1.0, 0.5]]])


def bf() -> Hint:
    return create_hint("bf")


def groups(coordination: Coordination, ranks: RankLatencies = CROSSED) -> TensorParallelResult:
    return run_tensor_parallel(COSTS, ranks, bf, [Limit()] * 2, coordination)


def timeline(result: TensorParallelResult) -> list[str]:
    """A line a stage: every task with its start."""
    return [" ".join(f"{span.task}:{span.start:g}" for span in stage) for stage in result.spans]


def test_a_leader_waits_for_the_last_report_and_followers_for_the_order() -> None:
    # Control takes 0.25. F0@0 ordered 0, starts 0.25, ends 1.25; on ranks 0 and 1 of stage 1 at 1.75 and 2.25, reported
    # 2.5, ordered there 2.75, ends 3.75; B0@1 ordered 4, ends 5; on stage 0 at 6 and 5.5 (reported 5.75), ordered 6.25.
    result = groups(Leader(depth=1, control_seconds=0.25))
    assert timeline(result) == ["F0@0:0.25 B0@0:6.25", "F0@1:2.75 B0@1:4"]
    assert result.makespan == 7.25
    # Ready on all ranks: F0@0 at 0, B0@0 at 6; F0@1 at 2.25, B0@1 at 3.75.
    assert result.coordination == (0.5, 0.75)
    assert result.blocked == (4.75, 4.5)
    assert result.coordination_share == 1.25 / 2 / 7.25
    assert [wait for wait in result.waits if wait.stage == 0] == [
        WaitSpan(0, WaitCause.ORDER, 0, 0.25),
        WaitSpan(0, WaitCause.INPUT, 1.25, 6),
        WaitSpan(0, WaitCause.ORDER, 6, 6.25),
    ]
    # Two orders a group, and a report for each task that reads a message.
    assert result.counts == (GroupCounts(rounds=2, messages=3), GroupCounts(rounds=2, messages=3))
    assert (result.rounds_per_task, result.failed_rounds_per_task, result.messages_per_task) == (1, 0, 1.5)


def test_a_leader_two_ahead_hides_an_order_behind_compute() -> None:
    # As above until 2.5, when the leader of stage 1 orders F0@1 and B0@1: 2.75-3.75 and 3.75-4.75. B0@0 reaches rank 0
    # of stage 0 at 5.75 and starts at 6.
    result = groups(Leader(depth=2, control_seconds=0.25))
    assert timeline(result) == ["F0@0:0.25 B0@0:6", "F0@1:2.75 B0@1:3.75"]
    assert (result.makespan, result.coordination) == (7, (0.5, 0.5))


def test_a_round_of_agreement_waits_for_the_last_proposal() -> None:
    # A message takes 0.25. Rank 1 proposes F0@0 at 0, rank 0 announces it at 0.25: 0.5-1.5. On stage 1 rank 0 proposes
    # F0@1 at 2, rank 1 at 2.5, heard at 2.75: 3-4; both propose B0@1 at 4: 4.5-5.5. B0@0 is ready on rank 1 of stage 0
    # at 6, heard at 6.25, and on rank 0 at 6.5, which has only to announce it: starts 6.75.
    result = groups(Agreement(gather_seconds=0.5))
    assert timeline(result) == ["F0@0:0.5 B0@0:6.75", "F0@1:3 B0@1:4.5"]
    # Ready on all ranks: F0@0 at 0, B0@0 at 6.5; F0@1 at 2.5, B0@1 at 4.
    assert (result.makespan, result.coordination) == (7.75, (0.75, 1))
    # A round is a proposal and an outcome.
    assert result.counts == (GroupCounts(2, 0, 4), GroupCounts(2, 0, 4))
    assert (result.rounds_per_task, result.failed_rounds_per_task, result.messages_per_task) == (1, 0, 2)


#: Two microbatches: stage 0 forwards at 0-1 and 1-2 where messages take no time.
TWO = table([[1, 1], [1, 1]], [[1, 1], [1, 1]])


def test_ranks_that_see_different_heads_leave_a_ready_task_lying() -> None:
    # On stage 1 rank 0 has F1 at 2 and F0 at 4, rank 1 has F0 at 1 and F1 at 3. At 2 they propose F1 and F0. At 3 F1 is
    # ready on both, and no pick has changed. Both pick F0 at 4.
    ranks = latencies([[[3.0, 0.0], [0.0, 1.0]]], [[[0.0, 0.0]] * 2])
    agreed = run_tensor_parallel(TWO, ranks, bf, [Limit()] * 2, Agreement(gather_seconds=0))
    led = run_tensor_parallel(TWO, ranks, bf, [Limit()] * 2, Leader(control_seconds=0))
    assert timeline(agreed)[1] == "F0@1:4 B0@1:5 F1@1:6 B1@1:7"
    # Rank 0 asks for the proposal of rank 1 once more.
    assert agreed.counts[1] == GroupCounts(5, 1, 11)
    assert agreed.coordination[1] == 1
    assert timeline(led)[1] == "F1@1:3 B1@1:4 F0@1:5 B0@1:6"
    assert (led.coordination, led.makespan) == ((0, 0), 8)


def test_a_pick_that_changes_after_a_failed_round_calls_the_next_one() -> None:
    # A message takes 0.125, so stage 0 starts at 0.25 and 1.5. Rank 1 has F0@1 at 1.25 and proposes it. Rank 0 proposes
    # F1@1 at 2.5, and the round has failed. At 2.5625 F0@1 comes there: rank 0 proposes it and asks rank 1, which hears
    # that at 2.6875, and proposes it again; rank 0 announces it at 2.8125.
    ranks = latencies([[[1.3125, 0.0], [0.0, 9.0]]], [[[0.0, 0.0]] * 2])
    result = run_tensor_parallel(TWO, ranks, bf, [Limit()] * 2, Agreement(gather_seconds=0.25))
    assert timeline(result)[1].split()[0] == "F0@1:2.9375"
    assert result.counts[1].failed_rounds == 1


#: Stage 0 forwards at 0-1 and 1-2. Rank 0 of stage 1 gets F0 at 1.5 and F1 at 2.5, rank 1 gets F1 at 2.25 and F0 at 3.
OTHER_WAY_ROUND = latencies([[[0.5, 2.0], [0.5, 0.25]]], [[[0.0, 0.0]] * 2])


def test_agreement_never_ends_with_a_hint_that_goes_by_arrivals() -> None:
    with pytest.raises(DeadlockError) as caught:
        run_tensor_parallel(TWO, OTHER_WAY_ROUND, FirstCome, [Limit()] * 2, Agreement())
    assert str(caught.value).splitlines() == [
        "deadlock: every group is idle and nothing is in flight",
        "  stage 0 waits for: B0@0 (B0@1 owed by stage 1)",
        "  stage 1, tp 0 (rank 2) waits for: F0@1 (proposed to its group, which does not agree)",
        "  stage 1, tp 1 (rank 3) waits for: F1@1 (proposed to its group, which does not agree)",
        "hint FirstCome picks by more than the ready set, and needs coordination='leader'",
    ]


def test_the_leader_ends_with_the_same_hint() -> None:
    result = run_tensor_parallel(TWO, OTHER_WAY_ROUND, FirstCome, [Limit()] * 2, Leader(control_seconds=0))
    # F1 is on both ranks at 2.5, F0 at 3; a B of the last stage is older than any arrival.
    assert timeline(result)[1] == "F1@1:2.5 B1@1:3.5 F0@1:4.5 B0@1:5.5"


def test_independent_ranks_that_run_different_tasks_are_refused() -> None:
    with pytest.raises(ProtocolError) as caught:
        run_tensor_parallel(TWO, OTHER_WAY_ROUND, bf, [Limit()] * 2, Independent())
    assert str(caught.value) == (
        "collective mismatch on stage 1: rank 1 runs F1@1 as number 0 of the step, where another rank runs F0@1"
    )


def test_a_strict_schedule_needs_no_coordination() -> None:
    costs = make_costs("mllm", 4, 8, latency="spike")
    ranks = rank_latencies(costs, "spike", 3)
    result = run_tensor_parallel(costs, ranks, lambda: create_strict("1f1b"), [Limit()] * 4, Independent())
    alone = run(ranks.slowest(costs), [create_strict("1f1b") for _ in range(4)], [Limit()] * 4)
    assert (result.spans, result.makespan) == (alone.spans, alone.makespan)
    assert sum(result.coordination) == 0
    assert result.counts == (GroupCounts(),) * 4


class Silent(Hint):
    """Answers on stage 0 only."""

    may_wait = True

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        return next(iter(ready)) if view.stage == 0 else None


@pytest.mark.parametrize("coordination", [Leader(), Agreement(), Independent()])
def test_a_deadlock_of_the_hint_names_the_group_and_what_it_lacks(coordination: Coordination) -> None:
    with pytest.raises(DeadlockError) as caught:
        run_tensor_parallel(COSTS, CROSSED, Silent, [Limit()] * 2, coordination)
    assert str(caught.value).splitlines()[1:] == [
        "  stage 0 waits for: B0@0 (B0@1 owed by stage 1)",
        "  stage 1 waits for: F0@1 (ready, but hint Silent does not choose it)",
    ]


def test_a_hint_that_waits_by_itself_is_no_coordination() -> None:
    # Strict 1F1B holds F2 back on stage 0 although it is ready on all ranks.
    costs = table([[1] * 3] * 2, [[1] * 3] * 2)
    ranks = RankLatencies.same_on_all(costs, 2)
    result = run_tensor_parallel(costs, ranks, lambda: create_strict("1f1b"), [Limit()] * 2, Leader(control_seconds=0))
    assert sum(result.coordination) == 0
    assert result.blocked[0] > 0


def test_a_task_takes_what_its_slowest_rank_takes() -> None:
    zero = latencies([[[0.0, 0.0]]], [[[0.0, 0.0]]])
    delays = {Kind.F: np.array([[[0.0, 2.0]], [[1.0, 0.0]]])}
    result = run_tensor_parallel(COSTS, zero, bf, [Limit()] * 2, Leader(control_seconds=0), delays=delays)
    assert timeline(result) == ["F0@0:0 B0@0:6", "F0@1:3 B0@1:5"]


def test_messages_count_as_arrived_on_their_last_rank() -> None:
    result = groups(Leader(control_seconds=0))
    assert [(m.source, m.target, str(m.task), m.sent, m.arrived) for m in result.messages] == [
        (0, 1, "F0@0", 1, 2),
        (1, 0, "B0@1", 4, 5),
    ]
    assert result.trace().end == result.makespan == 6


def test_ranks_hold_the_same_and_receive_on_their_own() -> None:
    # Rank 1 has both forwards before stage 1 can start any.
    ranks = latencies([[[9.0, 0.0], [9.0, 0.0]]], [[[0.0, 0.0]] * 2])
    result = run_tensor_parallel(TWO, ranks, bf, [Limit()] * 2, Leader(control_seconds=0))
    assert [peaks.held for peaks in result.rank_peaks[0]] == [2, 2]
    assert [peaks.received for peaks in result.rank_peaks[1]] == [1, 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Leader(depth=0), "depth is 0, must be a whole number >= 1"),
        (lambda: Leader(control_seconds=-1), "control_seconds is -1, must be a finite number >= 0"),
        (lambda: Agreement(float("inf")), "gather_seconds is inf, must be a finite number >= 0"),
    ],
)
def test_bad_coordination_is_refused(make: Callable[[], Coordination], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value) == message


def refusal(ranks: RankLatencies, limits: int = 2, **delays: object) -> str:
    given = {Kind(kind): np.asarray(cube) for kind, cube in delays.items()}
    with pytest.raises(ConfigError) as caught:
        run_tensor_parallel(COSTS, ranks, bf, [Limit()] * limits, Leader(), delays=given)
    return str(caught.value)


def test_shapes_that_do_not_fit_are_refused() -> None:
    small = RankLatencies(np.zeros((1, 2, 2)), np.zeros((1, 2, 2)))
    assert refusal(small) == "latencies have shape (1, 2, 2), must be (1, 1, 2) for these costs"
    assert refusal(CROSSED, 1) == "limits has 1 entries, must have 2 (one a stage)"
    assert refusal(CROSSED, F=np.zeros((2, 1, 3))) == "delays[F] has shape (2, 1, 3), must be (2, 1, 2)"
    assert refusal(CROSSED, F=-np.ones((2, 1, 2))) == "delays[F] must hold finite numbers >= 0 only"
    assert refusal(CROSSED, W=np.zeros((2, 1, 2))) == "delays has W, must be of F and B only: the costs are not split"


class IgnoresItsLimit(StageCore):
    """Holds whatever comes."""

    def __init__(self, graph: TaskGraph, stage: int, hint: Hint, limit: Limit, **options: Any) -> None:
        super().__init__(graph, stage, hint, Limit(), **options)


@pytest.mark.parametrize("coordination", [Leader(), Agreement(), Independent()])
def test_groups_are_checked_by_what_never_asks_their_cores(
    coordination: Coordination, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rrfp.lab.cluster.simulation.StageCore", IgnoresItsLimit)
    costs = make_costs("llm", 2, 4)
    with pytest.raises(AssertionError, match="holds 2 chunk tasks, the most allowed is 1, after starting F1@0"):
        run_tensor_parallel(costs, rank_latencies(costs, "none", 2), bf, [Limit(1)] * 2, coordination)
