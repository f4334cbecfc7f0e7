"""Replicas that share each stage's forwards by claims (``share_replicas=True``), on one rank.

Who runs what is up to `rrfp.core.claims`; this gives its messages their way, and the data of a microbatch to the rank
that runs it. Before the first task all ranks tell each other how many microbatches their callers have, with weights and
sizes, so that a microbatch has the same number everywhere. What a caller has passed for it travels on its own, when the
rank that has it hears who runs it: behind it a forward that needs it waits, though its input be there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rrfp.compute.payload import Payload
from rrfp.compute.program import Batch
from rrfp.core import events as ev
from rrfp.core.stage_core import StageCore
from rrfp.errors import ProtocolError
from rrfp.model.tasks import F, Mode, StepId, Task
from rrfp.model.visits import Visits
from rrfp.runtime.context import RankContext
from rrfp.runtime.steps.deal import Home
from rrfp.runtime.steps.dealer import GivenShare, ReplicaExchange, factors_of, first_of, unpacked_fields
from rrfp.runtime.steps.plan import StepPlan
from rrfp.transports.base import Channel, Message, MessageKind

#: Forwards that a rank has claimed and not begun: one hides the way there and back behind the task before it.
DEPTH = 1

_EVENTS: Mapping[MessageKind, Callable[[StepId, Task, int], ev.Event]] = {
    MessageKind.OFFERED: ev.Offered,
    MessageKind.CLAIMED: ev.Claimed,
    MessageKind.GRANTED: ev.Granted,
}


class ForwardSharer(ReplicaExchange):
    """Shares the forwards of each training step; ``on_event`` takes events to ``core``."""

    def __init__(
        self, context: RankContext, core: StageCore, on_event: Callable[[ev.Event], None], *arguments: Any
    ) -> None:
        super().__init__(context, *arguments)
        self._core = core
        self._on_event = on_event
        self._supervisor = context.supervisor
        self._is_on_device = context.lane.device is not None
        topology = self._topology
        #: The ranks of each stage, by replica; a stage's forwards are held by those of the stage before.
        self._ranks = [topology.mesh.counterparts(topology.rank_of(stage)) for stage in range(topology.stages)]
        (self._virtual_stage,) = core.graph.placement.virtual_stages(topology.stage)
        #: The plan of the step as its caller made it; None in a step that is not shared.
        self._given: StepPlan | None = None
        #: By microbatch, whose caller has it; and by replica, whether the rank of this stage has data of its own.
        self._homes: tuple[Home, ...] = ()
        self._have_data: Sequence[bool] = ()
        #: What the program reads: lists by microbatch.
        self._lists_here: dict[str, list[Any]] = {}
        #: Microbatches of others whose data are here, and outputs that wait for theirs.
        self._here: set[int] = set()
        self._kept: dict[int, ev.Arrived] = {}
        self._giving: set[asyncio.Future[None]] = set()
        self.handlers = {
            **dict.fromkeys(_EVENTS, self._on_claim_message),
            MessageKind.OUTPUT: self._on_output,
            MessageKind.MICROBATCH: self._on_microbatch,
        }
        self.performers: Mapping[type, Callable[[Any], None]] = {
            ev.Offer: self._offer,
            ev.Claim: self._claim,
            ev.Grant: self._grant,
            ev.Give: self._give,
        }

    async def share(self, plan: StepPlan) -> StepPlan:
        """The plan of the microbatches of all replicas, which the program then has room for."""
        self._given = None
        self._homes, self._lists_here = (), {}
        self._here.clear()
        if plan.step.mode is not Mode.TRAIN:
            return plan
        await self._check_once(plan)
        lists = self._lists(plan)
        has_data = any(values is not None for values in lists.values())
        weights = () if plan.weights is None else tuple(map(float, plan.weights))
        scale = factors_of(plan.batch).grad_scales[0]
        own = GivenShare(plan.step.microbatches, plan.sizes or (), weights, scale, has_data)
        shares = await self._all_shares(plan, own)
        replicas = first_of(shares, self._replica_of)
        self._homes = tuple(Home(r, m) for r, share in enumerate(replicas) for m in range(share.microbatches))
        self._have_data = [shares[rank].has_data for rank in self._counterparts]
        sizes = None
        if all(sum(share.sizes) for share in replicas):
            sizes = tuple(replicas[home.replica].sizes[home.microbatch] for home in self._homes)
        scales = [shares[self._ranks[-1][home.replica]].grad_scale for home in self._homes]
        self._given = plan
        return await self._on_lane(
            "making room for microbatches", lambda: self._reopened(plan, self._weights(shares), sizes, scales)
        )

    def _weights(self, shares: Sequence[GivenShare]) -> tuple[float, ...] | None:
        """Of all microbatches, as the ranks with losses were given them; None: all 1."""
        given = [shares[rank].weights for rank in self._ranks[-1]]
        for rank, share in enumerate(shares):
            last = self._ranks[-1][self._replica_of[rank]]
            if share.weights and not shares[last].weights:
                raise ProtocolError(
                    f"weights is passed on {self._topology.name_of(rank)} and not on {self._topology.name_of(last)}, "
                    "which computes the losses: must be passed there"
                )
        if not any(given):
            return None
        return tuple(given[home.replica][home.microbatch] if given[home.replica] else 1.0 for home in self._homes)

    def _reopened(
        self,
        plan: StepPlan,
        weights: tuple[float, ...] | None,
        sizes: tuple[float, ...] | None,
        grad_scales: Sequence[float],
    ) -> StepPlan:
        """The plan of all microbatches, with which the program begins the step anew."""
        own, count = self._topology.replica, len(self._homes)
        batch = plan.batch_of(self._topology.stage)
        for name, is_used in self._used.items():
            values = getattr(batch, name)
            if is_used and (values is not None or any(self._have_data)):
                blank: Any = {} if name == "kwargs" else None
                self._lists_here[name] = [
                    blank if values is None or home.replica != own else values[home.microbatch] for home in self._homes
                ]
        new = Batch(
            self._lists_here.get("inputs"),
            self._lists_here.get("targets"),
            self._lists_here.get("kwargs"),
            factors_of(batch).dealt(weights, grad_scales),
            batch.return_outputs,
            batch.training_step,
            {m: (self._seeds[home.replica], home.microbatch) for m, home in enumerate(self._homes)},
        )
        step = plan.step._replace(microbatches=count)
        self._program.reopen(step, new)
        paces = self._paces.of(self._counterparts)
        pool = ev.Pool(own, len(self._counterparts), tuple(home.replica for home in self._homes), DEPTH, paces)
        return replace(
            plan,
            step=step,
            batch=new,
            weights=weights,
            sizes=sizes,
            visits=Visits(count),
            kwargs=None,
            pool=pool,
            homes=self._homes,
        )

    async def settle(self) -> None:
        """Wait until what the caller passed is no longer read by others."""
        if self._giving:
            await asyncio.gather(*self._giving)

    # What the core asks for.

    def _offer(self, offer: ev.Offer) -> None:
        self._tell(MessageKind.OFFERED, offer.task, self._copies_of(offer.task))

    def _claim(self, claim: ev.Claim) -> None:
        stage = max(0, self._topology.stage - 1)
        self._tell(MessageKind.CLAIMED, claim.task, [self._ranks[stage][claim.copy]])

    def _grant(self, grant: ev.Grant) -> None:
        copies = self._copies_of(grant.task)
        others = [rank for copy, rank in enumerate(copies) if copy != grant.copy and rank != self._topology.rank]
        self._tell(MessageKind.GRANTED, grant.task, others, grant.copy)

    def _give(self, give: ev.Give) -> None:
        """Send what the caller has passed for a microbatch to the rank that runs it."""
        if self._topology.stage and not self._have_data[self._topology.replica]:
            return
        giving = asyncio.ensure_future(self._send_given(give))
        self._giving.add(giving)
        giving.add_done_callback(partial(self._given_away, give.task))

    async def _send_given(self, give: ev.Give) -> None:
        plan, m = self._given, give.task.microbatch
        assert plan is not None, "the step is not shared"
        number = self._homes[m].microbatch
        (payload,) = (
            await self._on_lane("packing microbatches", lambda: self._packed(plan, [number]))
            if self._is_on_device
            else self._packed(plan, [number])
        )
        await self._messenger.send_to(self._counterparts[give.copy], self._message(m, payload))

    def _given_away(self, task: Task, giving: asyncio.Future[None]) -> None:
        self._giving.discard(giving)
        if not giving.cancelled() and (error := giving.exception()) is not None:
            self._fail(error, task)

    def _copies_of(self, task: Task) -> Sequence[int]:
        return self._ranks[self._core.graph.stage_of[task.virtual_stage]]

    def _tell(self, kind: MessageKind, task: Task, ranks: Sequence[int], copy: int | None = None) -> None:
        own = self._topology.replica if copy is None else copy
        for rank in ranks:
            message = Message(Channel.CONTROL, kind, self._activity.step, task, body={"copy": own})
            self._messenger.post(rank, message)

    # Messages.

    def _on_claim_message(self, message: Message) -> None:
        """An OFFERED, a CLAIMED or a GRANTED arrived."""
        step, task, kind, sender = message.step, message.task, message.kind, message.sender
        copy = message.body.get("copy")
        if step is None or task is None or type(copy) is not int or not 0 <= copy < len(self._counterparts):
            raise ProtocolError(f"rank {sender} sent {kind.value!r} with what cannot be read")
        if kind is not MessageKind.GRANTED and copy != self._replica_of[sender]:
            raise ProtocolError(f"rank {sender} sent {kind.value!r} of {task} for copy {copy}")
        stage = self._topology.stage
        holder, taker = max(0, stage - 1), min(stage + 1, self._topology.stages - 1)
        allowed = [*self._ranks[taker], *self._counterparts] if kind is MessageKind.CLAIMED else self._ranks[holder]
        if sender not in allowed:
            raise ProtocolError(f"rank {sender} sent {kind.value!r} of {task}, which it neither holds nor runs")
        self._on_event(_EVENTS[kind](step, task, copy))

    def _on_output(self, message: Message) -> None:
        """An OUTPUT arrived: of a forward that runs here behind the data of its microbatch."""
        arrived = self._messenger.received_output(message)
        m, step = arrived.task.microbatch, self._activity.step
        if self._given is not None and arrived.step == step and arrived.task.kind is F and self._lacks(m):
            self._kept[m] = arrived
        else:
            self._on_event(arrived)

    def _lacks(self, microbatch: int) -> bool:
        """Whether data of a microbatch are still to come."""
        if not 0 <= microbatch < len(self._homes) or microbatch in self._here:
            return False
        home = self._homes[microbatch].replica
        # On the first stage the data are the grant, be they none.
        return home != self._topology.replica and (not self._topology.stage or self._have_data[home])

    def _on_microbatch(self, message: Message) -> None:
        """What another caller has passed for a microbatch that runs here arrived."""
        step, task, sender = self._activity.step, message.task, message.sender
        if sender not in self._counterparts or task is None:
            raise ProtocolError(f"rank {sender} sent {message.kind.value!r}, but is no rank of this stage")
        if self._given is None or message.step != step:
            raise ProtocolError(f"rank {sender} sent a microbatch of {message.step} in {step}")
        m = task.microbatch
        if not self._lacks(m) or self._homes[m].replica != self._replica_of[sender]:
            raise ProtocolError(f"rank {sender} sent microbatch {m}, which is here, or of another replica")
        payload = self._payload(message)
        if self._is_on_device:
            self._supervisor.spawn(self._take_on_lane(m, payload))
        else:
            self._take(m, payload)
            self._taken(m)

    async def _take_on_lane(self, microbatch: int, payload: Payload) -> None:
        tensors = [tensor for tensor in payload.tensors if tensor is not None]
        await self._on_lane("taking microbatches", lambda: self._take(microbatch, payload), tensors)
        self._taken(microbatch)

    def _take(self, microbatch: int, payload: Payload) -> None:
        # A module may write into its inputs; what arrived is read-only.
        copied = tuple([tensor if tensor is None else tensor.clone() for tensor in payload.tensors])
        fields = unpacked_fields(Payload(copied, payload.structure))
        for name, values in self._lists_here.items():
            if (value := fields.get(name)) is not None:
                values[microbatch] = value

    def _taken(self, microbatch: int) -> None:
        """The data of a microbatch are where the program reads them."""
        self._here.add(microbatch)
        step = self._activity.step
        if self._topology.stage == 0 and step is not None:
            self._on_event(ev.Granted(step, Task(F, microbatch, self._virtual_stage), self._topology.replica))
        elif (arrived := self._kept.pop(microbatch, None)) is not None:
            self._on_event(arrived)
