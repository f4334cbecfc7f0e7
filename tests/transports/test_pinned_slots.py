"""Tensors of a device over shared memory: the device copies from and into slots, which are pinned, and nothing else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch
import transports.makers as makers
from compute.separate_double import CountingDouble, check_races, closing, put
from torch import Tensor

from rrfp.compute.lanes.stream import StreamLane
from rrfp.devices.copies import DeviceCopies
from rrfp.testing.transport_checks.pair import assert_same, data, index_of, receive, soon
from rrfp.transports.base import Transport
from rrfp.transports.shm.transport import ShmTransport
from rrfp.transports.tunnel.transport import staged

LARGE = 1 << 16


class Unpinnable(CountingDouble):
    """A device of a system that lets no memory be pinned."""

    def pin(self, memory: Tensor) -> bool:
        return False


@asynccontextmanager
async def ends(devices: Sequence[CountingDouble]) -> AsyncIterator[tuple[Transport, Transport]]:
    contexts = [
        replace(context, copies=DeviceCopies(device, StreamLane))
        for context, device in zip(makers.contexts(), devices, strict=True)
    ]
    left, right = (staged(ShmTransport(context), context.copies) for context in contexts)
    async with closing(devices), makers.started(left, right):
        yield left, right
    check_races(devices)


def sample(index: int) -> Tensor:
    return torch.full((LARGE,), float(index))


async def pass_on(left: Transport, right: Transport, index: int, tensors: Sequence[Tensor | None]) -> list[Tensor]:
    await soon(left.send(1, data(*tensors, index=index)), "a message is sent")
    message = await receive(right)
    assert index_of(message) == index
    return [tensor for tensor in message.tensors if tensor is not None]


async def test_slots_are_pinned_once_at_both_ends_and_no_other_host_memory_is_used() -> None:
    devices = (CountingDouble(), CountingDouble())
    async with ends(devices) as (left, right):
        for index in range(20):
            (received,) = await pass_on(left, right, index, [put(devices[0], sample(index))])
            assert devices[1].holds(received)
            assert_same(received.clone(), sample(index), f"message {index}")
            del received
        assert [device.peak for device in devices] == [0, 0]
        # Two where a slot came back after the next message was copied.
        assert all(len(device.pinned) in (1, 2) for device in devices)
    assert [device.pinned for device in devices] == [[], []]


async def test_tensors_of_the_host_lie_beside_those_of_the_device() -> None:
    devices = (CountingDouble(), CountingDouble())
    async with ends(devices) as (left, right):
        sent = [sample(1), put(devices[0], sample(2)), None, torch.empty(0), sample(3), put(devices[0], sample(4))]
        received = await pass_on(left, right, 0, sent)
        assert [devices[1].holds(tensor) for tensor in received] == [False, True, False, False, True]
        for tensor, value in zip(received, (1, 2, None, 3, 4), strict=True):
            assert_same(tensor.clone(), torch.empty(0) if value is None else sample(value), f"tensor {value}")
        assert [device.peak for device in devices] == [0, 0]


async def test_small_messages_need_no_slot() -> None:
    devices = (CountingDouble(), CountingDouble())
    async with ends(devices) as (left, right):
        (received,) = await pass_on(left, right, 0, [put(devices[0], torch.ones(3))])
        assert received.tolist() == [1.0, 1.0, 1.0]
        assert [device.pinned for device in devices] == [[], []]


async def test_a_slot_into_which_a_cancelled_send_may_still_copy_is_not_used_again() -> None:
    devices = (CountingDouble(), CountingDouble())
    async with ends(devices) as (left, right):
        await pass_on(left, right, 0, [put(devices[0], sample(0))])
        source = put(devices[0], sample(1))
        sending = asyncio.create_task(left.send(1, data(source, index=1)))
        await asyncio.sleep(0)  # it has lent a slot, and the copy was issued
        sending.cancel()
        await asyncio.wait({sending})
        assert sending.cancelled()
        for index in (2, 3):
            (received,) = await pass_on(left, right, index, [put(devices[0], sample(index))])
            assert_same(received.clone(), sample(index), f"message {index}")


async def test_memory_that_cannot_be_pinned_costs_a_copy_and_a_line(caplog: pytest.LogCaptureFixture) -> None:
    devices = (Unpinnable(), Unpinnable())
    with caplog.at_level(logging.WARNING, logger="rrfp"):
        async with ends(devices) as (left, right):
            for index in range(3):
                (received,) = await pass_on(left, right, index, [put(devices[0], sample(index))])
                assert_same(received.clone(), sample(index), f"message {index}")
                del received
            assert devices[1].peak >= 4 * LARGE
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert all("cannot pin" in line for line in lines)
