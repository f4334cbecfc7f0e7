"""What a pipeline tells of itself at any time, beside the results of its steps."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from runtime.host_device import HostDevice
from torch import Tensor, nn

import rrfp
from rrfp.core.usage import Holding, Peaks
from rrfp.devices.base import DeviceMemory
from rrfp.errors import PipelineAborted

WIDTH, ROWS = 8, 4
#: What a microbatch keeps on a stage alone: input, Tanh's output and target, in float32.
MICROBATCH = 3 * ROWS * WIDTH * 4


class Told(nn.Module):
    """Calls something in every forward."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        self.call()
        result: Tensor = self.inner(x)
        return result


def batch(microbatches: int, rows: int = ROWS) -> tuple[list[Tensor], list[Tensor]]:
    return [torch.randn(rows, WIDTH) for _ in range(microbatches)], [torch.zeros(rows, WIDTH)] * microbatches


def test_between_steps_nothing_is_held_and_peaks_are_those_of_the_results() -> None:
    pipeline = rrfp.local([Told(lambda: None) for _ in range(2)], loss_fn=nn.functional.mse_loss, limit=2)
    assert pipeline.statistics() == ()
    with pipeline.blocking() as pipe:
        large, small = pipe.step(*batch(6, 4 * ROWS)), pipe.step(*batch(6))
        ranks = pipe.statistics()
        assert [(each.rank, each.stage) for each in ranks] == [(0, 0), (1, 1)]
        assert [each.now for each in ranks] == [Holding()] * 2
        assert tuple(each.last_step for each in ranks) == small.peaks
        assert tuple(each.peaks for each in ranks) == tuple(
            map(Peaks.worst, zip(large.peaks, small.peaks, strict=True))
        )
        assert ranks[0].peaks.num_bytes == large.peak_bytes[0] > small.peak_bytes[0]
        for each in ranks:
            moved, least = each.transport, 6 * (4 + 1) * ROWS * WIDTH * 4  # and what ranks tell each other
            assert min(moved.messages_sent, moved.messages_received) >= 2 * 6
            assert min(moved.bytes_sent, moved.bytes_received) >= least
    assert [each.peaks for each in pipeline.statistics()] == [each.peaks for each in ranks], "also after it was left"


@pytest.mark.timeout(30)
def test_what_is_held_can_be_read_on_another_thread_while_a_step_runs() -> None:
    told: list[tuple[int, int]] = []

    def tell() -> None:
        while True:  # until the loop, too, knows that the forward before this one has ended
            (rank,) = pipe.statistics()
            if rank.now.num_bytes >= len(told) * MICROBATCH:
                break
            time.sleep(0.001)
        told.append((rank.now.num_bytes, rank.last_step.num_bytes))

    pipeline = rrfp.local([Told(tell)], loss_fn=nn.functional.mse_loss, hint="f-priority", limit=4)
    with pipeline.blocking() as pipe:
        pipe.step(*batch(4))
    held = [m * MICROBATCH for m in range(4)]
    assert told == list(zip(held, held, strict=True))


@pytest.mark.timeout(30)
async def test_the_callers_loop_can_read_it_while_it_awaits_a_step() -> None:
    entered, released = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        assert released.wait(10)

    async with rrfp.local([Told(wait)], loss_fn=nn.functional.mse_loss, hint="f-priority") as pipe:
        step = asyncio.create_task(pipe.step(*batch(2)))
        assert await asyncio.to_thread(entered.wait, 10)
        (rank,) = pipe.statistics()
        released.set()
        await step
        (after,) = pipe.statistics()
    assert (rank.now.num_bytes, after.now.num_bytes, after.peaks.num_bytes) == (0, 0, 2 * MICROBATCH)


def test_received_bytes_are_those_of_what_has_arrived_and_not_started() -> None:
    modules = [Told(lambda: None) for _ in range(2)]
    with rrfp.local(modules, loss_fn=nn.functional.mse_loss, hint="f-priority", limit="2n").blocking() as pipe:
        peaks = pipe.step(*batch(8)).peaks[1]
    assert peaks.received >= 1
    assert peaks.received_bytes == peaks.received * ROWS * WIDTH * 4


def test_a_failed_pipeline_still_tells() -> None:
    def fail() -> None:
        raise ValueError("enough")

    pipeline = rrfp.local([Told(fail)], loss_fn=nn.functional.mse_loss)
    with pytest.raises(PipelineAborted, match="enough"), pipeline.blocking() as pipe:
        pipe.step(*batch(2))
    (rank,) = pipeline.statistics()
    assert rank.peaks.num_bytes == 0


def test_of_a_rank_on_a_device_the_memory_of_that_is_told_and_on_a_cpu_nothing() -> None:
    device = HostDevice()
    device.in_use = DeviceMemory(allocated=7, reserved=20, peak=11)
    pipelines = [rrfp.local([Told(lambda: None)], device=each) for each in (device, None)]
    told = []
    for pipeline in pipelines:
        with pipeline.blocking() as pipe:
            (rank,) = pipe.statistics()
        told.append((rank.device_allocated, rank.device_reserved, rank.device_peak))
    assert told == [(7, 20, 11), (None, None, None)]


def test_a_task_that_runs_out_of_device_memory_is_named_with_what_is_held_and_not_run_again() -> None:
    device = HostDevice()
    device.in_use = DeviceMemory(allocated=7_000, reserved=20_000, peak=11_000)
    calls: list[None] = []

    def run_out() -> None:
        calls.append(None)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    options: dict[str, Any] = {"hint": "f-priority", "limit": 4, "device": device, "depth": 1}
    pipeline = rrfp.local([Told(run_out)], loss_fn=nn.functional.mse_loss, **options)
    with pytest.raises(PipelineAborted) as caught, pipeline.blocking() as pipe:
        pipe.step(*batch(4))
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert caught.value.origin.task == "F2@0"
    assert caught.value.origin.cause.startswith(
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.; host:0 has 7,000 bytes in tensors (11,000 "
        f"at most so far) and 20,000 reserved; of those {2 * MICROBATCH:,} are counted as held by 3 microbatches"
    )
    assert len(calls) == 3


def test_on_a_cpu_such_an_error_is_as_it_was() -> None:
    def run_out() -> None:
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(PipelineAborted) as caught, rrfp.local([Told(run_out)]).blocking() as pipe:
        pipe.evaluate(batch(1)[0])
    assert caught.value.origin.cause == "OutOfMemoryError: no memory"
