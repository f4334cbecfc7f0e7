"""What is checked, encoded and decoded around a step, without a pipeline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp import Topology
from rrfp.core.usage import Peaks, WaitCause
from rrfp.errors import ConfigError, Origin, ProtocolError
from rrfp.memory.admission import Limit
from rrfp.model.mesh import Mesh, MeshPosition
from rrfp.model.tasks import Kind, Mode, StepId, Task
from rrfp.runtime.abort import origin_of
from rrfp.runtime.records import pack, unpack
from rrfp.runtime.steps.plan import StepPlanner, StepRequest
from rrfp.runtime.steps.reports import ResourceMeter, Resources, StageReport, StepFigures
from rrfp.runtime.steps.step_report import Losses, LossShare, PartLosses
from rrfp.trace.breakdown import Breakdown, breakdown
from rrfp.trace.spans import Recorder
from rrfp.transports.base import TransportContext, TransportStatistics
from rrfp.transports.inproc import InprocTransport
from rrfp.transports.rendezvous import LocalRendezvous

CONTEXT = TransportContext(0, (), "run", LocalRendezvous())

seconds = st.floats(0, 1e6)


@given(
    st.builds(
        StageReport,
        stage=st.integers(0, 99),
        seconds=seconds,
        breakdown=st.builds(Breakdown, step=seconds, compute=seconds, input=seconds),
        peaks=st.builds(Peaks, held=st.integers(0, 99), num_bytes=st.integers(0, 2**60), received=st.integers(0, 9)),
        resources=st.binary(min_size=32, max_size=32),
    )
)
def test_a_report_travels(report: StageReport) -> None:
    assert unpack(StageReport, pack(report), "a report") == report


@given(
    st.builds(
        LossShare,
        refused=st.integers(0, 9),
        parts=st.dictionaries(
            st.text(max_size=3),
            st.builds(
                PartLosses,
                by_microbatch=st.dictionaries(st.integers(0, 9), st.floats(allow_nan=False)),
                loss=st.floats(allow_nan=False),
            ),
        ),
        weight=seconds,
        weights=st.lists(seconds).map(tuple),
    )
)
def test_losses_travel(share: LossShare) -> None:
    assert unpack(LossShare, pack(share), "losses") == share


REPORT = pack(StageReport(1, 2.0, Breakdown(2.0, 1.0), Peaks(1, 2, 3)))
SHARE = pack(LossShare(0, 0, {"": PartLosses({0: 0.5}, 0.5)}, 1.0))


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        *((kind, data) for kind in (StageReport, LossShare) for data in (b"", b"\xc1", msgpack.packb(3))),
        *((kind, good[:-1]) for kind, good in ((StageReport, REPORT), (LossShare, SHARE))),
        *((kind, good + b"\x00") for kind, good in ((StageReport, REPORT), (LossShare, SHARE))),
        (StageReport, msgpack.packb({})),
        (StageReport, msgpack.packb({**msgpack.unpackb(REPORT), "peaks": 5})),
        (StageReport, msgpack.packb({**msgpack.unpackb(REPORT), "resources": 5})),
        (LossShare, msgpack.packb({**msgpack.unpackb(SHARE), "parts": [["", [[1], 2.0]]]})),
        (LossShare, msgpack.packb({**msgpack.unpackb(SHARE), "extra": 1})),
    ],
)
def test_a_malformed_record_of_a_step_is_refused(kind: type[Any], data: bytes) -> None:
    with pytest.raises(ProtocolError, match="this record cannot be read"):
        unpack(kind, data, "this record")


def test_every_breakdown_is_filled_up_to_the_slowest_rank() -> None:
    reports = [
        StageReport(0, 3.0, Breakdown(3.0, 3.0), Peaks(held=2)),
        StageReport(1, 2.0, Breakdown(2.0, 1.5, drained=0.5), Peaks(held=1)),
    ]
    figures = StepFigures.of(reports, Topology(0, 2))
    assert (figures.seconds, [peaks.held for peaks in figures.peaks]) == (3.0, [2, 1])
    assert figures.breakdown[1] == Breakdown(3.0, 1.5, drained=1.5)


class Counters(InprocTransport):
    """Counts what a test says."""

    sent = received = 0

    def statistics(self) -> TransportStatistics:
        return TransportStatistics(bytes_sent=self.sent, bytes_received=self.received)


def test_a_stage_has_the_limits_of_its_group_and_the_bytes_that_all_its_ranks_moved_in_the_step() -> None:
    mesh, parts = Mesh((("pp", 1), ("tp", 2))), Breakdown(1.0, 1.0)
    transports = [Counters(CONTEXT), Counters(CONTEXT)]
    meters = [ResourceMeter(1 << 20, transport) for transport in transports]
    for sent in (3, 5):
        for transport in transports:
            transport.sent, transport.received = transport.sent + sent, transport.received + 2 * sent
        reports = [StageReport(0, 1.0, parts, Peaks(), meter.read(4)) for meter in meters]
        assert StepFigures.of(reports, Topology.at(0, mesh)).resources == (Resources(4, 1 << 20, 2 * sent, 4 * sent),)


@pytest.mark.parametrize(
    ("limit", "read"),
    [
        (Limit(), Resources()),
        (Limit(np.int64(2), np.int64(1 << 20)), Resources(4, 1 << 20)),  # type: ignore[arg-type]
        (Limit(2, 2**64 - 2), Resources(4, 2**64 - 2)),
        (Limit(10**30, 10**30), Resources()),  # more than any memory
    ],
)
def test_a_limit_of_any_kind_and_size_travels(limit: Limit, read: Resources) -> None:
    meter = ResourceMeter(limit.bytes, InprocTransport(CONTEXT))
    assert Resources.unpacked(meter.read(limit.slots(2))) == read


def test_a_report_with_unreadable_resources_is_refused_and_its_rank_named() -> None:
    good = StageReport(0, 1.0, Breakdown(1.0, 1.0), Peaks())
    bad = replace(good, stage=1, resources=good.resources[:-1])
    with pytest.raises(ProtocolError, match=r"of .*1.* cannot be read: resources has 31 bytes, must have 32"):
        StepFigures.of([good, bad], Topology(0, 2))


def test_losses_are_those_of_the_own_replica_and_the_loss_that_of_all() -> None:
    mesh = Mesh((("pp", 2), ("dp", 2)))
    shares = [LossShare() for _ in range(4)]
    for replica, (loss, weight) in enumerate([(3.0, 1.0), (5.0, 3.0)]):
        shares[mesh.rank(MeshPosition(1, replica, 0))] = LossShare(
            0, 0, {"": PartLosses({1: loss, 0: 2.0}, loss)}, weight
        )
    own = [
        Losses.of(shares, Topology.at(mesh.rank(MeshPosition(0, replica, 0)), mesh), 2, "mean") for replica in range(2)
    ]
    assert own == [Losses(4.5, (2.0, 3.0)), Losses(4.5, (2.0, 5.0))]
    assert Losses.of(shares, Topology.at(0, mesh), 2, "sum").loss == 8.0


def test_losses_of_several_parts_are_added_and_a_replica_that_skips_one_counts_in_its_mean() -> None:
    mesh, parts = Mesh((("pp", 2), ("dp", 2))), ("first", "second")
    shares = [LossShare() for _ in range(4)]
    shares[mesh.rank(MeshPosition(0, 0, 0))] = LossShare(parts={"first": PartLosses({0: 4.0}, 2.0)}, weight=1.0)
    for replica, weight in ((0, 1.0), (1, 3.0)):
        shares[mesh.rank(MeshPosition(1, replica, 0))] = LossShare(
            parts={"second": PartLosses({0: 5.0, 1: 7.0}, 6.0)}, weight=weight
        )
    first, second = (
        Losses.of(shares, Topology.at(mesh.rank(MeshPosition(0, replica, 0)), mesh), 2, "mean", parts)
        for replica in (0, 1)
    )
    assert first == Losses(6.5, (9.0, 7.0), {"first": 0.5, "second": 6.0})
    assert second == Losses(6.5, (5.0, 7.0), {"first": 0.5, "second": 6.0})


def test_a_plan_knows_m_from_any_list() -> None:
    lists: list[dict[str, Any]] = [{"inputs": [1, 2]}, {"targets": (1, 2)}, {"kwargs": [{}, {}]}, {"microbatches": 2}]
    for arguments in lists:
        plan = StepPlanner().plan(StepRequest(Mode.TRAIN, **arguments), 7)
        assert plan.step == StepId(7, Mode.TRAIN, 2)
        assert plan.batch.gradient_weights == (0.5, 0.5)
    plan = StepPlanner("sum").plan(StepRequest(Mode.TRAIN, weights=[1, 3], grad_scale=2.0))
    assert (plan.weights, plan.batch.gradient_weights) == ((1, 3), (2.0, 6.0))


def test_a_plan_names_all_lists_when_they_disagree() -> None:
    with pytest.raises(ConfigError, match=r"\(microbatches: 3, inputs: 1, targets: 2\)"):
        StepPlanner().plan(StepRequest(Mode.TRAIN, [1], [1, 2], microbatches=3))


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
