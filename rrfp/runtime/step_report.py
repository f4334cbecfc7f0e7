"""The all-gathers of a step: of weights at its beginning, of losses at its end, and of reports behind its end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from rrfp.arbiter.loop import SettlingLoop
from rrfp.core import timeouts
from rrfp.core.size_order import least
from rrfp.core.tasks import Mode
from rrfp.core.usage import Peaks
from rrfp.errors import ProtocolError
from rrfp.log import get_logger
from rrfp.runtime import records
from rrfp.runtime.abort import Failure
from rrfp.runtime.all_gather import TreeAllGather
from rrfp.runtime.batching import Plan
from rrfp.runtime.context import RankContext
from rrfp.runtime.reports import PendingReports, ResourceMeter, StageReport, StepFigures
from rrfp.runtime.share_checks import check_equal_weights, check_numbers, check_scales, check_visits, check_weights
from rrfp.runtime.shares import Losses, LossShare, VisitShare, WeightShare, part_losses
from rrfp.trace.breakdown import breakdown
from rrfp.trace.spans import StepTrace

logger = get_logger(__name__)


#: Waits for the losses that this rank computes in a step, by part and microbatch.
ReadLosses = Callable[[], Awaitable[Mapping[str, Mapping[int, float]]]]


class StepReporter:
    """What one rank contributes to the all-gathers of a step, and what it makes of all ranks' answers.

    `RankActivity` counts the exchange of reports as the end of the step.
    """

    def __init__(self, context: RankContext, all_gather: TreeAllGather) -> None:
        self._topology = topology = context.topology
        self._model = context.model
        self._all_gather = all_gather
        self._activity = context.activity
        self._supervisor = context.supervisor
        self._refused: Sequence[int] = ()
        stages = [context.graph.stage_of[v] for v, readers in enumerate(context.graph.successors) if not readers]
        #: Whether this rank computes losses: it has to know the sum of all weights before its first backward.
        self.has_losses = topology.stage in stages
        #: Whether it adds the weights of its replica to that sum: one of those with losses does.
        self._gives_weights = topology.stage == min(stages) and topology.member == 0
        #: The parts with losses of their own.
        self._parts = () if context.model is None else context.model.feeds.losses
        #: Of the newest training step whose sizes say anything, the same on every rank; see `StepOpened`.
        self.size_correlation: float | None = None
        self._warned = False
        #: The losses of the step, once this rank has given its own.
        self._losses: asyncio.Future[Losses] | None = None
        #: The reports of the last step; whether a caller waits for them, and whether they are here.
        self._pending: PendingReports | None = None
        self._awaited, self._settled = asyncio.Event(), asyncio.Event()
        self._settled.set()

    async def share_weights(self, plan: Plan) -> None:
        """Sum the weights of the microbatches of all replicas, and normalise the plan by it where that matters.

        Raises:
            ConfigError: if the sum is 0, where a mean is asked for.
            ProtocolError: if another rank does not reduce as this one does.
        """
        own = WeightShare(plan.total_weight if self._gives_weights else 0.0, plan.reduce_gradients)
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

    def open(self, plan: Plan, read_losses: ReadLosses) -> None:
        """The step has begun. ``read_losses`` waits for this rank's losses, on a rank that computes any.

        A rank that computes none shares that at once, and so keeps no other rank waiting.
        """
        self._losses = losses = asyncio.get_running_loop().create_future()
        self._supervisor.spawn(self._share_losses(plan, read_losses, losses))

    async def losses(self) -> Losses:
        """Wait for the losses of all ranks."""
        assert self._losses is not None, "the step is not open"
        return await self._losses

    async def _share_losses(self, plan: Plan, read_losses: ReadLosses, losses: asyncio.Future[Losses]) -> None:
        await self._compare_visits(plan)
        has_weights = True if plan.weights is not None else None
        share = LossShare(plan.refused, plan.batch.training_step, loss_scale=plan.loss_scale, has_weights=has_weights)
        if not self.has_losses:
            await _give_way(asyncio.Event())  # to the first task
        else:
            share = self._with_losses(share, plan, await read_losses())
        answers = await self._all_gather.all_gather("losses", plan.step.number, records.pack(share))
        shares = [records.unpack(LossShare, data, "the losses of a step") for data in answers]
        check_numbers([share.training_step for share in shares], self._topology)
        check_scales([share.loss_scale for share in shares], self._topology)
        check_weights([share.has_weights for share in shares], self._topology)
        check_equal_weights([share.weights for share in shares], self._topology)
        self._compare_refused([share.refused for share in shares], plan)
        losses.set_result(Losses.of(shares, self._topology, plan.step.microbatches, plan.reduction, self._parts))

    def _with_losses(self, share: LossShare, plan: Plan, losses: Mapping[str, Mapping[int, float]]) -> LossShare:
        """``share`` with the losses that this rank computed, if there are any."""
        self._check_finite(plan, losses)
        weight = plan.total_weight
        # A replica all of whose weights are 0 adds nothing to the others' mean.
        is_part = bool(weight) or self._topology.replicas == 1
        parts = part_losses(losses, plan.step.microbatches, plan.weights, plan.reduction, is_part=is_part)
        if not parts:
            return share
        weights = plan.weights or () if self._parts else ()
        return replace(share, parts=parts, weight=weight, has_weights=plan.weights is not None, weights=weights)

    async def _compare_visits(self, plan: Plan) -> None:
        """Fail where ranks were given other visits, before one of them waits in vain for a task that another skips."""
        if self._model is None or not self._model.optional:
            return
        own = VisitShare(tuple(tuple(sorted(skipped)) for skipped in plan.skipped))
        answers = await self._all_gather.all_gather("visits", plan.step.number, records.pack(own))
        shares = [records.unpack(VisitShare, data, "the visits of a step") for data in answers]
        check_visits([share.skipped for share in shares], self._model.feeds.parts, self._topology)

    def report(
        self, plan: Plan, trace: StepTrace, peaks: Peaks, meter: ResourceMeter, size_correlation: float | None = None
    ) -> PendingReports:
        """Exchange reports behind the caller's back: this rank's call returns meanwhile."""
        self._pending = pending = PendingReports(self._wait)
        self._awaited.clear()
        self._settled.clear()
        self._activity.return_step()
        self._supervisor.spawn(self._exchange(plan, trace, peaks, meter, size_correlation, pending))
        return pending

    async def _exchange(
        self,
        plan: Plan,
        trace: StepTrace,
        peaks: Peaks,
        meter: ResourceMeter,
        size_correlation: float | None,
        pending: PendingReports,
    ) -> None:
        await _give_way(self._awaited)  # the caller gets the loss
        parts = breakdown(trace, self._topology.stage)
        # Before they have this report, the other ranks send nothing of the next step.
        seconds = trace.end - trace.start
        report = StageReport(self._topology.stage, seconds, parts, peaks, meter.read(), size_correlation)
        answers = await self._all_gather.all_gather("step", plan.step.number, records.pack(report))
        reports = [records.unpack(StageReport, data, "a step report") for data in answers]
        measured = least([report.size_correlation for report in reports])
        if plan.step.mode is Mode.TRAIN and measured is not None:
            self.size_correlation = measured
        pending.settle(StepFigures.of(reports, self._topology))
        self._activity.end_step()
        self._settled.set()

    @property
    def is_settled(self) -> bool:
        """Whether the reports of the last step are here, or there was none."""
        return self._settled.is_set()

    async def settle(self) -> None:
        """Wait for the reports of the last step: before they are here, another rank may be in that step."""
        if not self.is_settled:
            self._wait()
            await self._settled.wait()

    def _wait(self) -> None:
        """A caller waits for the reports."""
        self._awaited.set()
        self._activity.await_reports()

    def fail(self, failure: Failure) -> None:
        """The pipeline failed: a caller that reads the reports raises that, unless they are here."""
        if self._pending is not None:
            self._pending.settle(failure)

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

    def _check_finite(self, plan: Plan, losses: Mapping[str, Mapping[int, float]]) -> None:
        """Log the first loss that counts and is no finite number, once; members of a group have the same losses."""
        if self._warned or self._topology.member != 0:
            return
        for part, m, loss in ((part, m, loss) for part, own in losses.items() for m, loss in sorted(own.items())):
            if not math.isfinite(loss) and (plan.weights is None or plan.weights[m]):
                self._warned = True
                logger.warning(
                    "%s: the loss of microbatch %d%s is %s in %s; later losses are not checked",
                    self._topology.name,
                    m,
                    f" of part {part!r}" if part else "",
                    loss,
                    plan.name,
                    stage=self._topology.stage,
                )
                return


async def _give_way(until: asyncio.Event) -> None:
    """Leave the interpreter's lock to the other threads of the rank for a moment, or until ``until``."""
    if isinstance(asyncio.get_running_loop(), SettlingLoop):  # whose clock jumps, and there are no other threads
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(timeouts.GIVE_WAY_S):
            await until.wait()
