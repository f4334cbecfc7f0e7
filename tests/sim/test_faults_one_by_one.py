"""Each fault alone, in a pipeline small enough to work out by hand: what happens, and what the error says."""

from __future__ import annotations

import pytest
from sim.fault_cases import FORWARD, TRAIN, credit, events, limited, output, scenario

from rrfp.lab.explore.search import explore
from rrfp.lab.faults.faults import Death, Delay, Duplicate, Fault, Lose, Pause, Spike, Swap
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Mode
from rrfp.testing.faults import Ending, run_scenario

#: Stage 0 runs F0 0-1, F1 1-2, F2 2-3; they arrive at 1.1, 2.1, 3.1.
TRAINING = ((TRAIN, 3),)
HERE = "step 0 (train, 3 microbatches)"


def ending(*faults: Fault, steps: tuple[tuple[Mode, int], ...] = TRAINING) -> tuple[Ending, str]:
    run = run_scenario(scenario(*faults, steps=steps))
    assert run.problems == ()
    return run.ending, run.text


def test_a_spike_keeps_the_channel_a_fifo() -> None:
    run, lines = events(scenario(Spike(0, 1, start=0.5, end=1.5, extra=5.0)))
    arrivals = [line for line in lines if line.split()[3] == "gets" and line.split()[2] == "1"]
    assert [line.split()[0] + " " + line.split()[4] for line in arrivals] == [
        "6.1000 F0@0",  # 1 + 0.1 + 5
        "6.1000 F1@0",  # due at 2.1, behind the first
        "6.1000 F2@0",
    ]
    assert (run.ending, run.problems) == (Ending.FINISHED, ())


def test_a_paused_stage_takes_in_nothing_and_then_everything_in_order() -> None:
    run, lines = events(scenario(Pause(1, start=1.0, seconds=4.0)))
    during = [line for line in lines if " stage 1 " in line and 1.0 <= float(line.split()[0]) < 5.0]
    assert during == []
    resumed = [line for line in lines if line.startswith("5.0000 stage 1 ")]
    assert [" ".join(line.split()[3:5]) for line in resumed] == ["gets F0@0", "gets F1@0", "gets F2@0", "starts F0@1"]
    assert (run.ending, run.problems) == (Ending.FINISHED, ())


def test_pauses_that_overlap_are_one_long_pause() -> None:
    _, lines = events(scenario(Pause(1, start=1.0, seconds=2.0), Pause(1, start=2.0, seconds=4.0)))
    assert [line for line in lines if " stage 1 " in line and 1.0 <= float(line.split()[0]) < 6.0] == []


@pytest.mark.parametrize(("drops", "arrivals"), [(False, ["F0@0", "F1@0"]), (True, ["F0@0"])])
def test_a_dead_rank_is_named_by_every_other_one_and_nothing_starts_after_that(
    drops: bool, arrivals: list[str]
) -> None:
    # F1@0 leaves at 2 and would arrive at 2.1; stage 1 learns of the death at 2.05 + 0.5 + 0.01, stage 2 later.
    death = Death(0, at=2.05, detection=0.5, drops=drops)
    run, lines = events(scenario(death, graph=TaskGraph.chain(3)))
    assert (run.ending, run.text) == (
        Ending.ABORTED,
        "aborted by stage 0: PeerLostError: its connection ended or fell silent",
    )
    assert run.problems == ()
    assert [line.split()[4] for line in lines if " stage 1 gets " in line] == arrivals
    notified = [line.split()[:3] for line in lines if "is notified of a failure" in line]
    assert notified == [["2.5600", "stage", "1"], ["2.5700", "stage", "2"]]
    assert [line for line in lines if "starts" in line and float(line.split()[0]) > 2.57] == []


def test_a_rank_that_dies_when_all_have_finished_harms_nobody() -> None:
    assert ending(Death(0, at=100.0, detection=0.0, drops=True)) == (Ending.FINISHED, "")


def test_a_lost_message_is_named_once_nothing_else_can_run() -> None:
    kind, text = ending(Lose(output("F1@0", 0, 1)))
    assert kind is Ending.STALLED
    assert "  stage 1 waits for F1@0, which stage 0 sent, and which never arrived" in text.splitlines()


def test_the_last_message_of_a_channel_lost_is_named_by_the_stall_report() -> None:
    # Gradients come in the order 0, 1, 2 here.
    assert ending(Lose(output("B2@1", 1, 0))) == (
        Ending.STALLED,
        "deadlock: every stage is idle and nothing is in flight\n"
        "  stage 0 waits for B2@1, which stage 1 sent, and which never arrived",
    )


