"""The reports of all ranks about one step, which are exchanged after the step has returned, and the wait for them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace

from rrfp.core.topology import Topology
from rrfp.core.usage import Peaks
from rrfp.errors import RrfpError
from rrfp.runtime.abort import Failure
from rrfp.trace.breakdown import Breakdown


@dataclass(frozen=True, slots=True)
class StageReport:
    """How a step went on one rank.

    Attributes:
        stage: the rank's stage.
        seconds: from its ``step`` call to its last task, send and reduction.
        breakdown: where that time went.
        peaks: the most it held.
    """

    stage: int
    seconds: float
    breakdown: Breakdown
    peaks: Peaks


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The reports of all ranks, combined for the ranks of one replica.

    Attributes:
        seconds: the longest time that any rank took.
        breakdown: for each stage, where the time of its group's leader went; each sums to ``seconds``.
        peaks: for each stage, the most that any rank of its group held.
    """

    seconds: float
    breakdown: tuple[Breakdown, ...]
    peaks: tuple[Peaks, ...]

    @classmethod
    def of(cls, reports: Sequence[StageReport], topology: Topology) -> StepFigures:
        """Combine the reports of all ranks, by rank, for the one at ``topology``.

        Ranks that were done earlier than the slowest had nothing left to do; that is how their breakdowns are filled
        up.
        """
        seconds = max(report.seconds for report in reports)
        groups = [
            [reports[rank] for rank in replace(topology, stage=s, member=0).group] for s in range(topology.stages)
        ]
        return cls(
            seconds,
            tuple(_filled_up(group[0].breakdown, seconds) for group in groups),
            tuple(Peaks.worst(report.peaks for report in group) for group in groups),
        )


class PendingReports:
    """Made on the runtime's loop, read on any thread.

    ``on_wait`` is called on that loop once a caller waits.

    Attributes:
        outcome: the reports, or why they never come. Where the loop ends early, the session completes it.
    """

    def __init__(self, on_wait: Callable[[], None]) -> None:
        self.outcome: Future[StepFigures | Failure] = Future()
        self._on_wait = on_wait
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._pid = os.getpid()

    @property
    def has_come(self) -> bool:
        """Whether the reports are here."""
        return (
            self.outcome.done() and self.outcome.exception() is None and isinstance(self.outcome.result(), StepFigures)
        )

    def settle(self, outcome: StepFigures | Failure) -> None:
        """The reports came, or the pipeline failed before; only the first call counts."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def wait(self) -> StepFigures:
        """Block the calling thread until the reports are here.

        Raises:
            PipelineAborted: if the pipeline failed before they came.
            RrfpError: on the runtime's own loop, which they need; in a forked child; or if the pipeline was left, and
                its loop did not run any more.
        """
        if not self.outcome.done():
            self._check_place()
            self._announce()
        return _figures(self.outcome.result())

    async def arrive(self) -> StepFigures:
        """As `wait`, without blocking the loop of the caller."""
        if not self.outcome.done():
            self._announce()
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

    def _announce(self) -> None:
        with suppress(RuntimeError):  # the loop is closed, and the outcome is known
            self._loop.call_soon_threadsafe(self._on_wait)


def _figures(outcome: StepFigures | Failure) -> StepFigures:
    if isinstance(outcome, Failure):
        raise outcome.error()
    return outcome


def _filled_up(breakdown: Breakdown, seconds: float) -> Breakdown:
    rest = seconds - breakdown.step
    return replace(breakdown, step=seconds, drained=breakdown.drained + rest)
