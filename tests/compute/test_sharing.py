"""Memory of the device double between two processes' devices, and what shows that it was read or released wrongly."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from compute.separate_double import closing
from fork_server import context, fork_server
from torch import Tensor

from rrfp.compute.lanes.stream import StreamLane
from rrfp.devices.copies import copies_of
from rrfp.devices.cuda_sharing import CudaSharing
from rrfp.errors import FrameError
from rrfp.lab.device_double import DoubleDevice
from rrfp.testing.transport_checks.pair import assert_same
from rrfp.transports import SharesDeviceMemory
from rrfp.transports.header_checks import TensorSpec

__all__ = ["fork_server"]


def spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


@asynccontextmanager
async def two(*seconds: float) -> AsyncIterator[tuple[list[DoubleDevice], list[SharesDeviceMemory]]]:
    """Two doubles, whose blocks take so long, and their copies."""
    devices = [DoubleDevice(s) for s in seconds or (0.001, 0.001)]
    copies = [copies_of(device, StreamLane) for device in devices]
    assert all(isinstance(each, SharesDeviceMemory) for each in copies)
    try:
        async with closing(devices):
            yield devices, copies  # type: ignore[misc]
    finally:
        for each in copies:
            each.close()


async def test_what_one_device_shares_another_one_pulls() -> None:
    tensors = [
        torch.randn(5, 4).t(),
        torch.empty(0, 3),
        torch.tensor(3.5, requires_grad=True),
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.randn(3, 1).expand(3, 4),
        torch.arange(6).to(torch.float8_e5m2),
    ]
    async with two() as (devices, (source, target)):
        shared = await source.share(tensors)
        assert [fields is None for fields, _ in shared] == [tensor.numel() == 0 for tensor in tensors]
        pulled = await target.pull([fields for fields, _ in shared], list(map(spec, tensors)))
        for index, (got, want) in enumerate(zip(pulled, tensors, strict=True)):
            assert_same(got, want, f"tensor {index}")
            assert got.is_contiguous()
        assert [device.problems for device in devices] == [[], []]


async def test_memory_that_was_released_cannot_be_opened_and_the_device_goes_on() -> None:
    async with two() as (_, (source, target)):
        tensor = torch.ones(3)
        ((fields, kept),) = await source.share([tensor])
        del kept
        with pytest.raises(OSError, match="No such file"):
            await target.pull([fields], [spec(tensor)])
        descriptor = os.memfd_create("another")  # which may get the number that is free now
        try:
            with pytest.raises(OSError, match=r"No such file|was released"):
                await target.pull([fields], [spec(tensor)])
        finally:
            os.close(descriptor)
        assert_same((await target.to_device([tensor]))[0], tensor, "a copy after the failure")


@pytest.mark.parametrize(
    ("early", "problem"),
    [("release", "were written to before it was complete"), ("drop", "were freed before it was complete")],
)
def test_memory_that_is_released_or_dropped_while_it_is_copied_is_a_problem(early: str, problem: str) -> None:
    with DoubleDevice(0.0) as source, DoubleDevice(3600.0) as target:
        with (here := source.stream()).issuing():
            fields, kept = source.sharing.share(torch.ones(3))
        here.record().synchronize()
        with (there := target.stream()).issuing():
            opened = [target.sharing.open(fields)]
            copy = torch.empty(12, dtype=torch.uint8)
            copy.copy_(opened[0])
        end = there.record()
        if early == "drop":
            opened.clear()
        else:
            del kept
        target.close()
        end.synchronize()
        assert [problem in line for line in target.problems] == [True]


def test_memory_that_is_opened_before_it_is_written_is_not_right() -> None:
    with DoubleDevice(3600.0) as source:
        with source.stream().issuing():
            fields, kept = source.sharing.share(torch.ones(3))
        assert source.sharing.open(fields).tolist() == [255] * 12
        del kept


def _share_and_wait(connection: Connection) -> None:
    torch.set_num_threads(1)
    with DoubleDevice(0.0) as device:
        with (stream := device.stream()).issuing():
            shared = device.sharing.share(torch.arange(1000.0))
        stream.record().synchronize()
        connection.send(shared[0])
        threading.Event().wait(60)


@asynccontextmanager
async def sharing_process() -> AsyncIterator[tuple[Any, dict[str, Any]]]:
    """A process that shares `torch.arange(1000.0)`, and the fields."""
    here, there = context().Pipe()
    process = context().Process(target=_share_and_wait, args=(there,))
    await asyncio.to_thread(process.start)
    there.close()
    try:
        assert await asyncio.to_thread(here.poll, 20)
        yield process, await asyncio.to_thread(here.recv)
    finally:
        process.kill()
        await asyncio.to_thread(process.join)
        process.close()
        here.close()


async def test_what_was_opened_survives_the_death_of_its_owner_and_the_rest_cannot_be_opened() -> None:
    want = torch.arange(1000.0)
    async with two() as (devices, (_, target)), sharing_process() as (process, fields):
        opened = devices[1].sharing.open(fields)
        os.kill(process.pid, signal.SIGKILL)
        await asyncio.to_thread(process.join)
        assert_same(opened.view(torch.float32), want, "what was opened")
        with pytest.raises(OSError, match="No such"):
            await target.pull([fields], [spec(want)])


GOOD = {
    "handle": b"\2c" + bytes(64),
    "size": 4096,
    "offset": 512,
    "counters": b"/torch_12_3456_0",
    "counter": 7,
    "event": bytes(64),
    "waits": True,
    "start": 0,
    "length": 12,
}

BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "short handle": ("handle", {"handle": b"\2c"}),
    "text handle": ("handle", {"handle": "c" * 66}),
    "descriptor handle": ("handle", {"handle": b"\2e" + bytes(64)}),
    "no size": ("size", {"size": 0}),
    "real size": ("size", {"size": 4096.0}),
    "negative offset": ("offset", {"offset": -1}),
    "file elsewhere": ("counters", {"counters": b"/../etc/passwd"}),
    "file with a zero": ("counters", {"counters": b"/torch_1_2_3\0"}),
    "counter beyond the file": ("counter", {"counter": 10_000}),
    "true counter": ("counter", {"counter": True}),
    "long event": ("event", {"event": bytes(65)}),
    "number for waits": ("waits", {"waits": 1}),
    "start beyond the storage": ("start", {"start": 4096 - 11}),
    "other length": ("length", {"length": 13}),
    "unknown": ("'more'", {"more": 1}),
}


@pytest.mark.parametrize(("field", "changes"), BAD.values(), ids=BAD)
def test_each_field_of_cuda_memory_is_checked_before_it_is_opened(field: str, changes: dict[str, Any]) -> None:
    sharing = CudaSharing(0)
    sharing.check(GOOD, 12)
    with pytest.raises(FrameError) as raised:
        sharing.check(GOOD | changes, 12)
    assert (raised.value.peer, raised.value.field) == (None, field)


@pytest.mark.parametrize("name", GOOD)
def test_an_absent_field_is_named(name: str) -> None:
    with pytest.raises(FrameError, match=f"{name}: is absent"):
        CudaSharing(0).check({key: value for key, value in GOOD.items() if key != name}, 12)


async def test_the_double_s_fields_are_checked_too() -> None:
    async with two() as (_, (source, target)):
        ((fields, _),) = await source.share([torch.ones(3)])
        assert fields is not None
        target.check_shared(fields, 12)
        for changes in ({"process": 0}, {"descriptor": -1}, {"inode": "1"}, {"length": 11}):
            with pytest.raises(FrameError) as raised:
                target.check_shared(fields | changes, 12)
            assert [raised.value.field] == list(changes)


class Torch:
    """In place of the calls of torch that need CUDA: answers, one call after the other, and what was released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: RuntimeError | bytes) -> None:
        self._answers = list(answers)
        self.released: list[tuple[bytes, int]] = []
        monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda storage: self._share(storage.nbytes()))
        monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", self._release, raising=False)

    def _share(self, size: int) -> tuple[Any, ...]:
        answer = self._answers.pop(0)
        if isinstance(answer, RuntimeError):
            raise answer
        return 0, answer, size, 512, b"/torch_12_3456_0", 7, bytes(64), True

    def _release(self, counters: bytes, counter: int) -> None:
        self.released.append((counters, counter))


