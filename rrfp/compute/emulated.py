"""Stages whose tasks take the time that a table says: without a model, or around a real one.

The time is an accelerator's: the lane sleeps and the CPU stays free, as it would behind a GPU. So two cores can carry a
pipeline of many stages, and what is measured is the runtime and not the machine. On a `rrfp.compute.lanes.timer` it is
the time of the loop, which may be virtual.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from rrfp.compute.lanes.precise_sleep import sleep_until
from rrfp.compute.payload import Payload
from rrfp.compute.program import Batch, StageProgram
from rrfp.core.graph import Graph
from rrfp.core.tasks import StepId, Task
from rrfp.costs import CostTable

T = TypeVar("T")

#: How long a task takes, in seconds.
Durations = Callable[[Task], float]

#: Lets so many seconds pass for the task that is running.
Spend = Callable[[float], None]


def sleep(seconds: float) -> None:
    """Let real time pass, on the lane's thread."""
    sleep_until(time.monotonic() + seconds)


def table_durations(table: CostTable) -> Durations:
    """The durations in a cost table.

    A split table's B is the input gradient only: unsplit stages want its ``to_unsplit()``.
    """

    def duration(task: Task) -> float:
        return table.duration(task.kind.value, task.virtual_stage, task.microbatch)

    return duration


class EmulatedStage(StageProgram):
    """Computes nothing, takes its time, and emits tensors of zeros: outputs and input gradients of one size.

    Losses are 0. It holds nothing that it would report.

    Args:
        graph: who feeds whom.
        durations: how long each task takes.
        num_bytes: size of every emitted tensor.
        spend: lets a task's time pass; for a `TimerLane` its ``spend``.

    Attributes:
        durations: may be replaced between two steps.
    """

    def __init__(self, graph: Graph, durations: Durations, num_bytes: int = 0, spend: Spend = sleep) -> None:
        self.durations = durations
        self._spend = spend
        self._graph = graph
        # One tensor serves every message: what is sent is read-only.
        self._emitted = Payload((torch.zeros(num_bytes, dtype=torch.uint8),), ("t", 0))
        self._losses: dict[int, float] = {}

    def open(self, step: StepId, batch: Batch) -> None:
        """Forget the last step. Any batch will do."""
        self._losses = {}

    def forward(self, task: Task, inputs: tuple[Payload, ...]) -> Payload:
        """Take the task's time."""
        self._take(task)
        if self._graph.successors[task.virtual_stage]:
            return self._emitted
        self._losses[task.microbatch] = 0.0
        return Payload()

    def backward(self, task: Task, grads: tuple[Payload, ...]) -> tuple[Payload, ...]:
        """Take the task's time."""
        self._take(task)
        return (Payload(self._emitted.tensors),) * len(self._graph.predecessors[task.virtual_stage])

    def weight(self, task: Task) -> None:
        """Take the task's time."""
        self._take(task)

    def losses(self) -> Mapping[int, float]:
        """0 for every microbatch that the last virtual stage ran."""
        return self._losses

    def _take(self, task: Task) -> None:
        self._spend(self.durations(task))


class PacedStage(StageProgram):
    """Runs another program, and stretches every task to the time that a table says.

    A task that really takes longer than that overruns; the overrun share says how far the emulation can be trusted.

    Args:
        program: what really runs.
        durations: how long each task takes at least.

    Attributes:
        durations: may be replaced between two steps.
        planned_s: sum of the durations of all tasks run so far, in seconds.
        overrun_s: by how much tasks really took longer than that, in seconds.
    """

    def __init__(self, program: StageProgram, durations: Durations) -> None:
        self.durations = durations
        self.planned_s = 0.0
        self.overrun_s = 0.0
        self._program = program

    @property
    def overrun_share(self) -> float:
        """``overrun_s / planned_s``; 0 while nothing was planned."""
        return self.overrun_s / self.planned_s if self.planned_s else 0.0

    def reset_overrun(self) -> None:
        """Forget the overrun so far, such as a warm-up's. Call between two steps."""
        self.planned_s = self.overrun_s = 0.0

    def open(self, step: StepId, batch: Batch) -> None:
        """See :meth:`StageProgram.open`."""
        self._program.open(step, batch)

    def forward(self, task: Task, inputs: tuple[Payload, ...]) -> Payload:
        """See :meth:`StageProgram.forward`."""
        return self._paced(task, lambda: self._program.forward(task, inputs))

    def backward(self, task: Task, grads: tuple[Payload, ...]) -> tuple[Payload, ...]:
        """See :meth:`StageProgram.backward`."""
        return self._paced(task, lambda: self._program.backward(task, grads))

    def weight(self, task: Task) -> None:
        """See :meth:`StageProgram.weight`."""
        self._paced(task, lambda: self._program.weight(task))

    def finish(self, virtual_stage: int) -> None:
        """See :meth:`StageProgram.finish`."""
        self._program.finish(virtual_stage)

    def held_bytes(self, microbatch: int, virtual_stage: int) -> int:
        """See :meth:`StageProgram.held_bytes`."""
        return self._program.held_bytes(microbatch, virtual_stage)

    def held_output_bytes(self, microbatch: int, virtual_stage: int) -> int:
        """See :meth:`StageProgram.held_output_bytes`."""
        return self._program.held_output_bytes(microbatch, virtual_stage)

    def losses(self) -> Mapping[int, float]:
        """See :meth:`StageProgram.losses`."""
        return self._program.losses()

    def outputs(self) -> Mapping[int, Any]:
        """See :meth:`StageProgram.outputs`."""
        return self._program.outputs()

    def _paced(self, task: Task, call: Callable[[], T]) -> T:
        started, planned = time.monotonic(), self.durations(task)
        result = call()
        spent = time.monotonic() - started
        self.planned_s += planned
        self.overrun_s += max(0.0, spent - planned)
        sleep_until(started + planned)
        return result
