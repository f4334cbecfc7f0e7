"""Groups in virtual time that cannot go on: what their ranks say that they wait for."""

from __future__ import annotations

import logging
import time

import pytest
from sim.shell.groups import Replica, run_shell_groups
from sim.test_shell_groups import COSTS, bf
from sim.tp_cases import FirstCome, latencies

from rrfp import Hint, View
from rrfp.core.ready_set import ReadySet
from rrfp.errors import DeadlockError, HintError
from rrfp.lab.cluster.coordination import Agreement, Leader
from rrfp.lab.generators.latency import RankLatencies
from rrfp.memory.admission import Limit
from rrfp.model.tasks import Kind, Task

#: Rank 0 of stage 1 sees F0 before F1, rank 1 sees them the other way round.
CROSSED = latencies([[[1, 9], [9, 1]]], [[[0, 0], [0, 0]]])


def test_ranks_that_never_agree_end_in_a_deadlock_that_names_both_proposals() -> None:
    began = time.monotonic()
    with pytest.raises(DeadlockError) as caught:
        run_shell_groups([Replica(COSTS, CROSSED)], FirstCome, [Limit(), Limit()], Agreement(0.001), stall_after=30)
    assert time.monotonic() - began < 5
    head, *lines = str(caught.value).splitlines()
    assert head == "deadlock in step 0: every rank is idle and nothing is in flight"
    assert [line.split(";")[0] for line in lines] == [
        "  stage 0, tp 0 (rank 0) waits for: B0@0 (B0@1 owed by stage 1, tp 0 (rank 2))",
        "  stage 0, tp 1 (rank 1) waits for: B0@0 (B0@1 owed by stage 1, tp 1 (rank 3))",
        "  stage 1, tp 0 (rank 2) waits for: F0@1 (proposed to its group, which does not agree)",
        "  stage 1, tp 1 (rank 3) waits for: F1@1 (proposed to its group, which does not agree)",
    ]
    assert lines[2].count("F0@1 (") == lines[3].count("F1@1 (") == 1


def test_a_leader_has_no_such_trouble() -> None:
    run = run_shell_groups([Replica(COSTS, CROSSED)], FirstCome, [Limit(), Limit()], Leader(1, 0.001))
    assert len(set(run.orders(1))) == 1


def test_a_rank_without_a_proposal_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    slow = latencies([[[1, 99], [1, 99]]], [[[0, 0], [0, 0]]])
    run_shell_groups([Replica(COSTS, slow)], bf, [Limit(), Limit()], Agreement(0.0), stall_after=10)
    line = next(line for line in caplog.messages if "rank 2) waits for" in line)
    assert (
        "stage 1, tp 0 (rank 2) waits for: F0@1 (proposed to its group, where some rank has nothing to propose)" in line
    )
    assert "stage 1, tp 1 (rank 3) waits for: F0@1 (F0@0 owed by stage 0, tp 1 (rank 1))" in line


def test_a_slow_message_to_a_follower_is_told_with_the_report_that_the_leader_awaits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    slow = latencies([[[1, 1, 99], [1, 1, 99]]], [[[0, 0, 0], [0, 0, 0]]])
    run_shell_groups([Replica(COSTS, slow)], bf, [Limit(), Limit()], Leader(2, 0.001), stall_after=10)
    line = next(line for line in caplog.messages if "in flight" in line)
    assert "2 message(s) are in flight" in line
    assert "stage 1, tp 0 (rank 3) waits for: F0@1 (not reported by stage 1, tp 2 (rank 5))" in line
    assert (
        "stage 1, tp 1 (rank 4) waits for: F0@1 (not ordered by stage 1, tp 0 (rank 3), which leads the group)" in line
    )
    assert "stage 1, tp 2 (rank 5) waits for: F0@1 (F0@0 owed by stage 0, tp 2 (rank 2))" in line


class Deaf(Hint):
    """Answers on stage 0 only."""

    may_wait = True

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        return next(iter(ready)) if view.stage == 0 else None


def test_a_leader_that_orders_nothing_is_named_by_its_followers() -> None:
    ranks = RankLatencies.same_on_all(COSTS, 2)
    with pytest.raises(DeadlockError) as caught:
        run_shell_groups([Replica(COSTS, ranks)], Deaf, [Limit(), Limit()], Leader(), stall_after=10)
    _, *lines = str(caught.value).splitlines()
    assert lines[2].startswith("  stage 1, tp 0 (rank 2) waits for: F0@1 (ready, but hint Deaf does not choose it); ")
    ordered = "F0@1 (not ordered by stage 1, tp 0 (rank 2), which leads the group); B0@1 (F0@1 owed by stage 1, tp 1"
    assert lines[3].startswith(f"  stage 1, tp 1 (rank 3) waits for: {ordered} (rank 3)); ")


def test_a_hint_that_lies_is_the_same_error_as_without_a_group() -> None:
    class Wrong(Hint):
        def choose(self, ready: ReadySet, view: View) -> Task | None:
            return Task(Kind.B, 1, view.stage)

    ranks = RankLatencies.same_on_all(COSTS, 2)
    with pytest.raises(HintError, match=r"hint Wrong chose B1@0 on stage 0; ready are: ReadySet\(F0@0 F1@0\)"):
        run_shell_groups([Replica(COSTS, ranks)], Wrong, [Limit(), Limit()], Leader())
