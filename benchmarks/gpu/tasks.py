"""What a task costs beside its kernels: the gap between tasks on the device, and the host's time."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import rrfp
from benchmarks.gpu.target import Target
from benchmarks.shared.figures import Spread
from rrfp.compute.lanes.base import Lane
from rrfp.compute.lanes.stream import StreamLane
from rrfp.compute.lanes.thread import ThreadLane
from rrfp.compute.payload import Payload
from rrfp.compute.program import Batch, StageProgram
from rrfp.compute.rng import RandomForks
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
        before = stream.record(is_timed=True)
        launch()
        self.pairs.append((before, stream.record(is_timed=True)))

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


class Block(nn.Module):
    """A layer of a transformer, of many small kernels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of ``x``."""
        out: Tensor = self.layer(x)
        return out


@dataclass(frozen=True, slots=True)
class LaunchBound:
    """A stage whose kernels are shorter than their launches.

    Attributes:
        plain_s: seconds a microbatch of a plain loop, forward and backward.
        by_depth: the same of a pipeline of one stage, at each depth.
        idle: share of the pipeline's time at depth 2 in which the device computes nothing; None without a profiler.
        longest_hold_s: by depth, the longest time for which another Python thread waited for the interpreter's lock.
    """

    plain_s: float
    by_depth: Mapping[int, float]
    idle: float | None
    longest_hold_s: Mapping[int, float]


def measure_launch_bound(target: Target, *, width: int, microbatches: int, rounds: int) -> LaunchBound:
    """Two layers, at depth 1, 2 and 3 and in a plain loop, on the same module."""
    with target.where:
        module = nn.Sequential(Block(width), Block(width))
        inputs = [torch.randn(1, 16, width) for _ in range(microbatches)]
        targets = [torch.zeros(1, 16, width) for _ in range(microbatches)]
    loss_fn = nn.functional.mse_loss

    def plain() -> None:
        for x, y in zip(inputs, targets, strict=True):
            (loss_fn(module(x), y) / microbatches).backward()  # type: ignore[no-untyped-call]
        target.synchronize()

    by_depth, holds, idle = {}, {}, None
    for depth in (1, 2, 3):
        with rrfp.local([module], loss_fn=loss_fn, depth=depth, **target.options).blocking() as pipe:
            pipe.step(inputs, targets)
            with longest_wait() as longest:
                by_depth[depth] = _seconds_each(lambda: pipe.step(inputs, targets), microbatches, rounds)
            holds[depth] = longest[0]
            if depth == 2 and target.name == "cuda":
                idle = _idle_share(lambda: pipe.step(inputs, targets))
    plain()
    return LaunchBound(_seconds_each(plain, microbatches, rounds), by_depth, idle, holds)


def _seconds_each(call: Callable[[], object], parts: int, rounds: int) -> float:
    samples = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        samples.append((time.perf_counter() - began) / parts)
    return statistics.median(samples)


def _idle_share(call: Callable[[], object]) -> float:
    """The share of a call's time in which no kernel ran, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        began = time.perf_counter()
        call()
        seconds = time.perf_counter() - began
    busy_us = sum(each.self_device_time_total for each in profiler.key_averages())
    return max(0.0, 1 - float(busy_us) / 1e6 / seconds)


@contextmanager
def longest_wait() -> Iterator[list[float]]:
    """Beside the block a thread wakes every 50 us: the longest time by which it was late."""
    longest, ended = [0.0], threading.Event()

    def wake() -> None:
        while not ended.is_set():
            began = time.perf_counter()
            time.sleep(50e-6)
            longest[0] = max(longest[0], time.perf_counter() - began - 50e-6)

    thread = threading.Thread(target=wake, daemon=True)
    thread.start()
    try:
        yield longest
    finally:
        ended.set()
        thread.join()


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
