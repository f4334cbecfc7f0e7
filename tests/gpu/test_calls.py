"""What a step asks of CUDA, counted by the stub; and what becomes of calls that fail."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from gpu.stub.control import NOT_SUPPORTED, OUT_OF_MEMORY, CudaStub
from torch import Tensor, nn

import rrfp
from rrfp.compute.lanes.stream import StreamLane
from rrfp.devices.copies import DeviceCopies
from rrfp.devices.cuda import CudaDevice

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

#: Of the driver, under the interpreter's lock.
MOST_CALLS_A_TASK, MOST_CALLS_A_MESSAGE = 8, 4

MICROBATCHES, STEPS, WIDTH = 16, 4, 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, device="cuda")

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


def batch() -> tuple[list[Tensor], list[Tensor]]:
    return tuple([torch.ones(4, WIDTH, device="cuda") for _ in range(MICROBATCHES)] for _ in range(2))  # type: ignore[return-value]


def counted(stub: CudaStub, stages: int) -> tuple[dict[str, tuple[int, int, int, int]], int]:
    """For each function of the driver its calls in some steps of a pipeline, as `Calls` has them; and the tasks."""
    with rrfp.local([Layer() for _ in range(stages)], loss_fn=nn.functional.mse_loss).blocking() as pipe:
        for _ in range(2):
            pipe.step(*batch())
        inputs = batch()
        torch.cuda.synchronize()
        stub.reset_counts()
        for _ in range(STEPS):
            pipe.step(*inputs)
        counts = {
            name: (calls.calls, calls.locked, calls.waits, calls.locked_waits)
            for name, calls in stub.counts().items()
            if calls.asks_driver
        }
    return counts, STEPS * MICROBATCHES * 2 * stages


def test_calls_of_the_driver_by_task_and_message(stub: CudaStub, record_property: Any) -> None:
    one, tasks = counted(stub, 1)
    three, tasks_of_three = counted(stub, 3)
    messages = STEPS * MICROBATCHES * 2 * 2
    for name in sorted(set(one) | set(three)):
        calls, locked, *_ = one.get(name, (0, 0, 0, 0))
        more = [b - 3 * a for a, b in zip(one.get(name, (0,) * 4), three.get(name, (0,) * 4), strict=True)]
        record_property(
            name,
            f"{calls / tasks:.2f} a task, {locked / tasks:.2f} under the lock; "
            f"{more[0] / messages:.2f} more a message, {more[1] / messages:.2f} under the lock",
        )
    assert three["kernel"][0] > tasks_of_three  # of each task, and of what messages copy
    assert sum(locked for _, locked, *_ in one.values()) / tasks <= MOST_CALLS_A_TASK
    beyond = sum(three[name][1] - 3 * one.get(name, (0, 0))[1] for name in three)
    assert beyond / messages <= MOST_CALLS_A_MESSAGE
    assert {name: calls for name, calls in (one | three).items() if calls[3]} == {}  # none waits under the lock


def test_no_event_is_made_after_the_first_step(stub: CudaStub) -> None:
    counts, _ = counted(stub, 2)
    assert "cudaEventCreateWithFlags" not in counts


def test_streams_serve_the_next_pipeline(stub: CudaStub) -> None:
    counted(stub, 3)
    gc.collect()
    before = stub.live("streams")
    for _ in range(12):
        counted(stub, 3)
        gc.collect()
    assert stub.live("streams") == before


def test_received_memory_is_free_again_once_the_stream_has_passed_its_last_use(stub: CudaStub) -> None:
    device = CudaDevice(0)
    lane, maker = device.stream(), device.stream()
    with maker.issuing():
        received = torch.ones(1 << 20, device="cuda")
    allocated = torch.cuda.memory_allocated()
    device.note_use(received, lane)
    with stub.setting("kernel_ns", 50_000_000, 2000), lane.issuing():
        used = received.sum()
    early = lane.record()
    view = received.detach()[5:]
    del received
    early.synchronize()
    lane.record().synchronize()
    assert torch.cuda.memory_allocated() > allocated  # a view of it lives
    with lane.issuing():
        used += view.sum()
    del view
    early.synchronize()
    assert torch.cuda.memory_allocated() > allocated  # no event behind its last use
    end = lane.record()
    assert torch.cuda.memory_allocated() > allocated
    end.synchronize()
    assert torch.cuda.memory_allocated() < allocated
    assert float(used) == (1 << 20) + (1 << 20) - 5


def test_memory_of_a_stream_that_is_gone_is_left_to_torch(stub: CudaStub) -> None:
    device = CudaDevice(0)
    lane = device.stream()
    received = torch.ones(1 << 20, device="cuda")
    allocated = torch.cuda.memory_allocated()
    device.note_use(received, lane)
    del received
    assert torch.cuda.memory_allocated() == allocated
    del lane
    gc.collect()
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # when torch looks
    assert torch.cuda.memory_allocated() < allocated


@pytest.mark.allow_blocking  # it waits for the device
@pytest.mark.parametrize("error", [OUT_OF_MEMORY, NOT_SUPPORTED])
async def test_memory_that_cannot_be_pinned_is_copied_once_more_whatever_the_layout(
    error: int, stub: CudaStub, caplog: pytest.LogCaptureFixture
) -> None:
    """The error of the attempt does not fall on the copies' next kernel."""
    stub.fail_call("cudaHostRegister", error, times=1000)
    copies = DeviceCopies(CudaDevice(0), StreamLane)
    try:
        for source in (torch.arange(60.0).reshape(6, 10), torch.arange(60.0).reshape(6, 10).t()):
            slot = torch.empty(source.shape)
            handle = copies.register(slot)
            on_device = torch.empty_strided(source.size(), source.stride(), device="cuda").copy_(source)
            torch.cuda.synchronize()
            (there,) = await copies.to_host([on_device], [slot])
            assert torch.equal(there, source)
            (back,) = await copies.to_device([slot])
            assert torch.equal(back.cpu(), source)
            del handle
    finally:
        copies.close()
        stub.fail_call("cudaHostRegister", error, times=0)
    assert "cannot pin" in caplog.text


def test_times_are_those_of_torch(stub: CudaStub) -> None:
    device = CudaDevice(0)
    stream = device.stream()
    first = stream.record(is_timed=True)
    with stub.setting("kernel_ns", 20_000_000, 2000), stream.issuing():
        torch.ones(4, device="cuda")
    last = stream.record(is_timed=True)
    last.synchronize()
    seconds = last.seconds_since(first)
    assert 0.02 <= seconds < 1
    assert seconds == pytest.approx(first.event.elapsed_time(last.event) / 1e3)  # type: ignore[attr-defined]
    untimed = stream.record()
    untimed.synchronize()
    with pytest.raises((RuntimeError, ValueError)):
        untimed.seconds_since(first)
    torch.cuda._sleep(1)  # type: ignore[no-untyped-call]


def test_clipping_waits_once_for_the_device(stub: CudaStub) -> None:
    with rrfp.local([nn.Sequential(*(Layer() for _ in range(8)))], loss_fn=nn.functional.mse_loss).blocking() as pipe:
        pipe.step(*batch())
        stub.reset_counts()
        pipe.clip_grad_norm_(1.0)
        counts = stub.counts()
    waits = sum(counts[name].calls for name in ("cudaStreamSynchronize", "cudaEventSynchronize") if name in counts)
    assert waits == 1
