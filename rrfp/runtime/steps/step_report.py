"""The all-gathers of a step: of weights at its beginning, of losses at its end, and of reports behind its end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Self

from rrfp import timeouts
from rrfp.compute.loss import Reduction, combine_losses
from rrfp.core.stage_core import StageCore
from rrfp.core.usage import Peaks
from rrfp.errors import ProtocolError
from rrfp.log import get_logger
from rrfp.memory.size_order import by_stage, least
from rrfp.model.tasks import Kind, Mode
from rrfp.model.topology import Topology
from rrfp.runtime.abort import Failure
from rrfp.runtime.all_gather import TreeAllGather
from rrfp.runtime.context import RankContext
from rrfp.runtime.steps.deal import Deal, Home
from rrfp.runtime.steps.plan import StepPlan
from rrfp.runtime.steps.reports import MeasuredReport, PendingReports, ResourceMeter, StageReport, StepFigures
from rrfp.runtime.steps.round_trips import LimitFollower
from rrfp.trace.breakdown import breakdown
from rrfp.trace.spans import StepTrace


@dataclass(frozen=True, slots=True)
class WeightShare:
    """A rank's part of the weights of a step."""

    #: The sum of the weights of its replica's microbatches, on one rank of a replica; 0 on the others.
    weight: float
    #: Whether it sums gradients over replicas.
    reduces: bool
    #: How many microbatches its caller has.
    microbatches: int
    #: See `check_weights`.
    has_weights: bool | None


@dataclass(frozen=True, slots=True)
class VisitShare:
    """What the microbatches of a step skip, as one rank was given it."""

    #: For each microbatch, the virtual stages.
    skipped: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class PartLosses:
    """The losses of one part in a step."""

    #: Of those microbatches that visit it.
    by_microbatch: Mapping[int, float]
    #: Their weighted combination.
    loss: float


@dataclass(frozen=True, slots=True)
class LossShare:
    """A rank's part of the losses of a step; a rank that computes none shares that at once."""

    #: Calls on this rank whose arguments were refused, so far.
    refused: int = 0
    #: Its number on this rank, which random numbers depend on.
    training_step: int = 0
    #: The losses that the rank computes by part, "" where the model has one loss; empty elsewhere.
    parts: Mapping[str, PartLosses] = field(default_factory=dict)
    #: The sum of the weights of all microbatches there; 0 elsewhere.
    weight: float = 0.0
    #: The factor of this rank's GradScaler; None without one.
    loss_scale: float | None = None
    #: See `check_weights`.
    has_weights: bool | None = None
    #: Of the microbatches, where several parts have losses and this rank computes any.
    weights: tuple[float, ...] = ()


