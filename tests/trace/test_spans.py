"""Spans: a bounded ring, and one trace out of what every rank saw."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rrfp.core.usage import WaitCause
from rrfp.model.tasks import Kind, Task
from rrfp.trace.plain import from_plain, to_plain
from rrfp.trace.spans import MessageSpan, Recorder, StepTrace, TaskSpan, WaitSpan, merge, shifted

SENT = Task(Kind.F, 0, 0)
FIRST = Task(Kind.F, 1, 1)
ONE, TWO = TaskSpan(0, SENT, 0.0, 1.0), TaskSpan(1, Task(Kind.F, 0, 1), 1.5, 2.0)
WAIT = WaitSpan(1, WaitCause.INPUT, 0.5, 1.5)
SENDER = StepTrace(3, 0.0, 1.0, (ONE,), (), (MessageSpan(0, 1, SENT, 1.0, None, 8),), dropped=1)
RECEIVER = StepTrace(3, 0.5, 2.0, (TWO,), (WAIT,), (MessageSpan(0, 1, SENT, None, 1.25, 8),), dropped=2)


class Watch:
    """A clock that shows what it is set to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_full_recorder_drops_the_oldest_spans_and_counts_them() -> None:
    watch = Watch()
    recorder = Recorder(1, watch, capacity=2)
    recorder.open()
    recorder.ran(FIRST, 0.0, 0.5)
    recorder.waiting(WaitCause.INPUT)
    recorder.ran(TWO.task, TWO.start, TWO.end)
    watch.now = 2.0
    assert recorder.close(0) == StepTrace(0, 0.0, 2.0, (TWO,), (WAIT,), dropped=1)


def test_closing_takes_everything_and_the_next_step_starts_afresh() -> None:
    watch = Watch()
    recorder = Recorder(0, watch, capacity=1)
    recorder.open()
    recorder.ran(SENT, 0.0, 1.0)
    recorder.ran(TWO.task, 1.5, 2.0)
    assert recorder.close(0).dropped == 1
    watch.now = 2.0
    recorder.open()
    recorder.ran(SENT, 2.0, 3.0)
    watch.now = 3.0
    assert recorder.close(1) == StepTrace(1, 2.0, 3.0, (TaskSpan(0, SENT, 2.0, 3.0),))


@pytest.mark.parametrize("traces", [[SENDER, RECEIVER], [RECEIVER, SENDER]])
def test_merging_sorts_spans_and_joins_the_two_ends_of_a_message(traces: list[StepTrace]) -> None:
    message = MessageSpan(0, 1, SENT, sent=1.0, arrived=1.25, num_bytes=8)
    assert merge(traces) == StepTrace(3, 0.0, 2.0, (ONE, TWO), (WAIT,), (message,), dropped=3)


def test_a_message_that_one_end_dropped_stays_half() -> None:
    assert merge([SENDER]).messages == SENDER.messages


def test_only_traces_of_one_step_are_merged() -> None:
    with pytest.raises(ValueError, match=r"traces of one step are needed, got steps \[3, 4\]"):
        merge([SENDER, StepTrace(4, 0.0, 1.0)])
    with pytest.raises(ValueError, match="got steps"):
        merge([])


LAUNCHED = StepTrace(3, 0.0, 2.0, (replace(ONE, launched=0.25), TWO))


def test_times_of_another_clock_are_all_moved() -> None:
    there = shifted(LAUNCHED, 10.0)
    assert there.tasks == (
        replace(ONE, start=ONE.start + 10, end=ONE.end + 10, launched=10.25),
        replace(TWO, start=TWO.start + 10, end=TWO.end + 10),
    )


SIZED = replace(SENDER, sizes=(3.0, 0.0))


def test_a_merged_step_has_the_sizes_that_all_ranks_received() -> None:
    assert merge([SIZED, replace(RECEIVER, sizes=(3.0, 0.0))]).sizes == (3.0, 0.0)
    assert merge([SIZED, RECEIVER]).sizes is None
    assert merge([SIZED, replace(RECEIVER, sizes=(3.0, 1.0))]).sizes is None


@pytest.mark.parametrize("sizes", [[-1.0], [float("nan")], [True], ["3"], 3, [None]])
def test_plain_sizes_that_are_no_numbers_are_refused(sizes: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        from_plain(to_plain(SENDER) | {"sizes": sizes})


@pytest.mark.parametrize("trace", [SENDER, RECEIVER, merge([SENDER, RECEIVER]), LAUNCHED, SIZED])
def test_plain_data_reads_back(trace: StepTrace) -> None:
    assert from_plain(to_plain(trace)) == trace
