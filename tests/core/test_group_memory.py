"""Limits in tensor-parallel groups: a slot is free on each rank, and the rank that holds the most bytes counts."""

from __future__ import annotations

from itertools import product

import pytest
from core_script import Script, T
from group_scripts import CHAIN, ordered, refusal, reported

from rrfp import Topology
from rrfp.core.events import (
    ChunkReduced,
    Completed,
    Enqueued,
    FinishStep,
    HeldReported,
    Order,
    Run,
)
from rrfp.core.group_step import GroupMembership
from rrfp.core.waiting import describe, waiting
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.mesh import Mesh
from rrfp.model.tasks import Mode, StepId


def test_a_forward_is_ordered_and_enqueued_behind_the_backward_that_gives_its_slot_back() -> None:
    """So the leader's word travels while the backward runs."""
    script = Script(CHAIN, 1, limit=1, group=GroupMembership(0, 2))
    script.arrived("F0@0", "F1@0")
    reported(script, "F0@1")
    reported(script, "F1@1")
    script.ran("F0@1")
    assert script.ready == "B0@1"
    script.enqueued("B0@1")
    assert script.core.decide() == Run(T("F1@1"))
    assert script.enqueued("F1@1") == [Order(2, T("F1@1"))]


def test_a_follower_enqueues_what_is_ordered_behind_a_backward_that_still_runs_here() -> None:
    script = Script(CHAIN, 1, limit=1, group=GroupMembership(1, 2))
    script.arrived("F0@0", "F1@0")
    ordered(script, (0, "F0@1"), (1, "B0@1"), (2, "F1@1"))
    script.ran("F0@1")
    script.enqueued("B0@1")
    assert script.core.decide() == Run(T("F1@1"))


def test_forward_only_a_follower_waits_for_its_own_credit() -> None:
    script = Script(CHAIN, 0, mode=Mode.FORWARD, limit=1, group=GroupMembership(1, 2))
    ordered(script, (0, "F0@0"), (1, "F1@0"))
    script.ran("F0@0")
    assert script.core.decide() is None
    script.consumed(1, "F0@0")
    assert script.core.decide() == Run(T("F1@0"))


def test_a_follower_holds_nothing_back_because_of_bytes() -> None:
    script = Script(CHAIN, 1, limit=Limit(bytes=10), group=GroupMembership(1, 2))
    script.arrived("F0@0", "F1@0")
    ordered(script, (0, "F0@1"), (1, "F1@1"))
    script.ran("F0@1", held=1000)
    assert script.core.decide() == Run(T("F1@1"))


def held(script: Script, task: str, num_bytes: int, rank: int = 1, output: int = 0) -> list[object]:
    return [*script.told(HeldReported(script.step, rank, T(task), num_bytes, output))]


def byte_leader(num_bytes: int, size: int = 2) -> Script:
    """The leader of stage 1; everything has arrived everywhere."""
    script = Script(CHAIN, 1, microbatches=4, limit=Limit(bytes=num_bytes), group=GroupMembership(0, size))
    script.arrived("F0@0", "F1@0", "F2@0", "F3@0")
    for task, rank in product(("F0@1", "F1@1", "F2@1", "F3@1"), range(1, size)):
        reported(script, task, rank)
    return script


def test_the_first_forward_is_in_flight_until_every_rank_has_told_its_size() -> None:
    script = byte_leader(30, size=3)
    script.ran("F0@1", held=5)
    held(script, "F0@1", 5, rank=1)
    assert "F1@1" not in script.ready
    held(script, "F0@1", 12, rank=2)
    assert "F1@1" in script.ready  # 12 held and 12 expected
    script.enqueued("F1@1")
    assert "F2@1" not in script.ready


