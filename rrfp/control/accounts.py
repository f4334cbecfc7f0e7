"""What all ranks tell each other about a step: at its beginning the weights of losses, at its end how it went."""

from __future__ import annotations

from collections.abc import Mapping

import msgpack

from rrfp.batching import Plan
from rrfp.compute.weighting import Reduction, combine_losses
from rrfp.control.exchange import TreeExchange
from rrfp.core.graph import Graph
from rrfp.core.progress import Peaks
from rrfp.core.topology import Topology
from rrfp.errors import ProtocolError
from rrfp.result import StageReport, StepResult
from rrfp.trace.breakdown import breakdown
from rrfp.trace.spans import StepTrace


class Accounts:
    """One rank's part.

    Args:
        place: where the rank is.
        graph: of the pipeline.
        exchange: the all-gather over all ranks.
    """

    def __init__(self, place: Topology, graph: Graph, exchange: TreeExchange) -> None:
        self._place = place
        self._exchange = exchange
        #: Whether this rank computes losses: it has to know the sum of all weights before its first backward.
        self.has_losses = any(not graph.successors[v] for v in graph.placement.virtual_stages(place.stage))

    async def share_weights(self, plan: Plan) -> None:
        """Sum the weights of the microbatches of all replicas, and normalise the plan by it where that matters.

        Raises:
            ConfigError: if the sum is 0, where a mean is asked for.
            ProtocolError: if another rank gives something else than a weight.
        """
        gives = self.has_losses and self._place.member == 0
        own = msgpack.packb(plan.total_weight if gives else 0.0)
        told = [msgpack.unpackb(data) for data in await self._exchange.exchange("weights", plan.step.number, own)]
        if not all(isinstance(weight, float) for weight in told):
            raise ProtocolError(f"the weights of the replicas are {told}, must be numbers")
        if self.has_losses:
            plan.normalise(sum(told))

    async def settle(
        self, plan: Plan, reduction: Reduction, trace: StepTrace, peaks: Peaks, losses: Mapping[int, float]
    ) -> StepResult:
        """Give this rank's report of a step, and make one result of all."""
        place, weight = self._place, plan.total_weight if losses else 0.0
        loss = None
        if losses:
            ordered = [losses[m] for m in sorted(losses)]
            # A replica all of whose weights are 0 adds nothing to the others' mean.
            loss = combine_losses(ordered, plan.weights, reduction) if weight or place.replicas == 1 else 0.0
        parts = breakdown(trace, place.stage)
        report = StageReport(place.stage, trace.end - trace.start, parts, peaks, losses, loss, weight)
        answers = await self._exchange.exchange("step", plan.step.number, report.encode())
        return StepResult.of(plan.step, [StageReport.decode(data) for data in answers], trace, place, reduction)
