"""Deals the microbatches of a step to replicas by the durations of the steps before it (``share_replicas="dealt"``).

Every rank has the reports of all ranks, so all come to the same paces. Where these call for a deal, ranks tell each
other how many microbatches their callers have, and come to the same deal. Each rank then sends what its caller passed
for a microbatch to its counterpart in the replica that runs it. All this is done before the first task of the step.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, TypeVar

from torch import Tensor

from rrfp.compute.payload import Payload
from rrfp.compute.program import Batch, StageProgram
from rrfp.errors import ProtocolError
from rrfp.log import get_logger
from rrfp.model.tasks import Kind, Mode, Task
from rrfp.model.visits import Visits
from rrfp.runtime.all_gather import TreeAllGather
from rrfp.runtime.context import RankContext
from rrfp.runtime.lane_executor import LaneExecutor
from rrfp.runtime.messenger import Handler, Messenger
from rrfp.runtime.steps.deal import Deal, Home, ReplicaPace, dealt
from rrfp.runtime.steps.passed import PassedData, copied, factors_of, payload_of, unpacked_fields
from rrfp.runtime.steps.plan import StepPlan
from rrfp.runtime.steps.reports import StageReport
from rrfp.runtime.steps.step_report import check_counts
from rrfp.transports.base import Channel, Message, MessageKind

T = TypeVar("T")

logger = get_logger(__name__)

#: The pace of a rank is the median of so many training steps, and is known after the first few.
_STEPS, FEW = 5, 3
#: The factor on the pace of a rank for each step in which it runs nothing.
_IDLE = 0.8


@dataclass(frozen=True, slots=True)
class GivenShare:
    """The microbatches that the caller of a rank has."""

    microbatches: int
    #: Of each; empty where the caller passes none.
    sizes: tuple[float, ...] = ()
    #: Likewise; where forwards are claimed, when every rank needs those of all microbatches.
    weights: tuple[float, ...] = ()
    #: The factor of its caller on all gradients, that of a GradScaler included; likewise.
    grad_scale: float = 1.0
    #: Whether the rank uses anything that its caller passed for a microbatch.
    has_data: bool = False

    def check(self, name: str) -> None:
        """A ProtocolError if this, from the rank of that name, is no share."""
        count = self.microbatches
        if count < 1 or any(len(each) not in (0, count) for each in (self.sizes, self.weights)):
            raise ProtocolError(f"{name} sent sizes or weights of other microbatches than the {count} that it has")


class Paces:
    """How fast the replicas were in the last steps, the same on every rank; ``replica_of`` is by rank."""

    def __init__(self, replica_of: Sequence[int]) -> None:
        #: Whether they are seconds for a unit of size; otherwise for a microbatch.
        self.are_sized = False
        self._replica_of = replica_of
        self._samples: list[deque[float]] = [deque(maxlen=_STEPS) for _ in replica_of]
        #: Ranks that ran nothing in the last step: their samples are guesses, which the next one replaces.
        self._idle: set[int] = set()

    def observe(self, reports: Sequence[StageReport]) -> None:
        are_sized = all(report.size for report in reports if report.microbatches)
        for rank, (samples, report) in enumerate(zip(self._samples, reports, strict=True)):
            if are_sized != self.are_sized:
                samples.clear()
            if report.microbatches:
                pace = report.breakdown.compute / (report.size if are_sized else report.microbatches)
                samples.extend([pace] * (_STEPS if rank in self._idle else 1))
                self._idle.discard(rank)
            else:  # with each such step it counts as quicker: else a slow rank is never tried again
                samples.extend([pace * _IDLE for pace in samples])
                self._idle.add(rank)
        self.are_sized = are_sized

    def of(self, ranks: Sequence[int]) -> tuple[float, ...]:
        """Seconds that each of ``ranks`` takes for a microbatch, or a unit of size; empty before a few steps."""
        samples = [self._samples[rank] for rank in ranks]
        return tuple(map(median, samples)) if min(map(len, samples)) >= FEW else ()

    def by_replica(self) -> list[ReplicaPace] | None:
        """None before a few steps have ended."""
        if min(map(len, self._samples)) < FEW:
            return None
        stages: dict[int, list[float]] = {}
        for replica, samples in zip(self._replica_of, self._samples, strict=True):
            stages.setdefault(replica, []).append(median(samples))
        return [ReplicaPace.of(stages[replica]) for replica in sorted(stages)]


class ReplicaExchange(ABC):
    """What replicas that run one another's microbatches need, on one rank; ``seeds`` are by replica."""

    #: The part that takes each kind of message.
    handlers: Mapping[MessageKind, Handler]

    def __init__(
        self,
        context: RankContext,
        program: StageProgram,
        seeds: Sequence[int],
        all_gather: TreeAllGather,
        messenger: Messenger,
        executor: LaneExecutor,
    ) -> None:
        self._topology = topology = context.topology
        self._activity = context.activity
        self._program = program
        self._fail = context.fail
        #: Of random numbers.
        self._seeds = seeds
        self._all_gather = all_gather
        self._messenger = messenger
        self._executor = executor
        #: By replica, the rank of this stage; and the replica of each rank of the job.
        self._counterparts = topology.mesh.counterparts(topology.rank)
        self._replica_of = [topology.place_of(rank).replica for rank in range(topology.world)]
        self._passed = PassedData(topology, context.graph, "share_replicas")
        self._paces = Paces(self._replica_of)

    @abstractmethod
    async def share(self, plan: StepPlan) -> StepPlan:
        """The plan of the microbatches that this rank runs, or may run; its program then has room for their data."""

    @abstractmethod
    async def settle(self) -> None:
        """The step has ended: wait until others no longer read what this caller passed, and forget what theirs did."""

    def observe(self, reports: Sequence[StageReport]) -> None:
        """The reports of all ranks about a training step are here."""
        self._paces.observe(reports)

    async def _all_shares(self, plan: StepPlan, own: GivenShare) -> list[GivenShare]:
        """What the callers of all ranks have; a ProtocolError where the ranks of a replica have not as many."""
        shares = await self._all_gather.share("microbatches", plan.step.number, own, "the microbatches of a rank")
        for rank, share in enumerate(shares):
            share.check(self._topology.name_of(rank))
        check_counts([share.microbatches for share in shares], self._topology)
        return shares

    async def _on_lane(self, name: str, call: Callable[[], T], received: Iterable[Tensor] = ()) -> T:
        """The lane comes behind the caller's work on its tensors."""
        return await self._executor.run_extra(name, call, received)

    def _packed(self, plan: StepPlan, microbatches: Iterable[int]) -> list[Payload]:
        """What the caller passed for some microbatches; a StageError if it cannot travel."""
        return [payload.sent() for payload in self._passed.packed(plan, microbatches)]

    def _message(self, microbatch: int, payload: Payload, virtual_stage: int = 0) -> Message:
        body = {"structure": payload.structure}
        task, kind = Task(Kind.F, microbatch, virtual_stage), MessageKind.MICROBATCH
        return Message(Channel.FORWARD, kind, self._activity.step, task, payload.tensors, body)


