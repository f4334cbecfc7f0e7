"""The stub of CUDA does what its README says; torch's own CUDA code runs over it here."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from fork_server import context, fork_server
from gpu.stub.control import OUT_OF_MEMORY, CudaStub
from torch.multiprocessing.reductions import rebuild_cuda_tensor

__all__ = ["fork_server"]

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


def test_a_failed_kernel_breaks_every_call_from_its_end_on(stub: CudaStub) -> None:
    x = torch.ones(4, device="cuda")
    before, behind = torch.cuda.Event(), torch.cuda.Event()
    before.record()
    torch.cuda.current_stream().wait_event(before)
    stub.fail_kernel(after=2)
    with stub.setting("kernel_ns", 200_000_000, 2000):
        y = x + 1
        assert torch.equal(y.cpu(), torch.full((4,), 2.0))  # the first one works
        y += 1
        behind.record()
    for call in (behind.synchronize, behind.query, torch.cuda.synchronize, lambda: x + 1, y.cpu):
        with pytest.raises(torch.AcceleratorError, match="device-side assert"):
            call()


def test_an_index_out_of_range_is_a_failed_kernel(stub: CudaStub) -> None:
    table = torch.zeros(4, device="cuda")
    taken = table[torch.tensor([9, 1], device="cuda")]
    assert taken.shape == (2,)
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        torch.cuda.synchronize()


def test_an_error_of_one_call_stays_the_threads_last_one_until_something_asks(stub: CudaStub) -> None:
    memory = torch.empty(4096, dtype=torch.uint8)
    stub.fail_call("cudaHostRegister", OUT_OF_MEMORY)
    assert int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == OUT_OF_MEMORY
    with pytest.raises(torch.AcceleratorError, match="out of memory"):
        torch.cuda._sleep(1)  # its launch asks
    torch.cuda._sleep(1)


def test_memory_ends(stub: CudaStub) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")
    fresh = torch.empty(8 << 20, device="cuda")
    stub.fail_call("cudaMalloc", OUT_OF_MEMORY, times=2)  # torch frees what it has and tries again
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(64 << 20, device="cuda")
    assert bool(fresh[:4].isnan().all())


def test_a_kernel_that_nobody_computes_is_refused_by_name(stub: CudaStub, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(torch.AcceleratorError, match="operation not supported"):
        torch.ops.aten._fused_dropout(torch.ones(4, device="cuda"), 0.5)  # which CPUs lack
    assert "CUDA stub: the kernel" in capfd.readouterr().err
    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(RuntimeError, match="not supported"):
        torch.cuda.CUDAGraph().capture_begin()
    assert "CUDA stub: cudaStreamBeginCapture is not imitated" in capfd.readouterr().err


def test_calls_under_the_lock_and_waits_are_counted(stub: CudaStub) -> None:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    event.synchronize()
    stub.reset_counts()
    with stub.setting("kernel_ns", 20_000_000, 2000):
        torch.ones(4, device="cuda").add_(1)
    event.record()
    event.synchronize()
    counts = stub.counts()
    assert (counts["cudaEventRecordWithFlags"].calls, counts["cudaEventRecordWithFlags"].waits) == (1, 0)
    waited = counts["cudaEventSynchronize"]
    assert (waited.calls, waited.locked, waited.waits, waited.locked_waits) == (1, 0, 1, 0)
    assert counts["kernel"].calls == 2
    event.query()
    assert stub.counts()["cudaEventQuery"].locked == 1


SEVERAL = """
import torch
from gpu.stub.control import CudaStub
stub = CudaStub()
assert torch.cuda.device_count() == 2
with torch.cuda.device(1):
    x = torch.ones(3, device="cuda")
assert not stub.has_context(0), "a context on device 0 by accident"
y = x.to("cuda:0")
assert (y + 1).cpu().tolist() == [2.0, 2.0, 2.0]
stub.break_device(device=1)
for device in (0, 1):
    try:
        torch.cuda.synchronize(device)
    except torch.AcceleratorError:
        print(device, "is broken")
"""


def test_there_may_be_several_devices_of_which_one_breaks(stub: CudaStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_STUB", "devices=2")
    done = subprocess.run([sys.executable, "-c", SEVERAL], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "1 is broken\n", done.stderr


def _share_and_wait(connection: object) -> None:
    tensor = torch.full((1 << 20,), 7.0, device="cuda")
    torch.cuda.synchronize()
    shared = tensor.untyped_storage()._share_cuda_()
    connection.send(shared)  # type: ignore[attr-defined]
    connection.recv()  # type: ignore[attr-defined]


def test_memory_that_is_open_outlives_a_process_that_dies_and_none_is_opened_afterwards(stub: CudaStub) -> None:
    here, there = context().Pipe()
    process = context().Process(target=_share_and_wait, args=(there,))
    process.start()
    there.close()
    shared = here.recv()
    names = ("storage_device", "storage_handle", "storage_size_bytes", "storage_offset_bytes", "ref_counter_handle")
    fields = dict(zip((*names, "ref_counter_offset", "event_handle", "event_sync_required"), shared, strict=True))
    described = (torch.Tensor, torch.Size([1 << 20]), (1,), 0, torch.UntypedStorage, torch.float32)
    opened = rebuild_cuda_tensor(*described, requires_grad=False, **fields)
    assert stub.live("opened_blocks") == 1
    process.kill()
    process.join()
    process.close()
    here.close()
    assert bool((opened == 7).all())
    del opened
    assert (stub.live("opened_blocks"), stub.live("opened_events")) == (0, 0)
    with pytest.raises(RuntimeError, match="invalid resource handle"):
        rebuild_cuda_tensor(*described, requires_grad=False, **fields)