def part_losses(
    losses: Mapping[str, Mapping[int, float]],
    microbatches: int,
    weights: Sequence[float] | None,
    reduction: Reduction,
    *,
    is_part: bool,
) -> dict[str, PartLosses]:
    """The losses that a rank computes, by part and microbatch; 0 unless its replica ``is_part`` of the mean."""
    return {
        part: PartLosses(
            own,
            combine_losses([own.get(m, 0.0) for m in range(microbatches)], weights, reduction) if is_part else 0.0,
        )
        for part, own in losses.items()
        if own
    }


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of a step."""

    #: Over all replicas; None where none was computed.
    loss: float | None
    #: Of this rank's replica, in microbatch order.
    by_microbatch: tuple[float, ...]
    #: Over all replicas, in the order of parts; empty where the model has one loss.
    by_part: Mapping[str, float] = field(default_factory=dict)
    #: Where replicas share forwards, how many losses each computed; empty elsewhere.
    ran: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        shares: Sequence[LossShare],
        topology: Topology,
        microbatches: int,
        reduction: Reduction,
        parts: Sequence[str] = (),
        deal: Deal | None = None,
        homes: Sequence[Home] = (),
    ) -> Self:
        """Combine the shares of all ranks, by rank, for the one at ``topology``; ``parts`` have losses of their own.

        Of a ``deal``, and where replicas share forwards and microbatches have ``homes``, the losses by microbatch are
        those of the rank's own caller, whichever replica ran them.
        """
        mesh = topology.mesh
        ranks = [rank for rank, share in enumerate(shares) if share.parts and mesh.is_first(rank)]
        leaders = [(mesh.summand_of(rank), shares[rank]) for rank in ranks]
        weights = {replica: share.weight for replica, share in leaders}
        names = [part for part in parts or ("",) if any(part in share.parts for _, share in leaders)]
        by_part = {
            part: _shared_loss({r: s.parts[part].loss for r, s in leaders if part in s.parts}, weights, reduction)
            for part in names
        }
        mine = [share.parts for replica, share in leaders if replica == topology.summand]
        own = [each[part].by_microbatch for part in names for each in mine if part in each]
        by_microbatch = tuple(_sum(each[m] for each in own if m in each) for m in range(microbatches)) if own else ()
        if deal is not None:  # then there is one loss
            ran = {replica: share.parts[""].by_microbatch for replica, share in leaders}
            by_microbatch = tuple(ran[replica][m] for replica, m in deal.places(topology.replica))
        ran_here: tuple[int, ...] = ()
        if homes and leaders:
            every = {m: loss for _, share in leaders for m, loss in share.parts[""].by_microbatch.items()}
            by_microbatch = tuple(every[m] for m, home in enumerate(homes) if home.replica == topology.replica)
            counts = {replica: len(share.parts[""].by_microbatch) for replica, share in leaders}
            ran_here = tuple(counts.get(replica, 0) for replica in range(topology.replicas))
        loss = _sum(by_part.values()) if by_part else None
        return cls(loss, by_microbatch, by_part if parts else {}, ran_here)


def _shared_loss(losses: Mapping[int, float], weights: Mapping[int, float], reduction: Reduction) -> float:
    """A loss over all replicas, added in their order; nan where all weights of an evaluation are 0."""
    if len(weights) == 1:
        return next(iter(losses.values()))
    if reduction == "sum":
        return sum(losses.values())
    total = sum(weights.values())
    return sum(loss * weights[r] for r, loss in losses.items() if weights[r]) / total if total else math.nan


def _sum(values: Iterable[float]) -> float:
    """0 without values; one value as it is, to the last bit."""
    first, *further = (*values,) or (0.0,)
    return sum(further, first)


def check_numbers(numbers: Sequence[int], topology: Topology) -> None:
    """Ranks that draw for different training steps have loaded different states."""
    if len(set(numbers)) > 1:
        other = next(rank for rank, number in enumerate(numbers) if number != numbers[0])
        raise ProtocolError(
            f"the training step is {numbers[0]} on {topology.name_of(0)} and {numbers[other]} on "
            f"{topology.name_of(other)}: must be the same; load the state of one step on all ranks"
        )


def check_scales(scales: Sequence[float | None], topology: Topology) -> None:
    """The last stage's scale is in all gradients, and every rank divides its own by its scale."""
    if len(set(scales)) > 1:
        other = next(rank for rank, scale in enumerate(scales) if scale != scales[0])
        first, second = ("absent" if scale is None else f"{scale:g}" for scale in (scales[0], scales[other]))
        raise ProtocolError(
            f"the scale of the loss is {first} on {topology.name_of(0)} and {second} on "
            f"{topology.name_of(other)}: must be the same; call scale() with a GradScaler of the same "
            "arguments and state, enabled on all ranks or on none"
        )


def check_counts(counts: Sequence[int], topology: Topology) -> None:
    """Refuse numbers of microbatches that differ within a replica."""
    first: dict[int, int] = {}
    for rank, count in enumerate(counts):
        if count != (wanted := first.setdefault(topology.place_of(rank).replica, count)):
            raise ProtocolError(
                f"the number of microbatches is {count} on {topology.name_of(rank)}, must be {wanted} as on the first "
                "rank of its replica"
            )


def check_weights(have_weights: Sequence[bool | None], topology: Topology) -> None:
    """Refuse weights that a rank of a replica has and the rank with its losses has not."""
    having = {topology.mesh.summand_of(rank): rank for rank, has in enumerate(have_weights) if has}
    for rank, has in enumerate(have_weights) if having else ():
        if has is False and (other := having.get(topology.mesh.summand_of(rank))) is not None:
            raise ProtocolError(
                f"weights is passed on {topology.name_of(other)} and not on {topology.name_of(rank)}, which computes "
                "the losses: must be passed there"
            )


