"""The verdict over what all ranks answer, as a table; and what crosses the wire."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest

from rrfp.errors import ProtocolError
from rrfp.runtime.records import pack, unpack
from rrfp.runtime.stall.status import RankStatus, judge

IDLE = RankStatus(
    stage=0,
    step=2,
    steps_ended=2,
    running=None,
    running_s=0.0,
    can_run=False,
    completed=5,
    sent=3,
    received=3,
    awaits=("F1@0 (x owed by stage 1)",),
)
OTHER = replace(IDLE, stage=1, awaits=())


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (IDLE, replace(OTHER, running="B3@1", running_s=12.34), "stage 1 has been running B3@1 for 12.3 s"),
        (IDLE, replace(OTHER, can_run=True), "stage 1 is about to start a task"),
        (IDLE, replace(OTHER, step=None), "stage 1 is not in step 2: its program has not called step() yet"),
        (IDLE, replace(OTHER, step=1), "stage 1 is not in step 2: it is still in step 1"),
        (
            replace(IDLE, sent=5),
            OTHER,
            "2 message(s) are in flight; stage 0 waits for: F1@0 (x owed by stage 1)",
        ),
        (
            replace(IDLE, sent=5),
            replace(OTHER, can_run=True),
            "stage 1 is about to start a task; 2 message(s) are in flight",
        ),
    ],
)
def test_a_rank_that_holds_the_others_up_is_named_whatever_the_last_poll_said(
    first: RankStatus, second: RankStatus, text: str
) -> None:
    for before in (None, [first, second]):
        verdict = judge([first, second], before)
        assert (verdict.deadlock, verdict.certain, verdict.text) == (False, True, text)


def test_all_who_hold_the_others_up_are_named() -> None:
    verdict = judge([replace(IDLE, running="F0@0", running_s=1.0), replace(OTHER, step=None)], None)
    assert verdict.text.count(";") == 1


@pytest.mark.parametrize("field", ["steps_ended", "completed", "sent", "received"])
def test_progress_between_two_polls_is_no_deadlock(field: str) -> None:
    before = [replace(IDLE, **{field: getattr(IDLE, field) - 1}), OTHER]
    verdict = judge([IDLE, OTHER], before)
    assert (verdict.deadlock, verdict.certain) == (False, False)


def test_one_poll_alone_proves_nothing() -> None:
    assert not judge([IDLE, OTHER], None).certain


def test_two_polls_without_progress_and_with_nothing_in_flight_are_a_deadlock_with_a_report() -> None:
    verdict = judge([IDLE, OTHER], [IDLE, OTHER])
    assert (verdict.deadlock, verdict.certain) == (True, True)
    assert verdict.text.splitlines() == [
        "deadlock in step 2: every rank is idle and nothing is in flight",
        "  stage 0 waits for: F1@0 (x owed by stage 1)",
        "  stage 1 waits for: nothing",
    ]


def test_whoever_holds_the_others_up_is_named_with_its_process_and_where_its_lane_is() -> None:
    busy = replace(OTHER, running="B3@1", running_s=12.34, process="host a, pid 7", stack="  File x\n    f()")
    assert judge([IDLE, busy], None).text.splitlines() == [
        "stage 1 has been running B3@1 for 12.3 s [host a, pid 7]",
        "stage 1 is in:",
        "  File x",
        "    f()",
    ]


def test_a_deadlock_report_names_every_process() -> None:
    told = [replace(IDLE, process="host a, pid 7"), replace(OTHER, process="host b, pid 8")]
    assert judge(told, told).text.splitlines()[1:] == [
        "  stage 0 waits for: F1@0 (x owed by stage 1) [host a, pid 7]",
        "  stage 1 waits for: nothing [host b, pid 8]",
    ]


def test_a_deadlock_report_tells_what_happened_to_the_first_task_of_each_rank() -> None:
    told = [replace(IDLE, story="F1@0 so far: F1@2 arrived after 3 tasks", process="host a, pid 7"), OTHER]
    assert judge(told, told).text.splitlines()[1:] == [
        "  stage 0 waits for: F1@0 (x owed by stage 1). F1@0 so far: F1@2 arrived after 3 tasks [host a, pid 7]",
        "  stage 1 waits for: nothing",
    ]


def test_between_steps_nobody_is_late() -> None:
    outside = [replace(IDLE, step=None), replace(OTHER, step=None)]
    assert not judge(outside, outside).deadlock


CLIPPING = replace(OTHER, step=None, gathering="clip_grad_norm_", gatherings_ended=4)


def test_a_step_on_one_rank_and_clipping_before_it_on_another_never_end() -> None:
    verdict = judge([replace(IDLE, gatherings_ended=4), CLIPPING], None)
    assert verdict.deadlock
    assert verdict.text == (
        "deadlock: stage 0 is in step 2, stage 1 is in clip_grad_norm_ before that step: every rank must make the same "
        "calls in the same order"
    )


@pytest.mark.parametrize(
    ("first", "text"),
    [
        (replace(IDLE, gatherings_ended=5), "stage 1 is not in step 2: it is in clip_grad_norm_"),  # about to hear
        (replace(IDLE, step=None, gatherings_ended=4), "clip_grad_norm_ was not called yet on stage 0"),
        (
            replace(IDLE, step=1, steps_ended=1, gatherings_ended=4),
            "stage 1 is not in step 1: it is in clip_grad_norm_",
        ),
        (replace(CLIPPING, stage=0), "no rank is in a step"),
        (
            replace(CLIPPING, stage=0, running="the writing of the trace", running_s=12.0),
            "stage 0 has been running the writing of the trace for 12.0 s",
        ),
    ],
)
def test_clipping_that_may_end_is_no_deadlock(first: RankStatus, text: str) -> None:
    verdict = judge([first, CLIPPING], None)
    assert (verdict.deadlock, verdict.certain, verdict.text) == (False, True, text)


def test_two_ranks_in_different_calls_between_the_same_steps_never_end() -> None:
    saving = replace(CLIPPING, stage=0, gathering="save_trace")
    verdict = judge([saving, CLIPPING], None)
    assert verdict.deadlock
    assert verdict.text == (
        "deadlock: stage 0 is in save_trace, stage 1 is in clip_grad_norm_: every rank must make the same calls in the "
        "same order"
    )
    about_to_hear = replace(CLIPPING, gatherings_ended=3)
    assert not judge([saving, about_to_hear], None).deadlock


def test_ranks_that_only_exchange_results_are_no_deadlock() -> None:
    ending = [replace(IDLE, awaits=()), OTHER]
    assert not judge(ending, ending).deadlock


def test_a_status_travels() -> None:
    assert unpack(RankStatus, pack(IDLE), "a status") == IDLE


@pytest.mark.parametrize("data", [b"", b"\xc1", msgpack.packb({}), msgpack.packb([1]), msgpack.packb({"awaits": 3})])
def test_a_malformed_status_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="a status cannot be read"):
        unpack(RankStatus, data, "a status")
