"""Memory of a device that two processes see: the double's, what shows that it was read too early, and CUDA's calls."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from compute.separate_double import closing
from fork_server import context, fork_server
from transports.shm_state import until

from rrfp.compute.lanes.stream import StreamLane
from rrfp.devices import cuda_sharing
from rrfp.devices.base import ByteRange
from rrfp.devices.copies import SharesDeviceMemory, copies_of
from rrfp.devices.cuda_sharing import CudaSharing
from rrfp.errors import FrameError
from rrfp.lab.device_double import DoubleDevice
from rrfp.testing.transport_checks.pair import assert_same
from rrfp.transports.wire.header_checks import TensorSpec

__all__ = ["fork_server"]


@asynccontextmanager
async def two(*seconds: float) -> AsyncIterator[tuple[list[DoubleDevice], list[SharesDeviceMemory]]]:
    """Two doubles, whose blocks take so long, and their copies."""
    devices = [DoubleDevice(s) for s in seconds or (0.001, 0.001)]
    copies = [
        each for each in (copies_of(device, StreamLane) for device in devices) if isinstance(each, SharesDeviceMemory)
    ]
    try:
        async with closing(devices):
            yield devices, copies
    finally:
        for each in copies:
            each.close()


async def test_what_one_device_writes_another_one_reads() -> None:
    tensors = [
        torch.randn(5, 4).t(),
        torch.empty(0, 3),
        torch.tensor(3.5),
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.randn(3, 1).expand(3, 4),
        torch.arange(6).to(torch.float8_e5m2),
    ]
    specs = [TensorSpec(tensor.dtype, tuple(tensor.shape), False) for tensor in tensors]
    sizes = [spec.num_bytes for spec in specs]
    whole = [ByteRange(index, 0, size, 512 * index) for index, size in enumerate(sizes) if size]
    async with two() as (devices, (source, target)):
        memory = await source.share(512 * len(tensors))
        assert target.check_shared(memory.fields) == memory.num_bytes == 512 * len(tensors)
        opened = await target.open_shared(memory.fields)
        await source.write(memory, tensors, whole)
        read = await target.read(opened, specs, whole)
        for index, (got, want) in enumerate(zip(read, tensors, strict=True)):
            assert_same(got, want, f"tensor {index}")
            assert got.is_contiguous()
        halves = [
            [part._replace(stop=part.stop // 2) for part in whole],
            [part._replace(start=part.stop // 2, place=part.place + part.stop // 2) for part in whole],
        ]
        flat, again = await source.write(memory, tensors, halves[0]), await target.read(opened, specs, halves[0])
        await source.write(memory, flat, halves[1])
        again = await target.read(opened, specs, halves[1], again)
        for index, (got, want) in enumerate(zip(again, tensors, strict=True)):
            assert_same(got, want, f"tensor {index} in two parts")
        for memory_of, copies in ((opened, target), (memory, source)):
            await copies.close_shared(memory_of)
        assert [device.problems for device in devices] == [[], []]


async def test_memory_that_was_released_cannot_be_opened_and_the_device_goes_on() -> None:
    async with two() as (_, (source, target)):
        memory = await source.share(12)
        await source.close_shared(memory)
        with pytest.raises(OSError, match="No such file"):
            await target.open_shared(memory.fields)
        descriptor = os.memfd_create("another")  # which may get the number that is free now
        try:
            with pytest.raises(OSError, match=r"No such file|was released"):
                await target.open_shared(memory.fields)
        finally:
            os.close(descriptor)
        assert_same((await target.to_device([torch.ones(3)]))[0], torch.ones(3), "a copy after the failure")


def test_memory_that_is_overwritten_while_it_is_read_is_a_problem() -> None:
    with DoubleDevice(0.0) as source, DoubleDevice(3600.0) as target:
        memory = source.sharing.allocate(12)
        with (here := source.stream()).issuing():
            kept = [memory.write(0, torch.ones(12, dtype=torch.uint8))]
        here.record().synchronize()
        opened = target.sharing.open(memory.fields)
        with (there := target.stream()).issuing():
            kept.append(opened.read(0, torch.empty(12, dtype=torch.uint8)))
        end = there.record()
        memory.close()
        target.close()
        end.synchronize()
        assert ["were written to before it was complete" in line for line in target.problems] == [True]


def test_memory_that_is_read_before_it_is_written_is_not_right_and_the_rest_is() -> None:
    target = torch.empty(8, dtype=torch.uint8)
    with DoubleDevice(lambda count: 0.0 if count == 1 else 3600.0) as source:
        memory, stream = source.sharing.allocate(8), source.stream()
        with stream.issuing():
            kept = [memory.write(0, torch.ones(4, dtype=torch.uint8))]
        stream.record().synchronize()
        with stream.issuing():
            kept.append(memory.write(4, torch.ones(4, dtype=torch.uint8)))
        source.sharing.open(memory.fields).read(0, target)
        assert target.tolist() == [1, 1, 1, 1, 255, 255, 255, 255]
        del kept


def _write_and_wait(connection: Connection) -> None:
    torch.set_num_threads(1)
    with DoubleDevice(0.0) as device:
        memory = device.sharing.allocate(4000)
        with (stream := device.stream()).issuing():
            kept = memory.write(0, torch.arange(1000.0).view(torch.uint8))
        stream.record().synchronize()
        connection.send(memory.fields)
        threading.Event().wait(60)
        del kept


@asynccontextmanager
async def writing_process() -> AsyncIterator[tuple[Any, dict[str, Any]]]:
    """A process that wrote `torch.arange(1000.0)` into memory, and its fields."""
    here, there = context().Pipe()
    process = context().Process(target=_write_and_wait, args=(there,))
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
    spec, part = TensorSpec(want.dtype, (1000,), False), ByteRange(0, 0, 4000, 0)
    async with two() as (_, (_, target)), writing_process() as (process, fields):
        opened = await target.open_shared(fields)
        os.kill(process.pid, signal.SIGKILL)
        await asyncio.to_thread(process.join)
        assert_same((await target.read(opened, [spec], [part]))[0], want, "what was opened")
        with pytest.raises(OSError, match="No such"):
            await target.open_shared(fields)


GOOD = {"handle": bytes(64), "size": 4096}

BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "short handle": ("handle", {"handle": bytes(63)}),
    "text handle": ("handle", {"handle": "c" * 64}),
    "no size": ("size", {"size": 0}),
    "real size": ("size", {"size": 4096.0}),
    "true size": ("size", {"size": True}),
    "unknown": ("'more'", {"more": 1}),
}


@pytest.mark.parametrize(("field", "changes"), BAD.values(), ids=BAD)
def test_each_field_of_cuda_memory_is_checked_before_it_is_opened(field: str, changes: dict[str, Any]) -> None:
    assert CudaSharing(0).check(GOOD) == 4096
    with pytest.raises(FrameError) as raised:
        CudaSharing(0).check(GOOD | changes)
    assert (raised.value.peer, raised.value.field) == (None, field)


@pytest.mark.parametrize("name", GOOD)
def test_an_absent_field_is_named(name: str) -> None:
    with pytest.raises(FrameError, match=f"{name}: is absent"):
        CudaSharing(0).check({key: value for key, value in GOOD.items() if key != name})


async def test_the_double_s_fields_are_checked_too() -> None:
    async with two() as (_, (source, target)):
        fields = dict((await source.share(12)).fields)
        assert target.check_shared(fields) == 12
        for changes in ({"process": 0}, {"descriptor": -1}, {"inode": "1"}, {"size": 0}):
            with pytest.raises(FrameError) as raised:
                target.check_shared(fields | changes)
            assert [raised.value.field] == list(changes)


class Library:
    """In place of CUDA's runtime library: memory of the host, handles that are addresses, and what was called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: dict[str, int] = {}
        self._kept: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            return self.fails.get(name, 0) or getattr(self, f"_{name}")(*arguments)

        return call

    def _cudaMalloc(self, pointer: Any, size: int) -> int:
        memory = ctypes.create_string_buffer(size)
        address = ctypes.addressof(memory)
        self._kept[address], pointer._obj.value = memory, address
        return 0

    def _cudaFree(self, address: int) -> int:
        del self._kept[address]
        return 0

    def _cudaIpcGetMemHandle(self, handle: Any, pointer: Any) -> int:
        ctypes.memmove(handle, pointer.value.to_bytes(8, "little"), 8)
        return 0

    def _cudaIpcOpenMemHandle(self, pointer: Any, handle: Any, flags: int) -> int:
        assert flags == 1
        pointer._obj.value = int.from_bytes(bytes(handle)[:8], "little")
        return 0

    def _cudaIpcCloseMemHandle(self, address: int) -> int:
        return 0

    def _cudaGetLastError(self) -> int:
        return 0

    def cudaGetErrorString(self, status: int) -> bytes:
        return f"error {status}".encode()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    made = Library()
    monkeypatch.setattr(cuda_sharing, "_library", lambda: made)
    yield made
    cuda_sharing._idle.clear()