class Dealer(ReplicaExchange):
    """Deals the microbatches of each training step, on one rank."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        #: How many microbatches the callers had in the last training step.
        self._given: tuple[int, ...] = ()
        self._last: Deal | None = None
        self._counts: tuple[int, ...] = ()
        self._is_checked = False
        self._arrived: dict[Home, Message] = {}
        self._news = asyncio.Event()
        #: Lists that the program reads, with what other callers passed for the step from an index on.
        self._taken: Sequence[Any] = ()
        self._num_kept = 0
        self.handlers = {MessageKind.MICROBATCH: self._on_microbatch}

    def observe(self, reports: Sequence[StageReport]) -> None:
        super().observe(reports)
        if self._last is None:
            first = {replica: rank for rank, replica in reversed([*enumerate(self._replica_of)])}
            self._given = tuple(reports[first[replica]].microbatches for replica in sorted(first))

    def _on_microbatch(self, message: Message) -> None:
        step, task, sender = self._activity.step, message.task, message.sender
        if sender not in self._counterparts or task is None:
            raise ProtocolError(f"rank {sender} sent {message.kind.value!r}, but is no rank of this stage")
        if step is None or message.step is None or message.step.number != step.number:
            raise ProtocolError(f"rank {sender} sent a microbatch of {message.step} in {step}")
        self._arrived[Home(self._replica_of[sender], task.microbatch)] = message
        self._news.set()

    async def share(self, plan: StepPlan) -> StepPlan:
        self._last = None
        if plan.step.mode is not Mode.TRAIN:
            return plan
        await self._check_once(plan)
        paces = self._paces.by_replica()
        if paces is None:
            return plan
        if not self._paces.are_sized and dealt(_ones(self._given), paces).is_trivial:
            return plan
        sizes, are_sized = await self._all_sizes(plan)
        self._given = tuple(map(len, sizes))
        if are_sized != self._paces.are_sized or (deal := dealt(sizes, paces)).is_trivial:
            return plan
        self._tell(deal)
        self._last = deal
        return await self._exchanged(plan, deal)

    async def settle(self) -> None:
        for values in self._taken:
            values[self._num_kept :] = [None] * (len(values) - self._num_kept)
        self._taken = ()

    async def _check_once(self, plan: StepPlan) -> None:
        """Whatever the caller passed must be able to travel."""
        if not self._is_checked:  # at once, and not when a rank becomes slow after a day
            await self._on_lane("checking microbatches", lambda: self._packed(plan, range(plan.step.microbatches)))
            self._is_checked = True

    async def _all_sizes(self, plan: StepPlan) -> tuple[list[list[float]], bool]:
        """The sizes of the microbatches that each replica's caller has, and whether all callers know them."""
        shares = await self._all_shares(plan, GivenShare(plan.step.microbatches, plan.sizes or ()))
        replicas = first_of(shares, self._replica_of)
        if all(sum(share.sizes) for share in shares):  # as `Paces` asks, or the two would never agree
            return [[*share.sizes] for share in replicas], True
        return _ones([share.microbatches for share in replicas]), False

    async def _exchanged(self, plan: StepPlan, deal: Deal) -> StepPlan:
        """Send what others run, and wait for what this rank runs of theirs."""
        own = self._topology.replica
        homes = deal.homes[own]
        leaving = [
            (taker, home.microbatch)
            for taker, taken in enumerate(deal.homes)
            for home in taken
            if taker != own and home.replica == own
        ]
        numbers = [m for _, m in leaving]
        packed = await self._on_lane("packing microbatches", lambda: self._packed(plan, numbers))
        sends = (
            self._messenger.send_to(self._counterparts[taker], self._message(m, payload))
            for (taker, m), payload in zip(leaving, packed, strict=True)
        )
        await asyncio.gather(*sends)
        wanted = [home for home in homes if home.replica != own]
        while not self._arrived.keys() >= {*wanted}:
            self._news.clear()
            await self._news.wait()
        arrived = {home: payload_of(message) for home, message in self._arrived.items()}
        self._arrived.clear()
        if others := arrived.keys() - {*wanted}:
            raise ProtocolError(
                f"replica {min(others).replica} sent microbatch {min(others).microbatch}, run elsewhere"
            )
        tensors = [t for payload in arrived.values() for t in payload.tensors if t is not None]
        return await self._on_lane(
            "taking microbatches", lambda: self._reopened(plan, deal, [arrived[home] for home in wanted]), tensors
        )

    def _reopened(self, plan: StepPlan, deal: Deal, arrived: Sequence[Payload]) -> StepPlan:
        """The plan of the deal, with which the program begins the step anew."""
        taken = [unpacked_fields(copied(payload)) for payload in arrived]
        homes = deal.homes[self._topology.replica]
        keep, count = len(homes) - len(taken), len(homes)
        batch = plan.batch_of(self._topology.stage)

        def joined(name: str, own: Any, blank: Any = None) -> list[Any] | None:
            others = [fields.get(name) for fields in taken]
            if own is None and all(each is None for each in others):
                return None
            kept = [blank if own is None else own[home.microbatch] for home in homes[:keep]]
            return [*kept, *(blank if each is None else each for each in others)]

        weights, sizes = joined("weights", plan.weights, 1.0), joined("sizes", plan.sizes)
        factors = factors_of(batch)
        grad_scales = joined("grad_scales", factors.grad_scales)
        assert grad_scales is not None
        new = Batch(
            joined("inputs", batch.inputs),
            joined("targets", batch.targets),
            joined("kwargs", batch.kwargs, {}),
            factors.dealt(weights, grad_scales),
            batch.return_outputs,
            batch.training_step,
            {m: (self._seeds[home.replica], home.microbatch) for m, home in enumerate(homes)},
        )
        self._taken = [values for values in (new.inputs, new.targets, new.kwargs) if values is not None]
        self._num_kept = keep
        step = plan.step._replace(microbatches=count)
        self._program.reopen(step, new)
        return replace(
            plan,
            step=step,
            batch=new,
            weights=None if weights is None else tuple(weights),
            sizes=None if sizes is None or None in sizes else tuple(sizes),
            visits=Visits(count),
            kwargs=None,
            deal=deal,
        )

    def _tell(self, deal: Deal) -> None:
        """Log a deal that differs from the one before, once a job."""
        if deal.counts != self._counts and self._topology.rank == 0:
            given = ", ".join(map(str, self._given))
            logger.info("replicas run %s of %s microbatches", ", ".join(map(str, deal.counts)), given)
        self._counts = deal.counts


def first_of(shares: Sequence[GivenShare], replica_of: Sequence[int]) -> list[GivenShare]:
    """Of each replica the share of its first rank."""
    first: dict[int, GivenShare] = {}
    for replica, share in zip(replica_of, shares, strict=True):
        first.setdefault(replica, share)
    return [first[replica] for replica in sorted(first)]


def _ones(counts: Sequence[int]) -> list[list[float]]:
    """Sizes of as many microbatches, where none are known."""
    return [[1.0] * count for count in counts]
