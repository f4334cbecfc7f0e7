"""Copies between a device and the host for transports, on the double."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import pytest_asyncio
import torch
from compute.separate_double import SeparateDouble, check_races, closing, put, scribble
from torch import Tensor

from rrfp.compute.lanes.stream import StreamLane
from rrfp.devices.copies import DeviceCopies
from rrfp.errors import TransportClosedError
from rrfp.lab.device_double import DoubleDevice, DoubleError
from rrfp.testing.transport_checks.pair import assert_same, running, soon, stays_pending
from rrfp.transports.wire.tensor_bytes import DTYPES

# complex32 is experimental to torch, which says so once.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@pytest_asyncio.fixture
async def device() -> AsyncIterator[SeparateDouble]:
    made = SeparateDouble()
    async with closing([made]):
        yield made
    check_races([made])


@pytest_asyncio.fixture
async def copies(device: SeparateDouble) -> AsyncIterator[DeviceCopies]:
    made = DeviceCopies(device, StreamLane)
    yield made
    made.close()


def samples() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    raw = {
        name: torch.randint(0, 2, (6 * 4 * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)
        for name, dtype in DTYPES.items()
    }
    base, complexes = torch.randn(24, 36), torch.randn(8, 8, dtype=torch.complex64)
    return raw | {
        "empty": torch.empty(4, 0, 2),
        "scalar": torch.tensor(3.5),
        "transposed": base.t(),
        "strided": base[::3, 1::2],
        "expanded": base[:, :1].expand(24, 5),
        "conjugated": complexes.conj().t(),
        "negated": complexes.conj().imag,
        "differentiable": torch.nn.Parameter(torch.randn(2, 2)),
        "with a graph": torch.randn(3, requires_grad=True) * 2,
    }


async def test_every_tensor_there_and_back(device: SeparateDouble, copies: DeviceCopies) -> None:
    names, sent = samples().keys(), list(samples().values())
    on_device = [put(device, tensor) for tensor in sent]
    on_host = await copies.to_host(on_device)
    assert not any(map(copies.holds, on_host))
    for tensor in on_device:
        scribble(tensor)
    back = await copies.to_device(on_host)
    for tensor in on_host:
        scribble(tensor)
    again = await copies.copy(back, copies)
    for tensor in back:
        scribble(tensor)
    for name, tensor, arrived in zip(names, sent, again, strict=True):
        assert copies.holds(arrived)
        assert arrived.is_contiguous(), name
        assert_same(arrived, tensor, name)


async def test_copies_of_one_call_have_memory_of_their_own(device: SeparateDouble, copies: DeviceCopies) -> None:
    tensor = put(device, torch.ones(4))
    for made in (await copies.to_host([tensor, tensor]), await copies.copy([tensor, tensor], copies)):
        assert len({t.untyped_storage().data_ptr() for t in (tensor, *made)}) == 3


async def test_no_copy_is_made_on_the_loop(device: SeparateDouble, copies: DeviceCopies) -> None:
    """Not even the one from ordinary into pinned memory."""
    names: set[str] = set()
    original = device.empty_on_host

    def recorded(tensor: Tensor) -> Tensor:
        names.add(threading.current_thread().name)
        return original(tensor)

    device.empty_on_host = recorded  # type: ignore[method-assign]
    await copies.to_device([torch.ones(5)])
    await copies.to_host([put(device, torch.ones(5))])
    assert names == {"rrfp-copies-receive", "rrfp-copies-send"}


Call = Callable[[DeviceCopies, Sequence[Tensor]], Any]
CALLS: dict[str, Call] = {
    "to_host": lambda copies, tensors: copies.to_host(tensors),
    "to_device": lambda copies, tensors: copies.to_device(tensors),
    "copy": lambda copies, tensors: copies.copy(tensors, copies),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_close_ends_the_waiting_call_and_refuses_others(call: Call) -> None:
    device = SeparateDouble(lambda count: 3600.0)
    copies, tensor = DeviceCopies(device, StreamLane), put(device, torch.ones(2))
    async with closing([device]), running(call(copies, [tensor])) as waiting:
        await stays_pending(waiting, "a copy was complete before the device had made it")
        del tensor  # the copy under way still reads it
        copies.close()
        copies.close()
        with pytest.raises(TransportClosedError):
            await soon(waiting, "the waiting call ends")
        with pytest.raises(TransportClosedError):
            await call(copies, [torch.ones(2)])
    check_races([device])


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_a_cancelled_copy_keeps_its_source_until_the_device_is_done(call: Call) -> None:
    device = DoubleDevice(lambda count: 3600.0)
    copies = DeviceCopies(device, StreamLane)
    async with closing([device]):
        cancelled = asyncio.create_task(call(copies, [torch.ones(2)]))
        async with running(call(copies, [torch.full((2,), 7.0)])) as behind:
            await stays_pending(behind, "a copy was complete before the device had made it")
            cancelled.cancel()
            await asyncio.wait({cancelled})
            del cancelled  # its error's traceback holds the source
            await asyncio.to_thread(device.close)  # the device makes the copies now
            assert_same((await soon(behind, "the other copy is made"))[0], torch.full((2,), 7.0), "the other copy")
        copies.close()
    check_races([device])  # such as a source that was freed before


@pytest.mark.parametrize(
    "call",
    [pytest.param(call, id=name, marks=pytest.mark.long if name != "copy" else ()) for name, call in CALLS.items()],
)
async def test_a_failure_of_the_device_is_raised(call: Call) -> None:
    device = SeparateDouble()
    copies, tensor = DeviceCopies(device, StreamLane), put(device, torch.ones(2))
    async with closing([device]):
        await call(copies, [tensor])
        device.fail()
        for _ in range(2):
            with pytest.raises(DoubleError):
                await call(copies, [tensor])
        copies.close()


async def test_a_call_that_cannot_allocate_leaves_the_others(device: SeparateDouble, copies: DeviceCopies) -> None:
    tensor, original = put(device, torch.ones(2)), device.empty_on_host

    def full(tensor: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("out of pinned memory")

    device.empty_on_host = full  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        await copies.to_host([tensor])
    device.empty_on_host = original  # type: ignore[method-assign]
    assert_same((await copies.to_host([tensor]))[0], torch.ones(2), "the next copy")


async def test_nothing_starts_before_the_first_copy(device: SeparateDouble) -> None:
    before = threading.active_count()
    copies = DeviceCopies(device, StreamLane)
    copies.close()
    assert threading.active_count() == before