MALLOC, DESCRIPTOR = b"\2c" + bytes(64), b"\2e" + bytes(80)
RECEIVED = RuntimeError("Attempted to send CUDA tensor received from another process\nat StorageSharing.cpp")


def test_a_part_of_a_cuda_storage_is_shared_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_ = Torch(monkeypatch, MALLOC)
    part = torch.arange(1024.0)[5:8]
    fields, kept = CudaSharing(0).share(part)
    assert kept is part
    assert fields == GOOD | {"start": 20}
    CudaSharing(0).check(fields, 12)
    assert torch_.released == []


def test_memory_that_came_from_another_process_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    Torch(monkeypatch, RECEIVED, MALLOC)
    part = torch.arange(1024.0)[5:8]
    fields, kept = CudaSharing(0).share(part)
    assert isinstance(kept, Tensor)
    assert kept.data_ptr() != part.data_ptr()
    assert (kept.tolist(), fields["start"], fields["size"]) == (part.tolist(), 0, 12)
    Torch(monkeypatch, RECEIVED, RECEIVED)
    with pytest.raises(OSError, match=r"torch cannot share this memory: Attempted .* another process$"):
        CudaSharing(0).share(part)


def test_memory_of_an_expandable_segment_is_refused_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_ = Torch(monkeypatch, DESCRIPTOR)
    with pytest.raises(OSError, match="expandable segments cannot be shared"):
        CudaSharing(0).share(torch.ones(3))
    assert torch_.released == [(b"/torch_12_3456_0", 7)]