def check_equal_weights(weights: Sequence[Sequence[float]], topology: Topology) -> None:
    """Refuse weights of a microbatch that differ between the ranks that compute its losses: these are added."""
    first: dict[int, int] = {}
    for rank, own in enumerate(weights):
        if not own or own == weights[other := first.setdefault(topology.mesh.summand_of(rank), rank)]:
            continue
        m = next(m for m, (here, there) in enumerate(zip(own, weights[other], strict=True)) if here != there)
        raise ProtocolError(
            f"weights[{m}] is {weights[other][m]:g} on {topology.name_of(other)} and {own[m]:g} on "
            f"{topology.name_of(rank)}: must be the same on all ranks of a replica that compute losses"
        )


def check_visits(skipped: Sequence[Sequence[Sequence[int]]], parts: Sequence[str], topology: Topology) -> None:
    """Refuse visits that differ: a rank would wait for a task that another one skips."""
    first: dict[int, int] = {}
    for rank, own in enumerate(skipped):
        other = first.setdefault(topology.place_of(rank).replica, rank)
        count = max(len(own), len(skipped[other]))
        for m, (here, there) in enumerate(zip(_whole(own, count), _whole(skipped[other], count), strict=False)):
            if here != there:
                part = parts[min(set(here) ^ set(there))]
                does, does_not = (rank, other) if min(set(here) ^ set(there)) in here else (other, rank)
                raise ProtocolError(
                    f"visits: microbatch {m} skips {part!r} on {topology.name_of(does)} and not on "
                    f"{topology.name_of(does_not)}: must be the same on all ranks of a replica"
                )


def _whole(skipped: Sequence[Sequence[int]], count: int) -> Sequence[Sequence[int]]:
    return skipped or [()] * count


logger = get_logger(__name__)


#: Waits for the losses that this rank computes in a step, by part and microbatch.
ReadLosses = Callable[[], Awaitable[Mapping[str, Mapping[int, float]]]]