def test_a_wait_for_a_size_names_who_has_not_reported_it() -> None:
    script = byte_leader(30, size=3)
    script.ran("F0@1", held=5)
    held(script, "F0@1", 5, rank=1)
    topology = Topology(1, 3, mesh=Mesh((("pp", 3), ("tp", 3))))
    assert [entry.unmeasured for entry in waiting(script.core) if entry.task == T("F1@1")] == [((2, T("F0@1")),)]
    late = "stage 1, tp 2 (rank 5) has not reported the bytes of F0@1"
    assert f"F1@1 (blocked by the memory limit, {late})" in describe(script.core, topology)
    held(script, "F0@1", 12, rank=2)
    assert all(entry.unmeasured == () for entry in waiting(script.core))


def test_once_a_size_is_known_several_forwards_may_be_in_flight() -> None:
    script = byte_leader(60)
    script.ran("F0@1", held=5)
    held(script, "F0@1", 12)
    script.enqueued("F1@1", "F2@1")
    assert "F3@1" in script.ready  # 12 held and 3 times 12 expected


def test_the_rank_that_holds_the_most_counts_and_outputs_count_once() -> None:
    script = byte_leader(30)
    script.told(Enqueued(T("F0@1")), Completed(T("F0@1"), 10, output=0))
    held(script, "F0@1", 10)
    script.told(Enqueued(T("F1@1")), Completed(T("F1@1"), 10, output=0))
    held(script, "F1@1", 10)
    assert "F2@1" in script.ready  # the same on both ranks: 10 a microbatch, and not 20
    script.ran("B0@1")
    held(script, "B0@1", 0)
    script.told(Enqueued(T("F2@1")), Completed(T("F2@1"), 10))
    held(script, "F2@1", 15)
    assert "F3@1" not in script.ready  # 10 + 15 held and 15 expected
    script.ran("B2@1")
    assert "F3@1" in script.ready


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        ([("F1@1", 1)], "member 1 of the group reports bytes of F1@1, which stage 1 does not await"),
        ([("F0@0", 1)], "member 1 of the group reports bytes of F0@0, which stage 1 does not await"),
        ([("F9@1", 1)], "member 1 of the group reports bytes of F9@1, which stage 1 does not await"),
        ([("F0@1", 2)], "member 2 of the group reports bytes of F0@1, which stage 1 does not await"),
        ([("F0@1", 0)], "member 0 of the group reports bytes of F0@1, which stage 1 does not await"),
        ([("F0@1", 1), ("F0@1", 1)], "member 1 of the group reported the bytes of F0@1 twice"),
    ],
)
def test_bytes_that_the_leader_does_not_await_are_refused(reports: list[tuple[str, int]], message: str) -> None:
    script = byte_leader(100)
    script.enqueued("F0@1")
    *before, last = reports
    for task, rank in before:
        held(script, task, 1, rank)
    assert refusal(lambda: held(script, last[0], 1, last[1])) == message


def test_bytes_may_be_told_after_the_step_and_not_before_it() -> None:
    script = Script(TaskGraph.chain(1), 0, microbatches=1, group=GroupMembership(0, 2))
    script.ran("F0@0", "B0@0")
    assert script.told(ChunkReduced(0)) == [FinishStep(script.step)]
    assert held(script, "B0@0", 0) == []
    ahead = HeldReported(StepId(1, Mode.TRAIN, 1), 1, T("F0@0"), 0)
    assert refusal(lambda: script.told(ahead)) == (
        "F0@0 from member 1 of the group, a message of step 1 (train, 1 microbatches), "
        "reached stage 0 in step 0 (ended)"
    )


def test_an_output_counts_as_long_as_the_leader_keeps_its_own_with_the_most_that_any_rank_reports() -> None:
    script = Script(CHAIN, 0, microbatches=4, limit=Limit(bytes=30), group=GroupMembership(0, 2))
    script.told(Enqueued(T("F0@0")), Completed(T("F0@0"), 1, output=4))
    held(script, "F0@0", 1, output=20)
    assert "F1@0" not in script.ready  # 21 on the follower, and 21 expected
    script.released(1, "F0@0")
    assert "F1@0" in script.ready