def test_cuda_memory_that_others_may_have_open_is_used_again_and_other_is_freed(library: Library) -> None:
    sharing = CudaSharing(0)
    memory = sharing.allocate(4096)
    assert sharing.check(memory.fields) == 4096
    memory.close()
    assert sharing.allocate(4096).fields == memory.fields
    assert sharing.allocate(4096).fields != memory.fields
    assert CudaSharing(1).allocate(4096).fields != memory.fields
    assert library.calls.count("cudaMalloc") == 3
    assert "cudaFree" not in library.calls
    sharing.allocate(512).close(is_open_elsewhere=False)
    assert library.calls[-1] == "cudaFree"
    opened = sharing.open(memory.fields)
    opened.close()
    assert library.calls[-2:] == ["cudaIpcOpenMemHandle", "cudaIpcCloseMemHandle"]


@pytest.mark.parametrize("name", ["cudaMalloc", "cudaIpcGetMemHandle"])
def test_cuda_s_refusal_is_said_and_not_left_for_torch_s_next_kernel(name: str, library: Library) -> None:
    library.fails[name] = 801
    with pytest.raises(OSError, match=f"{name}: error 801"):
        CudaSharing(0).allocate(4096)
    assert library.calls[-1] == "cudaGetLastError"


@pytest.mark.parametrize("fails", [False, True])
async def test_opened_memory_is_closed_once_with_the_copies_at_the_latest(library: Library, fails: bool) -> None:
    """On the lane that reads it, and on none that is closed; also if the device refuses."""
    fields = CudaSharing(0).allocate(4096).fields
    device = DoubleDevice(0.0)
    async with closing([device]):
        copies = SharesDeviceMemory(device, StreamLane, CudaSharing(0))
        opened = [await copies.open_shared(fields, peer=peer) for peer in (1, 1, 2)]
        await copies.close_shared(opened[0], peer=1)
        assert library.calls.count("cudaIpcCloseMemHandle") == 1
        if fails:
            library.fails["cudaIpcCloseMemHandle"] = 999
        copies.close()
        await until(lambda: library.calls.count("cudaIpcCloseMemHandle") == 3)


async def test_memory_of_this_process_closes_with_the_copies_if_nobody_reads_it_any_more(library: Library) -> None:
    device = DoubleDevice(0.0)
    async with closing([device]):
        copies = SharesDeviceMemory(device, StreamLane, CudaSharing(0))
        memories = [await copies.share(4096, peer=1) for _ in range(2)]
        copies.close_at_end(memories[1], peer=1)
        assert not cuda_sharing._idle[0, 4096]
        copies.close()
        await until(lambda: bool(cuda_sharing._idle[0, 4096]))
        assert CudaSharing(0).allocate(4096).fields == memories[1].fields
        assert CudaSharing(0).allocate(4096).fields != memories[0].fields
