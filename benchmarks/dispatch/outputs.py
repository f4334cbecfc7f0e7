"""What it costs to watch the outputs of tasks for later writes: the same tasks with and without, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor, nn

from rrfp.compute.buffers import BufferMemory
from rrfp.compute.mailbox import Mailbox, run_task
from rrfp.compute.payload import Payload
from rrfp.compute.program import Batch
from rrfp.compute.read_only import Returned
from rrfp.compute.torch_stage import TorchStage
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Mode, StepId, Task
from rrfp.model.visits import Visits

#: The virtual stage that runs, of three.
_STAGE = 1


@dataclass(frozen=True, slots=True)
class WatchCase:
    """A stage.

    Attributes:
        tensors: that each task returns.
        in_flight: microbatches between their forward and their backward.
        buffers: of its module.
    """

    tensors: int
    in_flight: int
    buffers: int

    def __str__(self) -> str:
        return f"{self.tensors} tensors, {self.in_flight} in flight, {self.buffers} buffers"


CASES = (WatchCase(1, 8, 0), WatchCase(8, 8, 0), WatchCase(1, 64, 0), WatchCase(1, 8, 150))


@dataclass(frozen=True, slots=True)
class WatchCost:
    """Seconds of a task, the mean of a forward and a backward.

    Attributes:
        case: the stage.
        without: of the tasks without the watch; medians.
        extra: by which those with it take longer: the median over the rounds of the difference of medians.
    """

    case: WatchCase
    without: float
    extra: float


class _Scaled(nn.Module):
    def __init__(self, case: WatchCase) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        for index in range(case.buffers):
            self.register_buffer(f"buffer{index}", torch.zeros(1))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple([x * self.scale for x in inputs])


class _Unwatched(Returned):
    def begin(self, task: Task) -> None: ...

    def end(self, task: Task, payloads: Sequence[Payload], name_of: Callable[[int], str]) -> None: ...

    def drop(self, task: Task) -> None: ...


class _NoBuffers(BufferMemory):
    def needs_copy(self, tensor: Tensor) -> bool:
        return False


@dataclass
class _Rank:
    """Runs forwards and backwards of the stage in 1F1B."""

    case: WatchCase
    watches: bool
    samples: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        module = _Scaled(self.case)
        self._program = TorchStage({_STAGE: module}, TaskGraph.chain(3))
        self._mailbox = Mailbox(TaskGraph.chain(3), _STAGE)
        if not self.watches:
            self._mailbox.returned = _Unwatched()
            self._program._buffers = {_STAGE: _NoBuffers(module)}
        self._received = [torch.ones(4).requires_grad_() for _ in range(self.case.tensors)]
        self._gradients = [torch.ones(4) for _ in self._received]

    def run(self, microbatches: int) -> None:
        self._program.open(StepId(0, Mode.TRAIN, microbatches), Batch(gradient_weights=(1.0,) * microbatches))
        self._mailbox.open(Visits(microbatches), Mode.TRAIN)
        self.samples.clear()
        for m in range(microbatches):
            self._forward(m)
            if m >= self.case.in_flight:
                self._backward(m - self.case.in_flight)

    def _forward(self, m: int) -> None:
        self._mailbox.put_forward(Task(Kind.F, m, _STAGE - 1), Payload.pack(tuple(self._received)).sent())
        self._time(Task(Kind.F, m, _STAGE))

    def _backward(self, m: int) -> None:
        body = {"parts": [[_STAGE, len(self._gradients)]]}
        self._mailbox.unpack(Task(Kind.B, m, _STAGE + 1), self._gradients, body)
        self._time(Task(Kind.B, m, _STAGE))

    def _time(self, task: Task) -> None:
        started = time.perf_counter()
        run_task(self._program, self._mailbox, task)
        self.samples.append(time.perf_counter() - started)
        self._mailbox.drop(task)

    def per_task(self) -> float:
        """Of the tasks at the full number in flight."""
        steady = self.samples[self.case.in_flight :]
        return (median(steady[0::2]) + median(steady[1::2])) / 2


def time_watch(case: WatchCase, rounds: int, microbatches: int) -> WatchCost:
    """Both ways in turns, on this thread."""
    ranks = [_Rank(case, watches) for watches in (False, True)]
    taken: list[tuple[float, float]] = []
    for index in range(rounds + 1):
        for rank in ranks:
            rank.run(microbatches + case.in_flight)
        if index:  # the first round warms up
            taken.append((ranks[0].per_task(), ranks[1].per_task()))
    return WatchCost(case, median(without for without, _ in taken), median(w - without for without, w in taken))
