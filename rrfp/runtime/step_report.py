"""What all ranks gather about a step: at its beginning the weights of losses, at its end a report of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rrfp.compute.weighting import combine_losses
from rrfp.core.graph import Graph
from rrfp.core.topology import Topology
from rrfp.core.usage import Peaks
from rrfp.errors import ProtocolError
from rrfp.log import get_logger
from rrfp.runtime import records
from rrfp.runtime.all_gather import TreeAllGather
from rrfp.runtime.batching import Plan
from rrfp.runtime.result import StageReport, StepResult
from rrfp.trace.breakdown import breakdown
from rrfp.trace.spans import StepTrace

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WeightShare:
    """A rank's part of the weights of a step.

    Attributes:
        weight: the sum of the weights of its losses; 0 where it computes none.
        reduces: whether it sums gradients over replicas.
    """

    weight: float
    reduces: bool


class StepReporter:
    """What one rank contributes to the all-gathers of a step, and what it makes of all ranks' answers."""

    def __init__(self, topology: Topology, graph: Graph, all_gather: TreeAllGather) -> None:
        self._topology = topology
        self._all_gather = all_gather
        self._refused: Sequence[int] = ()
        #: Whether this rank computes losses: it has to know the sum of all weights before its first backward.
        self.has_losses = any(not graph.successors[v] for v in graph.placement.virtual_stages(topology.stage))
        self._warned = False

    async def share_weights(self, plan: Plan) -> None:
        """Sum the weights of the microbatches of all replicas, and normalise the plan by it where that matters.

        Raises:
            ConfigError: if the sum is 0, where a mean is asked for.
            ProtocolError: if another rank does not reduce as this one does.
        """
        gives = self.has_losses and self._topology.member == 0
        own = WeightShare(plan.total_weight if gives else 0.0, plan.reduce_gradients)
        gathered = await self._all_gather.all_gather("weights", plan.step.number, records.pack(own))
        shares = [records.unpack(WeightShare, data, "the weight of a replica") for data in gathered]
        self._check_reduces([share.reduces for share in shares], plan)
        if self.has_losses:
            plan.normalise(sum(share.weight for share in shares))

    def _check_reduces(self, reduces: Sequence[bool], plan: Plan) -> None:
        """A rank that sums gradients would wait in a collective for one that does not."""
        if len(set(reduces)) > 1:
            does, does_not = (self._topology.name_of(reduces.index(wanted)) for wanted in (True, False))
            raise ProtocolError(
                f"reduce_gradients is True on {does} and False on {does_not} in {plan.step}: must be the same on all"
            )

    async def report(self, plan: Plan, trace: StepTrace, peaks: Peaks, losses: Mapping[int, float]) -> StepResult:
        """Gather the reports of all ranks, and make one result of them."""
        topology, weight = self._topology, plan.total_weight if losses else 0.0
        loss = None
        if losses:
            self._check_finite(plan, losses)
            ordered = [losses[m] for m in sorted(losses)]
            # A replica all of whose weights are 0 adds nothing to the others' mean.
            loss = combine_losses(ordered, plan.weights, plan.reduction) if weight or topology.replicas == 1 else 0.0
        parts = breakdown(trace, topology.stage)
        report = StageReport(topology.stage, trace.end - trace.start, parts, peaks, losses, loss, weight, plan.refused)
        answers = await self._all_gather.all_gather("step", plan.step.number, records.pack(report))
        reports = [records.unpack(StageReport, data, "a step report") for data in answers]
        self._compare_refused([report.refused for report in reports], plan)
        return StepResult.of(plan.step, plan.batch.training_step, reports, trace, topology, plan.reduction)

    def _compare_refused(self, refused: Sequence[int], plan: Plan) -> None:
        """Warn when calls were refused on some ranks only: a rank that then took its next batch is ahead of others."""
        if refused == self._refused or self._topology.rank != 0:
            return
        self._refused = refused
        if least := [rank for rank, count in enumerate(refused) if count != min(refused)]:
            counts = ", ".join(f"{refused[rank]} on {self._topology.name_of(rank)}" for rank in least)
            logger.warning(
                "%s: calls refused with ConfigError: %s, %d on the other ranks. A rank that went on with its next "
                "batch computes with other data than the others from then on",
                plan.name,
                counts,
                min(refused),
            )

    def _check_finite(self, plan: Plan, losses: Mapping[int, float]) -> None:
        """Log the first loss that counts and is no finite number, once; members of a group have the same losses."""
        if self._warned or self._topology.member != 0:
            return
        for m, loss in sorted(losses.items()):
            if not math.isfinite(loss) and (plan.weights is None or plan.weights[m]):
                self._warned = True
                logger.warning(
                    "%s: the loss of microbatch %d is %s in %s; later losses are not checked",
                    self._topology.name,
                    m,
                    loss,
                    plan.name,
                    stage=self._topology.stage,
                )
                return