class StepReporter:
    """What one rank contributes to the all-gathers of a step, and what it makes of all ranks' answers.

    `RankActivity` counts the exchange of reports as the end of the step.
    """

    def __init__(
        self, context: RankContext, core: StageCore, all_gather: TreeAllGather, follower: LimitFollower | None = None
    ) -> None:
        self._topology = topology = context.topology
        self._core = core
        #: The most that was held in the steps before the current, or last, one.
        self.earlier = Peaks()
        self._meter = ResourceMeter(core.limit.bytes, context.transport)
        self._follower = follower
        self._model = model = context.settings.model
        self._claims = context.settings.claims
        self._all_gather = all_gather
        self._activity = context.activity
        self._time = context.time
        self._supervisor = context.supervisor
        self._refused: Sequence[int] = ()
        stages = [context.graph.stage_of[v] for v, readers in enumerate(context.graph.successors) if not readers]
        #: Whether this rank computes losses: it has to know the sum of all weights before its first backward.
        self.has_losses = topology.stage in stages
        #: Whether it adds the weights of its replica to that sum: one of those with losses does.
        self._gives_weights = topology.stage == min(stages) and topology.mesh.is_first(topology.rank)
        self._parts = () if model is None else model.feeds.losses
        #: Of the newest training step whose sizes say anything, the same on every rank; see `StepOpened`.
        self.size_correlation: float | None = None
        #: Of the newest training step, likewise.
        self.byte_rooms: tuple[float | None, ...] | None = None
        self._warned = False
        #: Gets the reports of all ranks about a training step.
        self.observe: Callable[[Sequence[StageReport]], None] | None = None
        #: The losses of the step, once this rank has given its own.
        self._losses: asyncio.Future[Losses] | None = None
        #: The reports of the last step; whether a caller waits for them, and whether they are here.
        self._pending: PendingReports | None = None
        self._awaited, self._settled = asyncio.Event(), asyncio.Event()
        self._settled.set()

    async def share_weights(self, plan: StepPlan) -> float:
        """The sum of the weights of all replicas' microbatches; ``plan`` is as this rank's caller gave it."""
        has_weights = True if plan.weights is not None else False if self.has_losses else None
        weight = plan.total_weight if self._gives_weights else 0.0
        own = WeightShare(weight, plan.reduce_gradients, plan.step.microbatches, has_weights)
        shares = await self._all_gather.share("weights", plan.step.number, own, "the weight of a replica")
        self._check_reduces([share.reduces for share in shares], plan)
        if self._claims:  # each rank has heard of its own stage alone
            check_counts([share.microbatches for share in shares], self._topology)
            check_weights([share.has_weights for share in shares], self._topology)
        return sum(share.weight for share in shares)

    def _check_reduces(self, reduces: Sequence[bool], plan: StepPlan) -> None:
        """A rank that sums gradients would wait in a collective for one that does not."""
        if len(set(reduces)) > 1:
            does, does_not = (self._topology.name_of(reduces.index(wanted)) for wanted in (True, False))
            raise ProtocolError(
                f"reduce_gradients is True on {does} and False on {does_not} in {plan.step}: must be the same on all"
            )

    def begin(self) -> None:
        """Another step follows the one whose peaks the core still has."""
        self.earlier = Peaks.worst([self.earlier, self._core.peaks])

    def open(self, plan: StepPlan, read_losses: ReadLosses) -> None:
        """The step has begun. ``read_losses`` waits for this rank's losses, on a rank that computes any.

        A rank that computes none shares that at once, and so keeps no other rank waiting.
        """
        self._losses = losses = asyncio.get_running_loop().create_future()
        self._supervisor.spawn(self._share_losses(plan, read_losses, losses))

    async def losses(self) -> Losses:
        assert self._losses is not None, "the step is not open"
        return await self._losses

    async def _share_losses(self, plan: StepPlan, read_losses: ReadLosses, losses: asyncio.Future[Losses]) -> None:
        await self._compare_visits(plan)
        has_weights = True if plan.weights is not None else None
        share = LossShare(plan.refused, plan.batch.training_step, loss_scale=plan.loss_scale, has_weights=has_weights)
        if not self.has_losses:
            await self._give_way(asyncio.Event())  # to the first task
        else:
            share = self._with_losses(share, plan, await read_losses())
        shares = await self._all_gather.share("losses", plan.step.number, share, "the losses of a step")
        check_numbers([share.training_step for share in shares], self._topology)
        check_scales([share.loss_scale for share in shares], self._topology)
        check_weights([share.has_weights for share in shares], self._topology)
        check_equal_weights([share.weights for share in shares], self._topology)
        self._compare_refused([share.refused for share in shares], plan)
        count, deal = plan.step.microbatches, plan.deal
        losses.set_result(Losses.of(shares, self._topology, count, plan.reduction, self._parts, deal, plan.homes))

    def _with_losses(self, share: LossShare, plan: StepPlan, losses: Mapping[str, Mapping[int, float]]) -> LossShare:
        self._check_finite(plan, losses)
        weight = plan.total_weight
        weights = plan.weights
        if plan.homes:
            own = losses.get("", {})
            weights = tuple((1.0 if weights is None else weights[m]) * (m in own) for m in range(len(plan.homes)))
            weight = sum(weights)
        # A replica all of whose weights are 0 adds nothing to the others' mean.
        is_part = bool(weight) or self._topology.summands == 1
        parts = part_losses(losses, plan.step.microbatches, weights, plan.reduction, is_part=is_part)
        if not parts:
            return share
        told = plan.weights or () if self._parts else ()
        return replace(share, parts=parts, weight=weight, has_weights=plan.weights is not None, weights=told)

    async def _compare_visits(self, plan: StepPlan) -> None:
        """Fail where ranks were given other visits, before one of them waits for a task that another skips."""
        if self._model is None or not self._model.optional:
            return
        own = VisitShare(tuple(tuple(sorted(skipped)) for skipped in plan.visits.skipped))
        shares = await self._all_gather.share("visits", plan.step.number, own, "the visits of a step")
        check_visits([share.skipped for share in shares], self._model.feeds.parts, self._topology)

    def report(self, plan: StepPlan, trace: StepTrace) -> PendingReports:
        """Exchange reports behind the caller's back: this rank's call returns meanwhile."""
        self._pending = pending = PendingReports(self._wait)
        self._awaited.clear()
        self._settled.clear()
        self._activity.return_step()
        shown = self._core.peaks, self._core.size_correlation, self._core.byte_room
        self._supervisor.spawn(self._exchange(plan, trace, shown, pending))
        return pending

    async def _exchange(
        self,
        plan: StepPlan,
        trace: StepTrace,
        shown: tuple[Peaks, float | None, float | None],
        pending: PendingReports,
    ) -> None:
        await self._give_way(self._awaited)  # the caller gets the loss
        parts = breakdown(trace, self._topology.stage)
        # Before they have this report, the other ranks send nothing of the next step.
        seconds = trace.end - trace.start
        resources = self._meter.read(self._core.view.slots)
        count, size = plan.step.microbatches, sum(plan.sizes or ())
        if plan.homes:
            ran = [task.microbatch for span in trace.tasks if (task := span.task).kind is Kind.F]
            count, size = len(ran), sum(plan.sizes[m] for m in ran) if plan.sizes is not None else 0.0
        peaks, correlation, room = shown
        report = StageReport(self._topology.stage, seconds, parts, peaks, resources, correlation, room, count, size)
        reports = await self._gather(plan, trace, report)
        measured = least([report.size_correlation for report in reports])
        if plan.step.mode is Mode.TRAIN and measured is not None:
            self.size_correlation = measured
        if plan.step.mode is Mode.TRAIN:
            rooms = ((report.stage, report.byte_room) for report in reports)
            self.byte_rooms = by_stage(rooms, self._topology.stages)
        if plan.step.mode is Mode.TRAIN and self.observe is not None:
            self.observe(reports)
        pending.settle(StepFigures.of(reports, self._topology))
        self._activity.end_step()
        self._settled.set()

    async def _gather(self, plan: StepPlan, trace: StepTrace, own: StageReport) -> Sequence[StageReport]:
        """The reports of all ranks; where the limit follows round trips, they agree on that of the next step."""
        number, follower, name = plan.step.number, self._follower, "a step report"
        if follower is None:
            return await self._all_gather.share("step", number, own, name)
        every = await self._all_gather.share("step", number, MeasuredReport(own, follower.measure(trace)), name)
        follower.observe(plan.step.mode, [each.measure for each in every])
        return [each.report for each in every]

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
        self._awaited.set()
        self._activity.await_reports()

    def fail(self, failure: Failure) -> None:
        """The pipeline failed: a caller that reads the reports raises that, unless they are here."""
        if self._pending is not None:
            self._pending.settle(failure)

    def _compare_refused(self, refused: Sequence[int], plan: StepPlan) -> None:
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

    def _check_finite(self, plan: StepPlan, losses: Mapping[str, Mapping[int, float]]) -> None:
        """Log the first loss that counts and is no finite number, once; members of a group have the same losses."""
        if self._warned or not self._topology.mesh.is_first(self._topology.rank):
            return
        for part, m, loss in ((part, m, loss) for part, own in losses.items() for m, loss in sorted(own.items())):
            if not math.isfinite(loss) and (plan.weights is None or plan.weights[m]):
                self._warned = True
                homes = plan.homes_of(self._topology.replica)
                logger.warning(
                    "%s: the loss of microbatch %s%s is %s in %s; later losses are not checked",
                    self._topology.name,
                    homes[m] if homes else m,
                    f" of part {part!r}" if part else "",
                    loss,
                    plan.name,
                    stage=self._topology.stage,
                )
                return

    async def _give_way(self, until: asyncio.Event) -> None:
        """Leave the interpreter's lock to the other threads of the rank for a moment, or until ``until``."""
        if self._time.is_virtual:  # there are no other threads
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(timeouts.GIVE_WAY_S):
                await until.wait()
