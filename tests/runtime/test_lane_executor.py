"""What a rank counts of the work on its lane."""

from __future__ import annotations

import asyncio

from runtime.contexts import context_of

from rrfp import Topology
from rrfp.core import events as ev
from rrfp.lab.emulated import EmulatedStage
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Task
from rrfp.runtime.lane_executor import LaneExecutor


async def test_each_completed_task_counts_once_and_the_lane_is_busy_from_the_first() -> None:
    graph = TaskGraph.chain(1)
    context = context_of(Topology(0, 1), graph)
    completed: asyncio.Queue[ev.Completed] = asyncio.Queue()
    executor = LaneExecutor(context, EmulatedStage(graph, lambda _: 0.0), completed.put_nowait)
    context.lane.start()
    before = context.lane.now()
    for microbatch in range(3):
        executor.enqueue(Task.parse(f"F{microbatch}@0"))
    assert executor.running_since >= before
    tasks = [(await completed.get()).task for _ in range(3)]
    assert tasks == [Task.parse(f"F{microbatch}@0") for microbatch in range(3)]
    assert executor.completed == 3
    executor.close()
