"""What a step tells: one report a rank, gathered on all ranks into one result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgpack

from rrfp.core.progress import Peaks
from rrfp.core.tasks import StepId
from rrfp.errors import ProtocolError
from rrfp.trace.breakdown import Breakdown
from rrfp.trace.spans import StepTrace


@dataclass(frozen=True, slots=True)
class StageReport:
    """How a step went on one rank.

    Attributes:
        stage: the rank's stage.
        seconds: from its ``step`` call to its last task, send and reduction.
        breakdown: where that time went.
        peaks: the most it held.
        losses: by microbatch, on the rank that computes them; empty elsewhere.
        loss: their weighted combination there; None elsewhere.
    """

    stage: int
    seconds: float
    breakdown: Breakdown
    peaks: Peaks
    losses: Mapping[int, float] = field(default_factory=dict)
    loss: float | None = None

    def encode(self) -> bytes:
        """As msgpack."""
        fields = asdict(self)
        fields["losses"] = sorted(self.losses.items())
        packed: bytes = msgpack.packb(fields)
        return packed

    @classmethod
    def decode(cls, data: bytes) -> StageReport:
        """Read `encode`'s bytes.

        Raises:
            ProtocolError: if they are something else.
        """
        try:
            fields = msgpack.unpackb(data)
            fields["breakdown"] = Breakdown(**fields["breakdown"])
            fields["peaks"] = Peaks(**fields["peaks"])
            fields["losses"] = dict(fields["losses"])
            return cls(**fields)
        except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            raise ProtocolError(f"a step report cannot be read: {error}") from None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a step, the same on every rank (but for ``trace`` and ``outputs``).

    Attributes:
        step: which step, counted from 0.
        loss: the weighted loss of the step; None where no loss was computed.
        losses: the loss of every microbatch, in microbatch order.
        seconds: the longest time that any rank took.
        breakdown: for each stage, where the time went; each sums to ``seconds``.
        peaks: for each stage, the most it held.
        trace: the spans of this rank (with `rrfp.local`: of all).
        outputs: forward only, on the rank of the last virtual stage and without a loss: outputs by microbatch.
    """

    step: StepId
    loss: float | None
    losses: tuple[float, ...]
    seconds: float
    breakdown: tuple[Breakdown, ...] = field(repr=False)
    peaks: tuple[Peaks, ...]
    trace: StepTrace = field(repr=False)
    outputs: Mapping[int, Any] = field(default_factory=dict, repr=False)

    @property
    def peak_held(self) -> tuple[int, ...]:
        """For each stage, the most chunk tasks whose forward had started and whose memory was not free again."""
        return tuple(peak.held for peak in self.peaks)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """For each stage, the most bytes held by microbatches in work and by outputs on their way out."""
        return tuple(peak.num_bytes for peak in self.peaks)

    @classmethod
    def of(
        cls, step: StepId, reports: Sequence[StageReport], trace: StepTrace, outputs: Mapping[int, Any]
    ) -> StepResult:
        """Combine the reports of all stages.

        Ranks that were done earlier than the slowest had nothing left to do; that is how their breakdowns are filled
        up.
        """
        seconds = max(report.seconds for report in reports)
        losses = {m: loss for report in reports for m, loss in report.losses.items()}
        return cls(
            step=step,
            loss=next((report.loss for report in reports if report.loss is not None), None),
            losses=tuple(losses[m] for m in sorted(losses)),
            seconds=seconds,
            breakdown=tuple(_filled_up(report.breakdown, seconds) for report in reports),
            peaks=tuple(report.peaks for report in reports),
            trace=trace,
            outputs=outputs,
        )


def _filled_up(breakdown: Breakdown, seconds: float) -> Breakdown:
    rest = seconds - breakdown.step
    return replace(breakdown, step=seconds, drained=breakdown.drained + rest)
