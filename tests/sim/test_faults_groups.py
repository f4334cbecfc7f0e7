"""Faults inside groups and between replicas, in pipelines small enough to work out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sim.fault_cases import FORWARD, TRAIN, limited, output, scenario

from rrfp.arbiter.coordination import GroupMessageKind
from rrfp.core import events as ev
from rrfp.core.stage_core import StageCore
from rrfp.hints.registry import create_hint
from rrfp.lab.faults.faults import Death, Delay, Duplicate, Fault, GroupMessageId, Lose, MessageId, Pause, Swap
from rrfp.lab.faults.scenario import Parallelism, Scenario
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Mode, Task
from rrfp.testing.faults import Ending, run_scenario

LED = Parallelism(members=2, bytes_held=(0, 0))
AGREEING = replace(LED, coordination="agreement")


def grouped(*faults: Fault, parallelism: Parallelism = LED, steps: Any = ((TRAIN, 3),), stages: int = 2) -> Scenario:
    return replace(scenario(*faults, graph=TaskGraph.chain(stages), steps=steps), parallelism=parallelism)


def rank(stage: int, member: int, parallelism: Parallelism = LED, replica: int = 0) -> Any:
    ranks = grouped(parallelism=parallelism).ranks
    (found,) = [r for r in ranks if (r.stage, r.replica, r.member) == (stage, replica, member)]
    return found


def group_message(kind: GroupMessageKind, about: int | str, stage: int, sender: int, receiver: int) -> GroupMessageId:
    what = about if isinstance(about, int) else Task.parse(about)
    return GroupMessageId(0, kind, what, rank(stage, sender), rank(stage, receiver))


def ending(one: Scenario) -> tuple[Ending, str]:
    run = run_scenario(one)
    assert run.problems == ()
    return run.ending, run.text


@pytest.mark.parametrize(
    "parallelism",
    [LED, AGREEING, replace(LED, coupled=False), Parallelism(replicas=3), Parallelism(2, 3, bytes_held=(0,) * 3)],
)
def test_without_faults_every_rank_ends_with_the_right_values(parallelism: Parallelism) -> None:
    assert ending(grouped(parallelism=parallelism, steps=((TRAIN, 3), (FORWARD, 2), (TRAIN, 1)))) == (
        Ending.FINISHED,
        "",
    )


# The log and the reports.


def test_a_lost_order_is_found_at_the_next_entry() -> None:
    assert ending(replace(grouped(Lose(group_message(GroupMessageKind.ORDER, 1, 0, 0, 1))), depth=2)) == (
        Ending.REFUSED,
        "aborted by stage 0 (rank 1): ProtocolError: order log leaves a gap: got entry 2 (F2@0), expected 1",
    )


def test_a_lost_order_stalls_where_the_leader_waits_for_all_to_begin() -> None:
    how, text = ending(grouped(Lose(group_message(GroupMessageKind.ORDER, 1, 0, 0, 1))))
    assert how is Ending.STALLED
    assert "stage 0 member 1 waits for order 1, which stage 0 member 0 sent, and which never arrived" in text
    assert "stage 0 member 0: F1@0 waits for others of its group to begin it" in text


def test_a_last_order_that_is_lost_stalls_and_is_named() -> None:
    how, text = ending(grouped(Lose(group_message(GroupMessageKind.ORDER, 5, 1, 0, 1))))
    assert how is Ending.STALLED
    assert "stage 1 member 1 waits for order 5, which stage 1 member 0 sent, and which never arrived" in text


def test_a_lost_report_stalls_and_is_named() -> None:
    how, text = ending(grouped(Lose(group_message(GroupMessageKind.READY, "F1@1", 1, 1, 0))))
    assert how is Ending.STALLED
    assert "stage 1 member 0 waits for report F1@1, which stage 1 member 1 sent, and which never arrived" in text


@pytest.mark.parametrize("mode", [TRAIN, FORWARD])
@pytest.mark.parametrize("task", ["F0@0", "F2@0"])
def test_lost_bytes_that_a_forward_waits_for_stall_and_are_named(task: str, mode: Mode) -> None:
    graph = TaskGraph.chain(1, chunks=2)
    lose = Lose(group_message(GroupMessageKind.HELD, task, 0, 1, 0))
    sized = replace(scenario(lose, graph=graph, steps=((mode, 3),)), parallelism=replace(LED, bytes_held=(1, 1)))
    how, text = ending(limited(sized, Limit(bytes=8)))
    if task == "F0@0":
        assert how is Ending.STALLED
        assert "stage 0 member 0 waits for bytes F0@0, which stage 0 member 1 sent, and which never arrived" in text
    else:  # of a signature that was measured: without them the leader only counts too little
        assert (how, text) == (Ending.FINISHED, "")


def test_an_output_lost_on_one_member_is_named_with_that_member() -> None:
    one = MessageId(0, Task.parse("F2@0"), rank(0, 1), rank(1, 1))
    how, text = ending(grouped(Lose(one)))
    assert how is Ending.STALLED
    assert "stage 1 member 1 waits for F2@0, which stage 0 member 1 sent, and which never arrived" in text


@pytest.mark.parametrize(
    ("kind", "about", "text"),
    [
        (GroupMessageKind.ORDER, 2, "order log repeats an entry: got entry 2 (F2@0), expected 3"),
        (GroupMessageKind.READY, "B0@0", "member 1 of the group reported B0@0 as ready twice"),
    ],
)
def test_a_repeated_word_is_refused(kind: GroupMessageKind, about: int | str, text: str) -> None:
    way = (0, 1) if kind is GroupMessageKind.ORDER else (1, 0)
    how, told = ending(grouped(Duplicate(group_message(kind, about, 0, *way), lag=0.0)))
    assert (how, text in told) == (Ending.REFUSED, True), told


def test_orders_that_change_places_are_refused_and_reports_are_not() -> None:
    how, text = ending(replace(grouped(Swap(group_message(GroupMessageKind.ORDER, 0, 0, 0, 1))), depth=2))
    assert (how, "got entry 1 (F1@0), expected 0" in text) == (Ending.REFUSED, True)
    assert ending(grouped(Swap(group_message(GroupMessageKind.READY, "F0@1", 1, 1, 0))))[0] is Ending.FINISHED


def test_a_copy_in_a_later_step_is_refused() -> None:
    late = Delay(group_message(GroupMessageKind.ORDER, 0, 0, 0, 1), is_copy=True)
    how, text = ending(grouped(late, steps=((TRAIN, 2), (TRAIN, 2))))
    assert how is Ending.REFUSED
    assert "F0@0 from the group's leader, a message of step 0 (train, 2 microbatches)" in text


# Agreement.


@pytest.mark.parametrize(("kind", "way"), [(GroupMessageKind.PROPOSE, (1, 0)), (GroupMessageKind.OUTCOME, (0, 1))])
def test_a_lost_round_stalls_and_the_proposal_is_in_the_report(kind: GroupMessageKind, way: tuple[int, int]) -> None:
    how, text = ending(grouped(Lose(group_message(kind, 1, 0, *way)), parallelism=AGREEING))
    assert how is Ending.STALLED
    assert "stage 0 member 1: F1@0 is proposed to its group" in text


def test_a_repeated_proposal_is_refused() -> None:
    how, text = ending(
        grouped(Duplicate(group_message(GroupMessageKind.PROPOSE, 1, 0, 1, 0), lag=0.0), parallelism=AGREEING)
    )
    assert (how, "member 1 of the group " in text) == (Ending.REFUSED, True)


# Ranks that stand still or die.


@pytest.mark.parametrize("member", [0, 1])
@pytest.mark.parametrize("parallelism", [LED, AGREEING])
def test_a_pause_of_one_member_delays_and_harms_nobody(parallelism: Parallelism, member: int) -> None:
    assert ending(grouped(Pause(rank(0, member), 0.5, 20.0), parallelism=parallelism)) == (Ending.FINISHED, "")


@pytest.mark.parametrize("member", [0, 1])
@pytest.mark.parametrize("parallelism", [LED, AGREEING, Parallelism(replicas=2)])
def test_a_member_that_dies_is_named_on_every_other_rank(parallelism: Parallelism, member: int) -> None:
    dead = rank(1, member, parallelism) if parallelism.members > 1 else rank(1, 0, parallelism, replica=member)
    how, text = ending(grouped(Death(dead, 2.5, 0.5, drops=True), parallelism=parallelism))
    assert how is Ending.ABORTED
    assert text == f"aborted by stage 1 (rank {int(dead)}): PeerLostError: its connection ended or fell silent"


# What the oracle sees of memory and of single outputs.


class IgnoresBytes(StageCore):
    """Leads, and counts what it holds itself."""

    def apply(self, event: ev.Event) -> tuple[ev.Instruction, ...]:
        if isinstance(event, ev.HeldReported):
            event = ev.HeldReported(event.step, event.member, event.task, 0)
        return super().apply(event)


def test_a_leader_that_counts_only_its_own_bytes_is_found() -> None:
    parallelism = replace(LED, bytes_held=(1, 9))
    one = limited(grouped(parallelism=parallelism, steps=((TRAIN, 6),)), Limit(bytes=18))
    one = replace(one, make_hint=lambda stage: create_hint("f-priority"))
    assert run_scenario(one).problems == ()
    problems = run_scenario(one, make_core=IgnoresBytes).problems
    assert "stage 0 member 1 holds 36 bytes, the most allowed is 27, after F3@0" in problems[0], problems


class TakesDuplicates(StageCore):
    """Drops what it has."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._seen: set[Task] = set()

    def apply(self, event: ev.Event) -> tuple[ev.Instruction, ...]:
        if isinstance(event, ev.Arrived):
            if event.task in self._seen:
                return ()
            self._seen.add(event.task)
        return super().apply(event)


def test_a_second_output_is_known_by_its_task() -> None:
    one = scenario(Duplicate(output("F1@0", 0, 1), lag=0.0))
    run = run_scenario(one)
    assert (run.ending, run.problems) == (Ending.REFUSED, ())
    assert "F1@0 arrived twice on stage 1" in run.text
    problems = run_scenario(one, make_core=TakesDuplicates).problems
    assert "stage 1 accepted F1@0 from stage 0 to stage 1 in step 0, which arrived twice" in problems
