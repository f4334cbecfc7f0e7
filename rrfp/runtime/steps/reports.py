"""The reports of all ranks about one step, which are exchanged after the step has returned, and the wait for them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from struct import Struct

from rrfp.core.usage import Peaks
from rrfp.errors import ProtocolError, RrfpError
from rrfp.memory.round_trips import StageMeasure
from rrfp.model.topology import Topology
from rrfp.runtime.abort import Failure
from rrfp.trace.breakdown import Breakdown
from rrfp.transports.base import Transport

#: Resources as bytes: four numbers, the largest of which stands for None. So all bytes of this length are good ones.
_RESOURCES = Struct("<4Q")
_NO_LIMIT = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Resources:
    """The memory limits of a rank, and what its transport moved from the step before to the end of this one."""

    #: Chunk tasks that it may hold, K * C; None: any number.
    slots: int | None = None
    #: Bytes that it may hold; None: any number.
    byte_limit: int | None = None
    #: Tensor bytes sent to other ranks, those of all-gathers included.
    sent_bytes: int = 0
    #: Tensor bytes received, counted alike.
    received_bytes: int = 0

    @classmethod
    def unpacked(cls, data: bytes) -> Resources:
        """Read what a `ResourceMeter` made; its length is checked before."""
        *limits, sent, received = _RESOURCES.unpack(data)
        slots, byte_limit = (None if limit == _NO_LIMIT else limit for limit in limits)
        return cls(slots, byte_limit, sent, received)

    @classmethod
    def of_group(cls, ranks: Sequence[Resources]) -> Resources:
        """Those of a stage: the limits, which the ranks of its group share, and all their bytes."""
        sent, received = (sum(getattr(rank, name) for rank in ranks) for name in ("sent_bytes", "received_bytes"))
        return replace(ranks[0], sent_bytes=sent, received_bytes=received)


class ResourceMeter:
    """Reads the `Resources` of one rank, once a step.

    As bytes: every rank gets them from all ranks in each step, and only those with callbacks read them.
    """

    def __init__(self, byte_limit: int | None, transport: Transport) -> None:
        self._byte_limit = _packable(byte_limit)
        self._transport = transport
        self._sent = self._received = 0

    def read(self, slots: int | None) -> bytes:
        """The limits, ``slots`` of them, and the bytes since the last reading."""
        now, limits = self._transport.statistics(), (_packable(slots), self._byte_limit)
        packed = _RESOURCES.pack(*limits, now.bytes_sent - self._sent, now.bytes_received - self._received)
        self._sent, self._received = now.bytes_sent, now.bytes_received
        return packed


def _packable(limit: int | None) -> int:
    # A caller's numbers may be numpy's, and larger than any memory.
    return _NO_LIMIT if limit is None else min(int(limit), _NO_LIMIT)


@dataclass(frozen=True, slots=True)
class StageReport:
    """How a step went on one rank."""

    stage: int
    #: From its ``step`` call to its last task, send and reduction.
    seconds: float
    breakdown: Breakdown
    peaks: Peaks
    #: Its limits, and what it moved, as a `ResourceMeter` reads them.
    resources: bytes = _RESOURCES.pack(_NO_LIMIT, _NO_LIMIT, 0, 0)
    #: See `rrfp.memory.size_order.correlation`.
    size_correlation: float | None = None
    #: See `rrfp.core.stage_core.StageCore.byte_room`.
    byte_room: float | None = None
    #: That it ran, and the sum of their sizes; 0 where they are not known.
    microbatches: int = 0
    size: float = 0.0


@dataclass(frozen=True, slots=True)
class MeasuredReport:
    """A report, and what decides on the next limit."""

    report: StageReport
    measure: StageMeasure


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The reports of all ranks, combined for the ranks of one replica."""

    #: The longest time that any rank took.
    seconds: float
    #: For each stage, where the time of its group's leader went; each sums to ``seconds``.
    breakdown: tuple[Breakdown, ...]
    #: For each stage, the most that any rank of its group held.
    peaks: tuple[Peaks, ...]
    #: For each stage, those of the ranks of its group.
    packed_resources: tuple[tuple[bytes, ...], ...]
    #: By rank, those of all replicas, the most that it held.
    rank_peaks: tuple[Peaks, ...]

    @property
    def resources(self) -> tuple[Resources, ...]:
        """For each stage, the limits, and what all ranks of its group moved."""
        return tuple(Resources.of_group([*map(Resources.unpacked, group)]) for group in self.packed_resources)

    @property
    def slots(self) -> tuple[int | None, ...]:
        """For each stage, the limit on chunk tasks."""
        return tuple(stage.slots for stage in self.resources)

    @classmethod
    def of(cls, reports: Sequence[StageReport], topology: Topology) -> StepFigures:
        """Combine the reports of all ranks, by rank, for the one at ``topology``.

        Ranks that were done earlier than the slowest had nothing left to do; that is how their breakdowns are filled
        up. A report whose resources cannot be read is a ProtocolError.
        """
        for rank, report in enumerate(reports):
            if len(report.resources) != _RESOURCES.size:
                raise ProtocolError(
                    f"the step report of {topology.name_of(rank)} cannot be read: resources has "
                    f"{len(report.resources)} bytes, must have {_RESOURCES.size}"
                )
        seconds = max(report.seconds for report in reports)
        groups = [
            [reports[rank] for rank in replace(topology, stage=s, member=0).group] for s in range(topology.stages)
        ]
        return cls(
            seconds,
            tuple(_filled_up(group[0].breakdown, seconds) for group in groups),
            tuple(Peaks.worst(report.peaks for report in group) for group in groups),
            tuple(tuple([report.resources for report in group]) for group in groups),
            tuple([report.peaks for report in reports]),
        )


