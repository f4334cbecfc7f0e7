"""Copies of what callers passed for a step, each with another replica (``on_lost_rank="finish"``).

A step can be computed again without a rank that was lost, since parameters have not changed meanwhile, if its batch is
somewhere else. So each rank sends what its caller passed to the same stage of another replica, which keeps it until the
next step begins. It sends in the background, and reports the end of the step only when all is sent: a step that any
rank has the reports of needs no copies any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from rrfp import timeouts
from rrfp.compute.payload import Payload
from rrfp.errors import ProtocolError, StageError
from rrfp.model.tasks import F, Task
from rrfp.runtime.context import RankContext
from rrfp.runtime.control_tree import held_by, holder_of
from rrfp.runtime.lane_executor import LaneExecutor
from rrfp.runtime.messenger import Messenger
from rrfp.runtime.steps.passed import Fields, PassedData, copied, factors_of, payload_of, unpacked_fields
from rrfp.runtime.steps.plan import StepPlan
from rrfp.transports.base import Channel, Message, MessageKind

_OPTION = "on_lost_rank='finish'"


@dataclass(frozen=True, slots=True)
class CopiedBatch:
    """What the caller of a rank of another replica passed for a step, by microbatch, in tensors of its own."""

    #: The other one.
    replica: int
    microbatches: int
    #: None where the rank uses none, or its caller passed none.
    inputs: list[Any] | None
    targets: list[Any] | None
    kwargs: list[Any] | None
    weights: tuple[float, ...] | None
    sizes: tuple[float, ...] | None
    #: On all gradients, that of a GradScaler included.
    grad_scale: float


@dataclass(slots=True)
class _Arriving:
    microbatches: int
    #: Of a caller that passed nothing by microbatch.
    common: Payload | None = None
    by_microbatch: dict[int, Payload] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return self.common is not None or len(self.by_microbatch) == self.microbatches

    def fields(self) -> list[Fields]:
        if self.common is not None:
            return [unpacked_fields(self.common)] * self.microbatches
        return [unpacked_fields(copied(self.by_microbatch[m])) for m in range(self.microbatches)]


class BatchCopies:
    """Sends one rank's copies, and keeps another's. Methods are called on the loop, but for `held` and `written`."""

    def __init__(self, context: RankContext, messenger: Messenger, executor: LaneExecutor) -> None:
        topology = context.topology
        counterparts = topology.mesh.counterparts(topology.rank)
        self._holder = counterparts[holder_of(topology.replica, topology.replicas)]
        self._held_replica = held_by(topology.replica, topology.replicas)
        self._held_rank = counterparts[self._held_replica]
        self._passed = PassedData(topology, context.graph, _OPTION)
        self._activity = context.activity
        self._supervisor = context.supervisor
        self._messenger = messenger
        self._executor = executor
        #: Everything is sent that was passed for the step.
        self._sent = asyncio.Event()
        #: Tensors that were passed for a microbatch, with torch's count of the writes into each.
        self._watched: list[tuple[int, Tensor, int]] = []
        #: A step has ended in which no task wrote into them.
        self._is_confirmed = False
        #: The newest step that has begun here.
        self._newest = 0
        #: By number of the step.
        self._arriving: dict[int, _Arriving] = {}
        self.handlers: Mapping[MessageKind, Callable[[Message], None]] = {MessageKind.COPY: self._on_message}

    def begin(self, plan: StepPlan) -> None:
        """A training step begins, whose ``plan`` has the microbatches of this rank's own caller."""
        self._newest = plan.step.number
        for number in [each for each in self._arriving if each < self._newest]:
            del self._arriving[number]
        self._sent.clear()
        self._watched = []
        self._supervisor.spawn(self._send(plan))

    async def settle(self) -> None:
        """All tasks of the step are done: wait until the copies are sent; a StageError if a task wrote into them."""
        await self._sent.wait()
        if (problem := self.written()) is not None:
            raise StageError(problem)
        self._watched = []
        self._is_confirmed = True

    def is_held(self, step_number: int) -> bool:
        arrived = self._arriving.get(step_number)
        return arrived is not None and arrived.is_whole

    def held(self, step_number: int) -> CopiedBatch | None:
        """The copy of a step, once it is whole. Called on any thread when no more messages come."""
        if not self.is_held(step_number):
            return None
        arrived = self._arriving[step_number]
        every = arrived.fields()

        def listed(name: str) -> list[Any] | None:
            values = [fields.get(name) for fields in every]
            return None if all(value is None for value in values) else values

        weights, sizes = listed("weights"), listed("sizes")
        return CopiedBatch(
            self._held_replica,
            arrived.microbatches,
            listed("inputs"),
            listed("targets"),
            listed("kwargs"),
            None if weights is None else tuple(weights),
            None if sizes is None else tuple(sizes),
            every[0]["grad_scales"],
        )

    def written(self) -> str | None:
        """How a task of the step changed what the caller passed, if one did. Called on any thread, between tasks."""
        for m, tensor, version in self._watched:
            if tensor._version != version:
                return (
                    f"a module or loss_fn wrote into a tensor that was passed for microbatch {m}, or that shares its "
                    f"memory, must not with {_OPTION}, which may compute the step again: clone it first (x = x.clone())"
                )
        return None

    async def _send(self, plan: StepPlan) -> None:
        await asyncio.sleep(timeouts.GIVE_WAY_S)  # to the first task
        payloads = await self._executor.run_extra("packing copies of the batch", partial(self._packed, plan))
        for payload, task in payloads:
            body = {"structure": payload.structure}
            # On this channel nothing else goes to the same stage of another replica.
            message = Message(Channel.BACKWARD, MessageKind.COPY, plan.step, task, payload.tensors, body)
            await self._messenger.send_to(self._holder, message)
        self._sent.set()

    def _packed(self, plan: StepPlan) -> list[tuple[Payload, Task | None]]:
        """What is sent of the caller's batch. On the lane, which comes behind the caller's work on it."""
        if plan.weights is None and all(values is None for values in self._passed.lists(plan).values()):
            return [(Payload.pack({"grad_scales": factors_of(plan.batch).grad_scales[0]}), None)]
        packed = self._passed.packed(plan, range(plan.step.microbatches))
        watched = [(m, t) for m, payload in enumerate(packed) for t in payload.tensors if t is not None]
        self._watched = [(m, t, t._version) for m, t in watched if not t.is_inference()]
        # Until it is known that no task writes into them, what is sent must not be the caller's own memory.
        needs_copy = Tensor.is_inference if self._is_confirmed else lambda _: True
        return [(payload.sent(needs_copy), Task(F, m, 0)) for m, payload in enumerate(packed)]

    def _on_message(self, message: Message) -> None:
        step, task, sender = message.step, message.task, message.sender
        if sender != self._held_rank:
            raise ProtocolError(f"rank {sender} sent {message.kind.value!r}, but this rank keeps no copies of it")
        ended = self._activity.steps_ended
        if step is None or not ended - 1 <= step.number <= ended + 1:
            raise ProtocolError(f"rank {sender} sent a copy for {step}; step {ended} is next or running")
        if step.number < self._newest:
            return  # reports have overtaken it
        arriving = self._arriving.setdefault(step.number, _Arriving(step.microbatches))
        payload = payload_of(message)
        if arriving.is_whole or step.microbatches != arriving.microbatches:
            raise ProtocolError(f"rank {sender} sent more copies for {step} than it has microbatches")
        if task is None:
            arriving.common = payload
        elif task.microbatch in arriving.by_microbatch or not 0 <= task.microbatch < step.microbatches:
            raise ProtocolError(f"rank {sender} sent the copy of microbatch {task.microbatch} twice, or there is none")
        else:
            arriving.by_microbatch[task.microbatch] = payload