def test_what_a_stalled_stage_waits_for_in_turn_is_told_apart_from_what_was_lost() -> None:
    run = run_scenario(scenario(Lose(output("F0@0", 0, 1)), graph=TaskGraph.chain(3), steps=((TRAIN, 1),)))
    assert run.text.splitlines()[1:] == [
        "  stage 1 waits for F0@0, which stage 0 sent, and which never arrived",
        "  stage 0 waits for B0@1, which stage 1 has not sent",
        "  stage 1 waits for B0@2, which stage 2 has not sent",
        "  stage 2 waits for F0@1, which stage 1 has not sent",
    ]


def test_a_lost_credit_is_named_by_the_stall_report() -> None:
    assert ending(Lose(credit("F1@0", 1, 0)), steps=((FORWARD, 3),)) == (
        Ending.STALLED,
        "deadlock: every stage is idle and nothing is in flight\n"
        "  stage 0 waits for the credit for F1@0, which stage 1 sent, and which never arrived",
    )


def test_a_lost_credit_that_keeps_a_forward_out_says_so() -> None:
    one = limited(scenario(Lose(credit("F0@0", 1, 0)), steps=((FORWARD, 2),)), Limit(1))
    lines = run_scenario(one).text.splitlines()
    assert lines[1] == "  stage 0 waits for the credit for F0@0, which stage 1 sent, and which never arrived"
    assert "  stage 0 waits for: F1@0 (blocked by the memory limit)" in lines


def test_a_message_that_comes_twice_is_refused() -> None:
    expected = f"aborted by stage 1: ProtocolError: F1@0 arrived twice on stage 1 in {HERE}"
    assert ending(Duplicate(output("F1@0", 0, 1), lag=0.0)) == (Ending.REFUSED, expected)


def test_a_credit_that_comes_twice_is_refused() -> None:
    assert ending(Duplicate(credit("F0@0", 1, 0), lag=0.0), steps=((FORWARD, 3),)) == (
        Ending.REFUSED,
        "aborted by stage 0: ProtocolError: stage 1 reports F0@0 as consumed, which it was not waiting for",
    )


def test_outputs_that_change_places_are_harmless_as_each_names_its_task() -> None:
    run, lines = events(scenario(Swap(output("F0@0", 0, 1))))
    gets = [line for line in lines if " stage 1 gets " in line]
    assert [next(word for word in line.split() if "@" in word) for line in gets[:2]] == ["F1@0", "F0@0"]
    assert (run.ending, run.problems) == (Ending.FINISHED, ())


def test_a_message_with_nothing_behind_it_to_change_places_with_arrives_late() -> None:
    assert ending(Swap(output("F2@0", 0, 1))) == (Ending.FINISHED, "")


def test_credits_that_change_places_are_harmless() -> None:
    assert ending(Swap(credit("F0@0", 1, 0)), steps=((FORWARD, 3),)) == (Ending.FINISHED, "")


def test_an_output_that_all_others_overtake_is_harmless() -> None:
    assert ending(Delay(output("F0@0", 0, 1), is_copy=False), steps=((TRAIN, 3), (TRAIN, 3))) == (Ending.FINISHED, "")


def test_a_copy_that_arrives_in_a_later_step_is_refused_with_both_steps_named() -> None:
    kind, text = ending(Delay(output("F0@0", 0, 1), is_copy=True), steps=((TRAIN, 3), (TRAIN, 3)))
    assert (kind, text) == (
        Ending.REFUSED,
        f"aborted by stage 1: ProtocolError: F0@0 from stage 0, a message of {HERE}, reached stage 1 in step 1",
    )


def test_a_copy_that_arrives_after_the_last_step_is_refused() -> None:
    kind, text = ending(Delay(output("F0@0", 0, 1), is_copy=True))
    assert kind is Ending.REFUSED
    assert text.endswith(f"F0@0 from stage 0, a message of {HERE}, reached stage 1 in step 0 (ended)")


def test_a_credit_of_an_earlier_step_is_refused() -> None:
    kind, text = ending(Delay(credit("F0@0", 1, 0), is_copy=True), steps=((FORWARD, 3), (FORWARD, 3)))
    assert kind is Ending.REFUSED
    assert "F0@0 from stage 1, a message of step 0 (forward, 3 microbatches), reached stage 0 in step 1" in text


@pytest.mark.parametrize("layout", ["looped", "v"])
def test_forward_only_the_papers_rule_keeps_the_limit_too(layout: str) -> None:
    # Found by the campaign: a full stage served microbatch after microbatch, although only credits free memory there.
    graph = TaskGraph.chain(2, chunks=2, layout="v" if layout == "v" else "looped")
    found = explore(graph, 6, Limit(1, rule="paper"), Mode.FORWARD)
    assert not found.deadlocks
    assert max(found.peak_held) <= 2
