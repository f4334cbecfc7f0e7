"""Two real ranks, of which stage 0 sends and stage 1 receives: on one loop, on two, or in two processes.

Everything is the runtime's own: runners, cores, lanes, transports. What is measured comes out of its traces, and out of
a hint that notes when the core had taken an arrival in.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Unpack

import torch

from benchmarks.shared.loops import submit
from rrfp.compute.payload import Payload
from rrfp.compute.program import Batch, StageProgram
from rrfp.core import events as ev
from rrfp.hints.priorities import BackwardForward
from rrfp.lab.emulated import sleep_until
from rrfp.model.tasks import Mode, StepId, Task
from rrfp.model.topology import Topology
from rrfp.pipeline.build import Job, RankBuilder
from rrfp.pipeline.loop_thread import LoopThread
from rrfp.pipeline.options import OptionArguments, complete
from rrfp.runtime.stage_runner import StageRunner
from rrfp.runtime.steps.plan import StepPlanner, StepRequest
from rrfp.trace.spans import StepTrace
from rrfp.transports.base import Rendezvous
from rrfp.transports.registry import TransportSpec
from rrfp.transports.zmq.transport import ZmqTransport

#: Bytes of each message's tensor.
MESSAGE_BYTES = 1024

#: Seconds that stage 0 computes before each message.
GAP_S = 0.0015

#: Side of the matrices that a busy lane multiplies: half a millisecond a product.
_SIDE = 256

_STAGES = 2

#: Between processes, by the names in the tables.
TRANSPORTS: Mapping[str, TransportSpec] = {"shm": "shm", "zmq/ipc": partial(ZmqTransport, address="ipc")}


class Sender(StageProgram):
    """Stage 0: sleeps a little, then puts a message out."""

    def __init__(self) -> None:
        self._payload = Payload((torch.zeros(MESSAGE_BYTES, dtype=torch.uint8),), ("t", 0))

    def open(self, step: StepId, batch: Batch) -> None:
        """See `StageProgram.open`."""

    def forward(self, task: Task, inputs: tuple[Payload, ...]) -> Payload:
        """See `StageProgram.forward`."""
        sleep_until(time.monotonic() + GAP_S)
        return self._payload

    def backward(self, task: Task, grads: tuple[Payload, ...]) -> tuple[Payload, ...]:
        """Never called."""
        raise NotImplementedError


class Receiver(StageProgram):
    """Stage 1: returns at once; or, busy, multiplies matrices in its first task until ``enough`` is set."""

    def __init__(self, enough: threading.Event | None = None) -> None:
        self._enough = enough

    def open(self, step: StepId, batch: Batch) -> None:
        """See `StageProgram.open`."""

    def forward(self, task: Task, inputs: tuple[Payload, ...]) -> Payload:
        """See `StageProgram.forward`."""
        if self._enough is not None and task.microbatch == 0:
            torch.set_num_threads(os.cpu_count() or 1)
            matrix = torch.rand(_SIDE, _SIDE)
            while not self._enough.is_set():
                torch.mm(matrix, matrix)
        return Payload()

    def backward(self, task: Task, grads: tuple[Payload, ...]) -> tuple[Payload, ...]:
        """Never called."""
        raise NotImplementedError


class FilingClock(BackwardForward):
    """A hint that notes when the core had taken each arrival in.

    Attributes:
        filed: by producer, in seconds of `time.monotonic`.
        enough: set when all microbatches of the step have arrived.
    """

    def __init__(self) -> None:
        super().__init__()
        self.filed: dict[Task, float] = {}
        self.enough = threading.Event()

    def observe(self, event: ev.Event) -> None:
        """See `rrfp.Hint.observe`."""
        super().observe(event)
        if isinstance(event, ev.Arrived):
            self.filed[event.task] = time.monotonic()
            if len(self.filed) == event.step.microbatches:
                self.enough.set()

    def forget(self) -> None:
        """Before a step."""
        self.filed.clear()
        self.enough.clear()


class Rank:
    """A runner on a loop.

    Args:
        stage: 0 or 1.
        thread: the loop's.
        program: what it computes.
        run_id: shared by the two ranks that belong together.
        rendezvous: where they meet.
        options: see `rrfp.pipeline.options.OptionArguments`; no limit by default.
    """

    def __init__(
        self,
        stage: int,
        thread: LoopThread,
        program: StageProgram,
        run_id: str,
        rendezvous: Callable[[], Rendezvous],
        **options: Unpack[OptionArguments],
    ) -> None:
        self._thread = thread
        self._next_step = 0

        async def meet() -> Rendezvous:
            return rendezvous()

        async def start() -> StageRunner:
            settings = complete({"limit": 1 << 20, **options})
            builder = RankBuilder(Job(run_id, meet), settings, [Topology(stage, _STAGES)], [program], options)
            (runner,) = await builder.runners(0)
            await runner.start()
            return runner

        self._runner = submit(thread, start())

    def wait(self) -> None:
        """Until it is connected."""
        self._runner.result()

    def step(self, messages: int) -> concurrent.futures.Future[StepTrace]:
        """Begin a forward-only step of so many messages."""
        number, self._next_step = self._next_step, self._next_step + 1

        async def run() -> StepTrace:
            plan = StepPlanner().plan(StepRequest(Mode.FORWARD, microbatches=messages), number)
            return (await self._runner.result().step(plan)).trace

        return submit(self._thread, run())

    def close(self) -> concurrent.futures.Future[None]:
        """Begin to leave."""
        return submit(self._thread, self._runner.result().close())
