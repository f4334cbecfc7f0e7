"""What a task costs beside its kernels: the gap between tasks on the device, and the host's time."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

import rrfp
from benchmarks.gpu.target import Target
from benchmarks.shared.figures import Spread
from rrfp.compute.determinism import RandomForks
from rrfp.compute.lanes.base import Lane
from rrfp.compute.lanes.stream import StreamLane
from rrfp.compute.lanes.thread import ThreadLane
from rrfp.compute.payload import Payload
from rrfp.compute.program import Batch, StageProgram
from rrfp.devices.base import Event
from rrfp.model.tasks import Kind, StepId, Task


class Product:
    """One kernel: a product of square matrices.

    Args:
        target: where.
        size: of the matrices.
    """

    def __init__(self, target: Target, size: int) -> None:
        dtype = torch.bfloat16 if target.is_cuda else torch.float32
        self._factor = torch.randn(size, size, device=target.where, dtype=dtype)
        self._out = torch.empty_like(self._factor)

    def launch(self) -> None:
        """On the current stream."""
        torch.mm(self._factor, self._factor, out=self._out)


@dataclass
class Marks:
    """Events in front of and behind the kernel of each task, in the order of the stream."""

    target: Target
    pairs: list[tuple[Event, Event]] = field(default_factory=list)

    def launch(self, launch: Callable[[], None]) -> None:
        """Launch a kernel between two events."""
        stream = self.target.device.current_stream()
        before = stream.record()
        launch()
        self.pairs.append((before, stream.record()))

    def take(self) -> tuple[list[float], list[float]]:
        """The seconds from each kernel's end to the next one's beginning, and those of each kernel."""
        pairs, self.pairs = self.pairs, []
        pairs[-1][1].synchronize()
        gaps = [start.seconds_since(end) for (_, end), (start, _) in pairwise(pairs)]
        kernels = [end.seconds_since(start) for start, end in pairs]
        for pair in pairs:
            for event in pair:
                event.release()
        return gaps, kernels


class OneKernel(StageProgram):
    """A pipeline of one stage, every task of which is one kernel, or nothing.

    Args:
        work: makes a task.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._losses: dict[int, float] = {}

    def open(self, step: StepId, batch: Batch) -> None:
        """Begin a step."""
        self._losses = {}

    def forward(self, task: Task, inputs: tuple[Payload, ...]) -> Payload:
        """A kernel."""
        self._work()
        self._losses[task.microbatch] = 0.0
        return Payload()

    def backward(self, task: Task, grads: tuple[Payload, ...]) -> tuple[Payload, ...]:
        """A kernel."""
        self._work()
        return ()

    def losses(self) -> Mapping[int, float]:
        """0 each."""
        return self._losses


@dataclass(frozen=True, slots=True)
class Gaps:
    """Gaps between the kernels of consecutive tasks.

    Attributes:
        by_depth: for each depth.
        plain: without RRFP, the kernels launched in a loop: what the events themselves cost.
        kernel_s: the median kernel.
    """

    by_depth: Mapping[int, Spread]
    plain: Spread
    kernel_s: float


def measure_gaps(target: Target, *, size: int, microbatches: int, rounds: int) -> Gaps:
    """Depth 1, depth 2 and the plain loop take turns."""
    product, marks = Product(target, size), Marks(target)
    gaps: dict[int, list[float]] = {1: [], 2: []}
    plain: list[float] = []
    kernels: list[float] = []
    stream = target.device.stream()
    for index in range(rounds + 1):
        for depth, samples in gaps.items():
            program = OneKernel(lambda: marks.launch(product.launch))
            pipeline = rrfp.local([program], device=target.device, depth=depth, hint="bf", seed=0)
            with pipeline.blocking() as pipe:
                pipe.step(microbatches=microbatches)
            found, _ = marks.take()
            samples += found if index else []  # the first round warms up
        with stream.issuing():
            for _ in range(2 * microbatches):
                marks.launch(product.launch)
        found, durations = marks.take()
        plain += found if index else []
        kernels += durations if index else []
    by_depth = {depth: Spread.of(samples) for depth, samples in gaps.items()}
    return Gaps(by_depth, Spread.of(plain), statistics.median(kernels))


@dataclass(frozen=True, slots=True)
class HostTimes:
    """The host's time of tasks that launch nothing.

    Attributes:
        call: seconds a call, with two on the lane.
        alone: seconds from a call's enqueueing to its future's completion, with one on the lane.
        task: seconds a task of a pipeline of one stage.
        fork: seconds of a fork of the random generators, by those that it forks.
    """

    call: Mapping[str, float]
    alone: Mapping[str, Spread]
    task: Mapping[str, float]
    fork: Mapping[str, float]


def measure_host(target: Target, *, calls: int) -> HostTimes:
    """The lane of the device beside the CPU's lane."""
    lanes: dict[str, Callable[[], Lane]] = {
        "device": lambda: StreamLane(target.device, "benchmark"),
        "cpu": lambda: ThreadLane("benchmark"),
    }
    return HostTimes(
        call={name: asyncio.run(_time_a_call(make, calls)) for name, make in lanes.items()},
        alone={name: Spread.of(asyncio.run(_time_alone(make, calls))) for name, make in lanes.items()},
        task={name: _time_a_task(device, calls) for name, device in (("device", target.device), ("cpu", None))},
        fork=_time_forks(target, calls),
    )


async def _time_a_call(make: Callable[[], Lane], calls: int) -> float:
    lane = make()
    lane.start()
    await lane.enqueue(_nothing)
    began = time.perf_counter()
    waiting = lane.enqueue(_nothing)
    for _ in range(calls):
        following = lane.enqueue(_nothing)
        await waiting
        waiting = following
    await waiting
    seconds = time.perf_counter() - began
    lane.close()
    return seconds / (calls + 1)


async def _time_alone(make: Callable[[], Lane], calls: int) -> list[float]:
    lane = make()
    lane.start()
    samples = []
    for _ in range(calls):
        began = time.perf_counter()
        await lane.enqueue(_nothing)
        samples.append(time.perf_counter() - began)
    lane.close()
    return samples[calls // 10 :]


def _time_a_task(device: Any, calls: int) -> float:
    microbatches = max(1, calls // 4)
    with rrfp.local([OneKernel(_nothing)], device=device, hint="bf").blocking() as pipe:
        results = [pipe.step(microbatches=microbatches) for _ in range(5)]
    return statistics.median(result.seconds for result in results[1:]) / (2 * microbatches)


def _time_forks(target: Target, calls: int) -> dict[str, float]:
    times = {}
    for name, devices in (
        ("CPU", frozenset()),
        ("CPU and device", frozenset({target.where} if target.is_cuda else ())),
    ):
        forks, samples = RandomForks(0, devices), []
        for number in range(calls):
            began = time.perf_counter()
            forks.run(number, Task(Kind.F, 0, 0), _nothing)
            samples.append(time.perf_counter() - began)
        times[name] = statistics.median(samples)
    return times


def _nothing() -> None:
    """A task without kernels."""
