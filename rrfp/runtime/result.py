"""The result of a step: one report a rank, gathered on all ranks and combined into one result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rrfp.compute.weighting import Reduction
from rrfp.core.tasks import Mode, StepId
from rrfp.core.topology import Topology
from rrfp.core.usage import Peaks
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
        weight: the sum of their weights there; 0 elsewhere.
        refused: calls on this rank whose arguments were refused, so far.
    """

    stage: int
    seconds: float
    breakdown: Breakdown
    peaks: Peaks
    losses: Mapping[int, float] = field(default_factory=dict)
    loss: float | None = None
    weight: float = 0.0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a step, the same on every rank (but for ``trace`` and ``outputs``).

    With several replicas, ``losses``, ``breakdown`` and ``peaks`` are those of this rank's replica.

    Attributes:
        step: the number of the training step, counted from the pipeline's ``first_step`` on (0 by default); of an
            evaluation, that of the training step after it.
        mode: training or forward only.
        microbatches: M, on this rank's replica.
        loss: the weighted loss of the step, over all replicas and without microbatches of weight 0; None where no loss
            was computed.
        losses: the loss of every microbatch, in microbatch order.
        seconds: the longest time that any rank took.
        breakdown: for each stage, where the time of its group's leader went; each sums to ``seconds``.
        peaks: for each stage, the most that any rank of its group held.
        trace: the spans of this rank (with `rrfp.local`: of all).
        outputs: of an evaluation, on the rank of the last virtual stage: outputs by microbatch, where
            ``return_outputs`` asks for them, by default where there is no loss.
    """

    step: int
    mode: Mode
    microbatches: int
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
        cls,
        step: StepId,
        training_step: int,
        reports: Sequence[StageReport],
        trace: StepTrace,
        topology: Topology,
        reduction: Reduction = "mean",
    ) -> StepResult:
        """Combine the reports of all ranks, by rank, for the one at ``topology``.

        Ranks that were done earlier than the slowest had nothing left to do; that is how their breakdowns are filled
        up.
        """
        seconds = max(report.seconds for report in reports)
        groups = [
            [reports[rank] for rank in replace(topology, stage=s, member=0).group] for s in range(topology.stages)
        ]
        losses = {m: loss for group in groups for m, loss in group[0].losses.items()}
        return cls(
            step=training_step,
            mode=step.mode,
            microbatches=step.microbatches,
            loss=_shared_loss(reports, topology, reduction),
            losses=tuple(losses[m] for m in sorted(losses)),
            seconds=seconds,
            breakdown=tuple(_filled_up(group[0].breakdown, seconds) for group in groups),
            peaks=tuple(Peaks.worst(report.peaks for report in group) for group in groups),
            trace=trace,
        )


def _shared_loss(reports: Sequence[StageReport], topology: Topology, reduction: Reduction) -> float | None:
    """The loss over all replicas, added in their order; nan where all weights of an evaluation are 0."""
    leaders = (report for rank, report in enumerate(reports) if topology.place_of(rank).member == 0)
    parts = [(report.loss, report.weight) for report in leaders if report.loss is not None]
    if len(parts) < 2:
        return parts[0][0] if parts else None
    if reduction == "sum":
        return sum(loss for loss, _ in parts)
    total = sum(weight for _, weight in parts)
    return sum(loss * weight for loss, weight in parts if weight) / total if total else math.nan


def _filled_up(breakdown: Breakdown, seconds: float) -> Breakdown:
    rest = seconds - breakdown.step
    return replace(breakdown, step=seconds, drained=breakdown.drained + rest)
