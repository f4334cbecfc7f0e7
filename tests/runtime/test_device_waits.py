"""Calls that keep the host as long as the device are named, once, and not those of the first moments."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import pytest
from runtime.host_device import HostDevice, HostStream
from runtime.toys import Ones

import rrfp
from rrfp import Execution
from rrfp.devices.base import Stream
from rrfp.model.tasks import Task
from rrfp.runtime.lane_executor import DeviceWaits

#: Started, returned, complete, in milliseconds.
Times = tuple[float, float | None, float]

WAITS: Times = (0, 9, 10)
BARELY: Times = (0, 8, 10)
OVERLAPS: Times = (0, 7.9, 10)
AHEAD: Times = (5, 1, 10)
SHORT: Times = (0, 0.9, 1)
SLOW_HOST: Times = (0, 30, 10)
ON_A_CPU: Times = (0, None, 10)


def warnings_of(executions: Iterable[tuple[str, Times]], caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.set_level(logging.WARNING)
    waits = DeviceWaits(2)
    for task, (started, launched, ended) in executions:
        returned = None if launched is None else launched / 1e3
        waits.saw(Task.parse(task), Execution(None, started / 1e3, ended / 1e3, returned))
    return [message.split(" (")[0] for message in caplog.messages]


@pytest.mark.parametrize("times", [WAITS, BARELY, SLOW_HOST])
def test_the_third_call_in_a_row_is_named_and_none_after_it(times: Times, caplog: pytest.LogCaptureFixture) -> None:
    tasks = [(f"F{m}@5", times) for m in range(9)]
    assert warnings_of(tasks, caplog) == ["F2@5 blocked the host for as long as the device computed"]


@pytest.mark.parametrize("times", [OVERLAPS, AHEAD, SHORT, ON_A_CPU])
def test_a_call_that_leaves_time_or_is_short_is_not_named(times: Times, caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of([(f"F{m}@5", times) for m in range(9)], caplog) == []


def test_each_kind_and_virtual_stage_is_named_for_itself(caplog: pytest.LogCaptureFixture) -> None:
    tasks = [(f"{kind}{m}@{v}", WAITS) for m in range(5) for kind in "FB" for v in (1, 3)]
    expected = ["F2@1", "F2@3", "B2@1", "B2@3"]
    text = "blocked the host for as long as the device computed"
    assert warnings_of(tasks, caplog) == [f"{task} {text}" for task in expected]


def test_a_call_between_that_does_not_wait_begins_the_count_anew(caplog: pytest.LogCaptureFixture) -> None:
    tasks = [(f"F{m}@0", OVERLAPS if m == 2 else WAITS) for m in range(6)]
    assert warnings_of(tasks, caplog) == ["F5@0 blocked the host for as long as the device computed"]


class LateStream(HostStream):
    """Its work seems to be complete an hour after it was issued."""

    behind = 3600.0


class LateDevice(HostDevice):
    def stream(self, *, is_urgent: bool = False) -> Stream:
        return LateStream()


def test_a_trace_has_the_time_at_which_the_calls_of_a_device_returned() -> None:
    traces = []
    for device in (LateDevice(), None):
        with rrfp.local([Ones()], device=device).blocking() as pipe:
            traces.append(pipe.step(microbatches=2).trace)
    on_device, on_cpu = traces
    assert len(on_device.tasks) == len(on_cpu.tasks) == 2 * 2
    for span in on_device.tasks:
        assert span.launched is not None
        assert span.launched < span.end
    assert {span.launched for span in on_cpu.tasks} == {None}
