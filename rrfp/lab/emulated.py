"""Stages whose tasks last as long as a table prescribes: without a model, or around a real one.

The lane sleeps and leaves the CPU free, as behind a GPU. So two cores can run a pipeline of many stages, and benchmarks
measure the runtime and not the machine. On a `rrfp.lab.timer_lane` the time is the loop's, which may be virtual.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch

from rrfp.compute.payload import Payload
from rrfp.compute.program import Batch, StageProgram
from rrfp.costs import CostTable
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Mode, StepId, Task

#: Seconds before the deadline at which the sleep ends; about the time in which a thread wakes up.
_MARGIN_S = 50e-6

_PR_SET_TIMERSLACK = 29

_this_thread = threading.local()


def sleep_until(deadline: float) -> None:
    """Return as soon as possible after ``deadline``, of ``time.monotonic()``."""
    if not getattr(_this_thread, "has_low_slack", False):
        _lower_timer_slack()
        _this_thread.has_low_slack = True
    remaining = deadline - time.monotonic()
    if remaining > _MARGIN_S:
        time.sleep(remaining - _MARGIN_S)
    while time.monotonic() < deadline:
        time.sleep(0)  # releases the GIL and the core, for which the event loop may be waiting


def _lower_timer_slack() -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)


T = TypeVar("T")

#: The duration of a task in seconds.
Durations = Callable[[Task], float]

#: Spends so many seconds in the running task.
Spend = Callable[[float], None]


def sleep(seconds: float) -> None:
    """Sleep on the lane's thread, in real time."""
    sleep_until(time.monotonic() + seconds)


def table_durations(table: CostTable) -> Durations:
    """The durations of a cost table.

    B of a split table is the input gradient only: for unsplit stages pass its ``to_unsplit()``.
    """

    def duration(task: Task) -> float:
        return table.duration(task.kind.value, task.virtual_stage, task.microbatch)

    return duration


class EmulatedStage(StageProgram):
    """Computes nothing, spends the time of each task, and puts out tensors of zeros of one size.

    Losses are 0.

    Args:
        graph: the virtual stages and their edges.
        durations: the duration of each task.
        num_bytes: size of every output and input gradient.
        spend: spends the time of a task; for a `TimerLane` its ``spend``.
        held: the bytes that a microbatch is said to hold on a virtual stage in a training step; None: none.
    """

    def __init__(
        self,
        graph: TaskGraph,
        durations: Durations,
        num_bytes: int = 0,
        spend: Spend = sleep,
        held: Callable[[int, int], int] | None = None,
    ) -> None:
        self.durations = durations
        self._held = held
        self._spend = spend
        self._graph = graph
        # One tensor serves every message, because payloads are read-only.
        self._output = Payload((torch.zeros(num_bytes, dtype=torch.uint8),), ("t", 0))
        self._losses: dict[int, float] = {}
        self._is_training = True

    def open(self, step: StepId, batch: Batch) -> None:
        """Begin a step; accepts any batch."""
        self._losses = {}
        self._is_training = step.mode is Mode.TRAIN

    def forward(self, task: Task, inputs: tuple[Payload, ...]) -> Payload:
        self._run(task)
        if self._graph.successors[task.virtual_stage]:
            return self._output
        self._losses[task.microbatch] = 0.0
        return Payload()

    def backward(self, task: Task, grads: tuple[Payload, ...]) -> tuple[Payload, ...]:
        self._run(task)
        return (Payload(self._output.tensors),) * len(self._graph.predecessors[task.virtual_stage])

    def weight(self, task: Task) -> None:
        self._run(task)

    def held_bytes(self, microbatch: int, virtual_stage: int) -> int:
        return self._held(microbatch, virtual_stage) if self._held is not None and self._is_training else 0

    def input_bytes(self, task: Task, inputs: tuple[Payload, ...]) -> int | None:
        """See :meth:`StageProgram.input_bytes`: in proportion to what it will be said to hold."""
        return None if self._held is None else self._held(task.microbatch, task.virtual_stage)

    def losses(self) -> Mapping[int, float]:
        """0 for every microbatch that the last virtual stage ran."""
        return self._losses

    def _run(self, task: Task) -> None:
        self._spend(self.durations(task))


class PacedStage(StageProgram):
    """Runs another program, and stretches every task to the duration of a table.

    A task that takes longer overruns; a small overrun share means that the emulation is faithful.
    """

    def __init__(self, program: StageProgram, durations: Durations) -> None:
        self.durations = durations
        self.planned_s = 0.0
        self.overrun_s = 0.0
        self._program = program

    @property
    def overrun_share(self) -> float:
        """``overrun_s / planned_s``; 0 before the first task."""
        return self.overrun_s / self.planned_s if self.planned_s else 0.0

    def reset_overrun(self) -> None:
        """Set both sums to 0, such as after a warm-up. Call between two steps."""
        self.planned_s = self.overrun_s = 0.0

    def open(self, step: StepId, batch: Batch) -> None:
        self._program.open(step, batch)

    def forward(self, task: Task, inputs: tuple[Payload, ...]) -> Payload:
        return self._paced(task, lambda: self._program.forward(task, inputs))

    def backward(self, task: Task, grads: tuple[Payload, ...]) -> tuple[Payload, ...]:
        return self._paced(task, lambda: self._program.backward(task, grads))

    def weight(self, task: Task) -> None:
        self._paced(task, lambda: self._program.weight(task))

    def finish(self, virtual_stage: int) -> None:
        self._program.finish(virtual_stage)

    def name_of(self, virtual_stage: int) -> str:
        return self._program.name_of(virtual_stage)

    def held_bytes(self, microbatch: int, virtual_stage: int) -> int:
        return self._program.held_bytes(microbatch, virtual_stage)

    def signature(self, task: Task, inputs: tuple[Payload, ...]) -> Hashable:
        return self._program.signature(task, inputs)

    def input_bytes(self, task: Task, inputs: tuple[Payload, ...]) -> int | None:
        return self._program.input_bytes(task, inputs)

    def held_output_bytes(self, microbatch: int, virtual_stage: int) -> int:
        return self._program.held_output_bytes(microbatch, virtual_stage)

    def losses(self) -> Mapping[int, float]:
        return self._program.losses()

    def losses_by_part(self) -> Mapping[str, Mapping[int, float]]:
        return self._program.losses_by_part()

    def outputs(self) -> Mapping[int, Any]:
        return self._program.outputs()

    def _paced(self, task: Task, call: Callable[[], T]) -> T:
        started, planned = time.monotonic(), self.durations(task)
        result = call()
        spent = time.monotonic() - started
        self.planned_s += planned
        self.overrun_s += max(0.0, spent - planned)
        sleep_until(started + planned)
        return result
