"""What follows the last task of a virtual stage, in which order, without a pipeline."""

from __future__ import annotations

import asyncio

from runtime.contexts import context_of
from torch import nn

from rrfp import Topology
from rrfp.compute.gradients.ties import ProcessTies
from rrfp.lab.emulated import EmulatedStage
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Mode, StepId
from rrfp.runtime.grad_finalizer import GradientFinalizer
from rrfp.runtime.lane_executor import LaneExecutor
from rrfp.transports.base import Message

STEP = StepId(0, Mode.TRAIN, 2)
GRAPH = TaskGraph.chain(1, chunks=2)


async def send(stage: int, message: Message) -> None:
    raise AssertionError("one rank sends nothing")


async def test_a_virtual_stage_is_final_once_the_sums_hold_what_it_shares() -> None:
    """One parameter on both chunks: its gradient of chunk 1 goes into the sum of chunk 0, which comes later."""
    parameter = nn.Parameter()
    modules = {v: nn.Module() for v in range(2)}
    for module in modules.values():
        module.weight = parameter
    (ties,) = ProcessTies({}, [modules]).ranks
    context = context_of(Topology(0, 1), GRAPH)
    context.lane.start()
    executor = LaneExecutor(context, EmulatedStage(GRAPH, lambda _: 0.0), lambda _: None)
    summed: list[tuple[int, bool]] = []
    guest_is_summed = asyncio.Event()

    async def reduce(virtual_stage: int) -> None:
        summed.append((virtual_stage, guest.done()))
        if virtual_stage == 1:
            guest_is_summed.set()

    finalizer = GradientFinalizer(context, EmulatedStage(GRAPH, lambda _: 0.0), executor, send, reduce, ties)
    finalizer.open(STEP, reduces=True)
    guest = asyncio.create_task(finalizer.finalize(1))
    await guest_is_summed.wait()
    home = asyncio.create_task(finalizer.finalize(0))
    await home
    await guest
    assert summed == [(1, False), (0, False)]
