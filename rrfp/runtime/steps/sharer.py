"""Replicas that share each stage's forwards by claims (``share_replicas=True``), on one rank.

Who runs what is up to `rrfp.core.claims`; this gives its messages their way, and the data of a microbatch to the rank
that runs it. Before the first task the ranks of a stage tell each other how many microbatches their callers have, with
weights and sizes, so that a microbatch has the same number everywhere; other stages do not matter to them. What a
caller has passed for it travels on its own, when the rank that has it hears who runs it: behind it a forward that needs
it waits, though its input be there.

Tensors are packed and copied on the lane only: packed once before the step, and copied by the forward that reads them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from rrfp.compute.payload import Payload
from rrfp.compute.program import Batch
from rrfp.core import events as ev
from rrfp.core.claims import are_even
from rrfp.core.stage_core import StageCore
from rrfp.errors import ProtocolError
from rrfp.model.tasks import F, Mode, StepId, Task
from rrfp.model.visits import Visits
from rrfp.runtime import records
from rrfp.runtime.all_gather import bytes_in, to_tensor
from rrfp.runtime.context import RankContext
from rrfp.runtime.steps.deal import Home
from rrfp.runtime.steps.dealer import GivenShare, ReplicaExchange
from rrfp.runtime.steps.passed import copied, factors_of, payload_of, unpacked_fields
from rrfp.runtime.steps.plan import StepPlan
from rrfp.runtime.steps.round_trips import LimitFollower
from rrfp.transports.base import Channel, Message, MessageKind

#: Forwards that a rank has claimed and not begun: one hides the way there and back behind the task before it. With
#: ``limit="auto"`` ranks claim further ahead where links are slow.
DEPTH = 1

#: What stands for that which no caller has passed.
_BLANK: Mapping[str, Any] = {"kwargs": {}}

_EVENTS: Mapping[MessageKind, Callable[[StepId, Task, int], ev.Event]] = {
    MessageKind.OFFERED: ev.Offered,
    MessageKind.CLAIMED: ev.Claimed,
    MessageKind.GRANTED: ev.Granted,
}


class _Passed(Sequence[Any]):
    """What callers have passed, by microbatch; calls ``before`` with the number of one that is read."""

    def __init__(self, values: Sequence[Any], before: Callable[[int], None]) -> None:
        self._values = values
        self._before = before

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        numbers = range(len(self._values))[index]
        if isinstance(numbers, range):
            return [self[m] for m in numbers]
        self._before(numbers)
        return self._values[numbers]


class ForwardSharer(ReplicaExchange):
    """Shares the forwards of each training step; ``on_event`` takes events to ``core``.

    ``limits`` says how far ahead this rank claims, where that follows the links.
    """

    def __init__(
        self,
        context: RankContext,
        core: StageCore,
        on_event: Callable[[ev.Event], None],
        limits: LimitFollower | None,
        *arguments: Any,
    ) -> None:
        super().__init__(context, *arguments)
        self._core = core
        self._on_event = on_event
        self._limits = limits
        self._supervisor = context.supervisor
        self._adopt = context.lane.adopt
        topology, graph = self._topology, core.graph
        #: By virtual stage, the ranks of its stage by replica; its forwards are held by those of the one before.
        self._ranks = [topology.mesh.counterparts(topology.rank_of(stage)) for stage in graph.stage_of]
        #: Of a microbatch, what frees memory on this stage.
        own = graph.placement.virtual_stages(topology.stage)
        self._last_tasks = [Task(graph.last_kind(v, Mode.TRAIN), 0, v) for v in own]
        self._is_first = own[0] == 0
        #: By replica, what callers have for a step that is about to begin, and that step.
        self._shares: dict[int, tuple[StepId, GivenShare]] = {}
        self._all_told = asyncio.Event()
        #: By microbatch, whose caller has it; empty in a step that is not shared. And by replica, whether the rank of
        #: this stage has data of its own.
        self._homes: tuple[Home, ...] = ()
        self._have_data: Sequence[bool] = ()
        #: What this rank's caller has passed, by its own microbatches.
        self._own: Sequence[Payload] = ()
        #: What the program reads: lists by microbatch.
        self._lists_here: dict[str, list[Any]] = {}
        #: Microbatches of others whose data are here; those with tensors as they arrived; outputs that wait for theirs.
        self._here: set[int] = set()
        #: Which of its caller's data each copy has: with several chunks it may run the microbatch more than once.
        self._given: set[tuple[int, int]] = set()
        self._arrived: dict[int, Payload] = {}
        self._kept: dict[int, ev.Arrived] = {}
        #: How much is on its way to others.
        self._num_leaving = 0
        self._all_left = asyncio.Event()
        self._all_left.set()
        self.handlers = {
            **dict.fromkeys(_EVENTS, self._on_claim_message),
            MessageKind.SHARE: self._on_share,
            MessageKind.OUTPUT: self._on_output,
            MessageKind.MICROBATCH: self._on_microbatch,
        }
        self.performers: Mapping[type, Callable[[Any], None]] = {
            # Of these each rank hears in this order.
            ev.Offer: partial(self._messenger.soon, self._offer),
            ev.Claim: partial(self._messenger.soon, self._claim),
            ev.Grant: partial(self._messenger.soon, self._grant),
            ev.Give: self._give,
        }

    async def share(self, plan: StepPlan) -> StepPlan:
        self._homes, self._lists_here = (), {}
        self._here.clear()
        self._given.clear()
        self._check_begins(plan.step)
        if plan.step.mode is not Mode.TRAIN:
            return plan
        lists = self._passed.lists(plan)
        has_data = any(values is not None for values in lists.values())
        given = () if plan.weights is None else tuple(map(float, plan.weights))
        scale = factors_of(plan.batch).grad_scales[0]
        own = GivenShare(plan.step.microbatches, plan.sizes or (), given, scale, has_data)
        self._tell_share(plan.step, own)
        if self._is_first or has_data:  # while these messages travel
            count = plan.step.microbatches
            self._own = await self._on_lane("packing microbatches", lambda: self._packed(plan, range(count)))
        await self._all_told.wait()
        self._all_told.clear()
        told, self._shares = self._shares, {}
        shares = [told[replica][1] for replica in range(len(told))]
        self._homes = homes = tuple(Home(r, m) for r, share in enumerate(shares) for m in range(share.microbatches))
        self._have_data = [share.has_data for share in shares]
        sizes: tuple[float, ...] | None = None
        weights: tuple[float, ...] | None = None
        if all(sum(share.sizes) for share in shares):
            sizes = tuple(shares[home.replica].sizes[home.microbatch] for home in homes)
        # What the ranks with losses were given counts; they are of one stage.
        if any(share.weights for share in shares):
            every = [share.weights or (1.0,) * share.microbatches for share in shares]
            weights = tuple(every[home.replica][home.microbatch] for home in homes)
        scales = [shares[home.replica].grad_scale for home in homes]
        shared = self._pooled(plan, weights, sizes, scales)
        reopen = partial(self._program.reopen, shared.step, shared.batch)
        reopening = self._executor.start_extra("making room for microbatches", reopen)
        if self._core.limit.bytes is None:
            self._supervisor.spawn(reopening)  # the first task runs behind it
        else:
            await reopening  # the program is asked at once how large forwards are
        return shared

    def _tell_share(self, step: StepId, own: GivenShare) -> None:
        """Tell this stage's ranks in the other replicas what this one's caller has."""
        tensor = to_tensor(records.pack(own))
        for rank in self._counterparts:
            if rank != self._topology.rank:
                self._messenger.post(rank, Message(Channel.CONTROL, MessageKind.SHARE, step, tensors=(tensor,)))
        self._take_share(self._topology.replica, step, own)

    def _take_share(self, replica: int, step: StepId, share: GivenShare) -> None:
        self._shares[replica] = step, share
        if len(self._shares) == len(self._counterparts):
            self._all_told.set()

    def _check_begins(self, begun: StepId) -> None:
        """This rank begins a step: the others must begin the same."""
        for replica, (step, _) in self._shares.items():
            if step[:2] != begun[:2]:
                self._disagree(self._counterparts[replica], step, begun)

    def _disagree(self, sender: int, step: StepId, own: StepId | None) -> NoReturn:
        where = f"{self._topology.name_of(sender)} is in {step}, {self._topology.name} in {own}"
        error = ProtocolError(f"replicas disagree on the step: {where}; all ranks must make the same calls in order")
        error.is_of_callers = True
        raise error

    def _pooled(
        self,
        plan: StepPlan,
        weights: tuple[float, ...] | None,
        sizes: tuple[float, ...] | None,
        grad_scales: Sequence[float],
    ) -> StepPlan:
        """The plan of all microbatches."""
        own, count = self._topology.replica, len(self._homes)
        batch = plan.batch_of(self._topology.stage)
        for name, values in self._passed.lists(plan).items() if any(self._have_data) else ():
            blank = _BLANK.get(name)
            self._lists_here[name] = [
                blank if values is None or home.replica != own else values[home.microbatch] for home in self._homes
            ]
        passed = {name: _Passed(values, self._copy) for name, values in self._lists_here.items()}
        new = Batch(
            passed.get("inputs"),
            passed.get("targets"),
            passed.get("kwargs"),
            factors_of(batch).dealt(weights, grad_scales),
            batch.return_outputs,
            batch.training_step,
            {m: (self._seeds[home.replica], home.microbatch) for m, home in enumerate(self._homes)},
        )
        paces = self._paces.of(self._counterparts)
        depth = DEPTH if self._limits is None else self._limits.claimed_ahead
        copies = len(self._counterparts)
        # The same on all ranks, as reports are: of sizes each stage has heard from its own ranks only.
        is_even = not self._paces.are_sized and are_even(map(self._paces.of, self._ranks))
        pool = ev.Pool(own, copies, tuple(home.replica for home in self._homes), depth, paces, is_even)
        return replace(
            plan,
            step=plan.step._replace(microbatches=count),
            batch=new,
            weights=weights,
            sizes=sizes,
            visits=Visits(count),
            kwargs=None,
            pool=pool,
            homes=self._homes,
        )

    async def settle(self) -> None:
        await self._all_left.wait()
        self._own = ()
        self._forget(self._here)

    # What the core asks for.

    def _offer(self, offer: ev.Offer) -> None:
        self._tell(MessageKind.OFFERED, offer.task, self._copies_of(offer.task))

    def _claim(self, claim: ev.Claim) -> None:
        self._tell(MessageKind.CLAIMED, claim.task, [self._holders_of(claim.task)[claim.copy]])

    def _grant(self, grant: ev.Grant) -> None:
        copies = self._copies_of(grant.task)
        others = [rank for copy, rank in enumerate(copies) if copy != grant.copy and rank != self._topology.rank]
        self._tell(MessageKind.GRANTED, grant.task, others, grant.copy)

    def _give(self, give: ev.Give) -> None:
        """Send what the caller has passed for a microbatch to the rank that runs it."""
        _, m, virtual_stage = give.task
        is_known = (m, give.copy) in self._given or not self._have_data[self._topology.replica]
        if virtual_stage and is_known:
            return
        self._given.add((m, give.copy))
        self._num_leaving += 1
        self._all_left.clear()
        self._supervisor.spawn(self._send_given(give), give.task)

    async def _send_given(self, give: ev.Give) -> None:
        m = give.task.microbatch
        message = self._message(m, self._own[self._homes[m].microbatch], give.task.virtual_stage)
        await self._messenger.send_to(self._counterparts[give.copy], message)
        self._num_leaving -= 1
        if not self._num_leaving:
            self._all_left.set()

    def _copies_of(self, task: Task) -> Sequence[int]:
        return self._ranks[task.virtual_stage]

    def _holders_of(self, task: Task) -> Sequence[int]:
        return self._ranks[max(0, task.virtual_stage - 1)]

    def _tell(self, kind: MessageKind, task: Task, ranks: Sequence[int], copy: int | None = None) -> None:
        own = self._topology.replica if copy is None else copy
        for rank in ranks:
            message = Message(Channel.CONTROL, kind, self._activity.step, task, body={"copy": own})
            self._messenger.post(rank, message)

    # Messages.

    def _on_share(self, message: Message) -> None:
        """What another caller has for this step, or the next one, arrived."""
        sender, step, now = message.sender, message.step, self._activity.step
        if sender not in self._counterparts or step is None:
            raise ProtocolError(f"rank {sender} sent {message.kind.value!r}, but is no rank of this stage in a step")
        replica = self._replica_of[sender]
        # Without a share this rank has not heard from all, and with a later one it has ended its own part of the step.
        if replica in self._shares or step.number - self._activity.steps_ended not in (0, 1):
            raise ProtocolError(f"rank {sender} sent {message.kind.value!r} of {step} twice, or too early")
        if now is not None and now.number == step.number and now.mode is not step.mode:
            self._disagree(sender, step, now)
        share = records.unpack(GivenShare, bytes_in(message), "what a caller has")
        share.check(self._topology.name_of(sender))
        self._take_share(replica, step, share)

    def _on_claim_message(self, message: Message) -> None:
        """An OFFERED, a CLAIMED or a GRANTED arrived."""
        step, task, kind, sender = message.step, message.task, message.kind, message.sender
        copy = message.body.get("copy")
        if step is None or task is None or type(copy) is not int or not 0 <= copy < len(self._counterparts):
            raise ProtocolError(f"rank {sender} sent {kind.value!r} with what cannot be read")
        if not 0 <= task.virtual_stage < len(self._ranks):
            raise ProtocolError(f"rank {sender} sent {kind.value!r} of {task}, which no stage runs")
        if kind is not MessageKind.GRANTED and copy != self._replica_of[sender]:
            raise ProtocolError(f"rank {sender} sent {kind.value!r} of {task} for copy {copy}")
        if sender not in (self._copies_of(task) if kind is MessageKind.CLAIMED else self._holders_of(task)):
            raise ProtocolError(f"rank {sender} sent {kind.value!r} of {task}, which it neither holds nor runs")
        self._on_event(_EVENTS[kind](step, task, copy))

    def _on_output(self, message: Message) -> None:
        """An OUTPUT arrived: of a forward that runs here behind the data of its microbatch."""
        arrived = self._messenger.received_output(message)
        m, step = arrived.task.microbatch, self._activity.step
        is_forward = self._homes and arrived.step == step and arrived.task.kind is F
        if is_forward and self._lacks(m, arrived.task.virtual_stage + 1):
            self._kept[m] = arrived
        else:
            self._on_event(arrived)

    def _lacks(self, microbatch: int, virtual_stage: int) -> bool:
        """Whether data that a forward needs are still to come."""
        if not 0 <= microbatch < len(self._homes) or microbatch in self._here:
            return False
        home = self._homes[microbatch].replica
        # On the first virtual stage the data are the grant, be they none.
        return home != self._topology.replica and (not virtual_stage or self._have_data[home])

    def _on_microbatch(self, message: Message) -> None:
        """What another caller has passed for a microbatch that runs here arrived."""
        step, task, sender = self._activity.step, message.task, message.sender
        if sender not in self._counterparts or task is None:
            raise ProtocolError(f"rank {sender} sent {message.kind.value!r}, but is no rank of this stage")
        if not self._homes or step is None or message.step != step:
            raise ProtocolError(f"rank {sender} sent a microbatch of {message.step} in {step}")
        m = task.microbatch
        if not self._lacks(m, task.virtual_stage) or self._homes[m].replica != self._replica_of[sender]:
            raise ProtocolError(f"rank {sender} sent microbatch {m}, which is here, or of another replica")
        self._forget([each for each in self._here if self._has_run(each)])
        self._arrived[m] = payload = payload_of(message)
        self._put(m, payload)
        self._here.add(m)
        if not task.virtual_stage:
            self._on_event(ev.Granted(step, task, self._topology.replica))
        elif (arrived := self._kept.pop(m, None)) is not None:
            self._on_event(arrived)

    def _put(self, microbatch: int, payload: Payload) -> None:
        """Put what another caller has passed where the program reads it."""
        fields = unpacked_fields(payload)
        for name, values in self._lists_here.items():
            if (value := fields.get(name)) is not None:
                values[microbatch] = value

    def _copy(self, microbatch: int) -> None:
        """The program reads what a caller has passed: in a task, that of others is copied first."""
        if microbatch in self._arrived and self._executor.computes_here():
            payload = self._arrived.pop(microbatch)
            self._adopt(tensor for tensor in payload.tensors if tensor is not None)
            self._put(microbatch, copied(payload))

    def _has_run(self, microbatch: int) -> bool:
        """Whether all tasks of a microbatch on this stage have ended, or run on other copies."""
        step, in_flight = self._core.step, self._core.in_flight
        last = [task._replace(microbatch=microbatch) for task in self._last_tasks]
        return step is not None and all(step.readiness.is_available(t) and t not in in_flight for t in last)

    def _forget(self, microbatches: Iterable[int]) -> None:
        """Drop what other callers have passed."""
        for m in microbatches:
            self._arrived.pop(m, None)
            for name, values in self._lists_here.items():
                values[m] = _BLANK.get(name)