class PendingReports:
    """The reports of a step: made on the runtime's loop, read on any thread."""

    def __init__(self, on_wait: Callable[[], None]) -> None:
        #: The reports, or why they never come. Where the loop ends early, the session completes it.
        self.outcome: Future[StepFigures | Failure] = Future()
        #: Calls ``on_wait``; dropped once the outcome is known, since a kept result must not keep the ranks alive.
        self._announce: Callable[[], object] | None = partial(asyncio.get_running_loop().call_soon_threadsafe, on_wait)
        self._thread = threading.get_ident()
        self._pid = os.getpid()

    @property
    def has_come(self) -> bool:
        return (
            self.outcome.done() and self.outcome.exception() is None and isinstance(self.outcome.result(), StepFigures)
        )

    def settle(self, outcome: StepFigures | Failure) -> None:
        """The reports came, or the pipeline failed before; only the first call counts."""
        with suppress(InvalidStateError):
            self.outcome.set_result(outcome)
        self._announce = None

    def wait(self) -> StepFigures:
        """Block the calling thread until the reports are here."""
        if not self.outcome.done():
            self._check_place()
            self._ask()
        return _figures(self.outcome.result())

    async def arrive(self) -> StepFigures:
        """As `wait`, without blocking the loop of the caller."""
        if not self.outcome.done():
            self._ask()
        # Shielded: a caller that gives up waiting must not end the wait of others.
        return _figures(await asyncio.shield(asyncio.wrap_future(self.outcome)))

    def _check_place(self) -> None:
        if os.getpid() != self._pid:
            raise RrfpError(
                f"the reports of this step come to process {self._pid}, of which this one ({os.getpid()}) was forked: "
                "read the result there first"
            )
        if threading.get_ident() == self._thread:
            raise RrfpError(
                "the reports of this step are not here yet, and cannot be waited for on the event loop of the "
                "pipeline, which they need: await result.complete()"
            )

    def _ask(self) -> None:
        announce = self._announce  # another thread may drop it
        if announce is not None:
            with suppress(RuntimeError):  # the loop is closed, and the outcome is known
                announce()


def _figures(outcome: StepFigures | Failure) -> StepFigures:
    if isinstance(outcome, Failure):
        raise outcome.error()
    return outcome


def _filled_up(breakdown: Breakdown, seconds: float) -> Breakdown:
    rest = seconds - breakdown.step
    return replace(breakdown, step=seconds, drained=breakdown.drained + rest)
