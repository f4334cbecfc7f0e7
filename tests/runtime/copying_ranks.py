"""Ranks that keep copies of each other's batches, without a pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from runtime.contexts import core_of
from runtime.toys import Ones
from torch import Tensor

from rrfp import Topology
from rrfp.compute.lanes.thread import ThreadLane
from rrfp.model.graph import TaskGraph
from rrfp.model.mesh import Mesh
from rrfp.model.tasks import Mode, Task
from rrfp.runtime.context import RankContext, RankSettings
from rrfp.runtime.lane_executor import LaneExecutor
from rrfp.runtime.messenger import Messenger
from rrfp.runtime.steps.batch_copies import BatchCopies
from rrfp.runtime.steps.plan import StepPlan, StepPlanner, StepRequest
from rrfp.transports.base import Channel, Message, MessageKind, TransportContext
from rrfp.transports.inproc import InprocTransport
from rrfp.transports.rendezvous import LocalRendezvous

MESH = Mesh((("pp", 3), ("dp", 2)))
GRAPH = TaskGraph.chain(3)


def plan_of(number: int, count: int, **arguments: Any) -> StepPlan:
    """A training step of one of several replicas."""
    request = StepRequest(Mode.TRAIN, microbatches=count, **arguments)
    return StepPlanner("mean", 3, is_shared=True).plan(request, number, number)


@dataclass
class Rank:
    """One rank."""

    context: RankContext
    messenger: Messenger
    copies: BatchCopies
    failures: list[BaseException]

    def begin(self, plan: StepPlan) -> None:
        self.context.activity.begin_step(plan.step)
        self.copies.begin(plan)

    async def end(self) -> None:
        await self.copies.settle()
        self.context.activity.end_step()

    def receive(self, sender: int, plan: StepPlan, task: Task | None, *tensors: Tensor, **body: Any) -> None:
        body = body or {"structure": ["{", ["grad_scales"], ["v", 1.0]]}
        message = Message(Channel.BACKWARD, MessageKind.COPY, plan.step, task, tensors, body)
        self.copies.handlers[MessageKind.COPY](replace(message, sender=sender))


@asynccontextmanager
async def ranks(*numbers: int, make: type[InprocTransport] = InprocTransport) -> AsyncIterator[list[Rank]]:
    """Some ranks of the mesh, connected."""
    met, made = LocalRendezvous(), list[Rank]()
    for number in numbers:
        topology, failures = Topology.at(number, MESH), list[BaseException]()

        def fail(error: BaseException, task: Task | None = None, failures: list[BaseException] = failures) -> None:
            failures.append(error)

        others = tuple(other for other in numbers if other != number)
        transport, lane = make(TransportContext(number, others, "run", met)), ThreadLane()
        context = RankContext.create(RankSettings(topology), core_of(topology, GRAPH), lane, transport, fail)
        messenger = Messenger(context, lambda event: None)
        executor = LaneExecutor(context, Ones(), lambda completed: None)
        made.append(Rank(context, messenger, BatchCopies(context, messenger, executor), failures))
        lane.start()
    await asyncio.gather(*(rank.context.transport.start() for rank in made))
    for rank in made:
        await rank.context.supervisor.start(rank.messenger.receive_all(rank.copies.handlers))
    try:
        yield made
    finally:
        for rank in made:
            await rank.context.supervisor.stop()
            rank.context.transport.abort()
            rank.context.lane.close()
