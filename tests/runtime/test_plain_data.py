"""What is checked, encoded and decoded around a step, without a pipeline."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.core.tasks import Kind, Mode, StepId, Task
from rrfp.core.topology import Topology
from rrfp.core.usage import Peaks, WaitCause
from rrfp.errors import ConfigError, Origin, ProtocolError
from rrfp.runtime.abort import origin_of
from rrfp.runtime.batching import plan_step
from rrfp.runtime.records import pack, unpack
from rrfp.runtime.result import StageReport, StepResult
from rrfp.trace.breakdown import Breakdown, breakdown
from rrfp.trace.recorder import Recorder
from rrfp.trace.spans import StepTrace

seconds = st.floats(0, 1e6)


@given(
    st.builds(
        StageReport,
        stage=st.integers(0, 99),
        seconds=seconds,
        breakdown=st.builds(Breakdown, step=seconds, compute=seconds, input=seconds),
        peaks=st.builds(Peaks, held=st.integers(0, 99), num_bytes=st.integers(0, 2**60), received=st.integers(0, 9)),
        losses=st.dictionaries(st.integers(0, 9), st.floats(allow_nan=False)),
        loss=st.none() | st.floats(allow_nan=False),
    )
)
def test_a_report_travels(report: StageReport) -> None:
    assert unpack(StageReport, pack(report), "a report") == report


GOOD = pack(StageReport(1, 2.0, Breakdown(2.0, 1.0), Peaks(1, 2, 3), {0: 0.5}, 0.5))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        GOOD[:-1],
        GOOD + b"\x00",
        msgpack.packb(3),
        msgpack.packb({}),
        msgpack.packb({**msgpack.unpackb(GOOD), "peaks": 5}),
        msgpack.packb({**msgpack.unpackb(GOOD), "losses": [[[1], 2.0]]}),
        msgpack.packb({**msgpack.unpackb(GOOD), "extra": 1}),
    ],
)
def test_a_malformed_report_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="a step report cannot be read"):
        unpack(StageReport, data, "a step report")


def test_a_result_fills_every_breakdown_up_to_the_slowest_rank() -> None:
    trace = StepTrace(0, 0.0, 3.0)
    reports = [
        StageReport(0, 3.0, Breakdown(3.0, 3.0), Peaks(held=2)),
        StageReport(1, 2.0, Breakdown(2.0, 1.5, drained=0.5), Peaks(held=1), {1: 4.0, 0: 2.0}, 3.0),
    ]
    result = StepResult.of(StepId(0, Mode.TRAIN, 2), 5, reports, trace, Topology(0, 2))
    assert (result.loss, result.losses, result.seconds, result.peak_held) == (3.0, (2.0, 4.0), 3.0, (2, 1))
    assert result.breakdown[1] == Breakdown(3.0, 1.5, drained=1.5)


def test_a_plan_knows_m_from_any_list() -> None:
    lists: list[dict[str, Any]] = [{"inputs": [1, 2]}, {"targets": (1, 2)}, {"kwargs": [{}, {}]}, {"microbatches": 2}]
    for arguments in lists:
        plan = plan_step(7, Mode.TRAIN, "mean", **arguments)
        assert plan.step == StepId(7, Mode.TRAIN, 2)
        assert plan.batch.gradient_weights == (0.5, 0.5)
    plan = plan_step(0, Mode.TRAIN, "sum", weights=[1, 3], grad_scale=2.0)
    assert (plan.weights, plan.batch.gradient_weights) == ((1, 3), (2.0, 6.0))


def test_a_plan_names_all_lists_when_they_disagree() -> None:
    with pytest.raises(ConfigError, match=r"\(microbatches: 3, inputs: 1, targets: 2\)"):
        plan_step(0, Mode.TRAIN, "mean", [1], [1, 2], microbatches=3)


@pytest.mark.parametrize(
    "body", [{}, {"stage": "1", "task": None, "cause": "x"}, {"stage": 1, "task": 2, "cause": "x"}]
)
def test_an_abort_without_an_origin_is_refused(body: dict[str, Any]) -> None:
    assert origin_of({"stage": 1, "task": "F0@1", "cause": "x", "rank": None}) == Origin(1, "F0@1", "x")
    with pytest.raises(ProtocolError):
        origin_of(body)


def test_the_recorder_cuts_waits_by_cause_and_leaves_nothing_out() -> None:
    now = 0.0
    recorder = Recorder(0, lambda: now)
    task = Task(Kind.F, 0, 0)
    recorder.open()
    now = 1.0
    recorder.waiting(WaitCause.INPUT)
    now = 3.0
    recorder.waiting(WaitCause.INPUT)
    recorder.waiting(WaitCause.MEMORY)
    now = 7.0
    recorder.ran(task, 5.0, 6.0)
    recorder.waiting(WaitCause.DRAINED)
    now = 10.0
    parts = breakdown(recorder.close(0), 0)
    assert parts == Breakdown(10.0, 1.0, input=3.0, memory=2.0, drained=4.0)
