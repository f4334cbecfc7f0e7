"""Device tensors: over transports that carry the CPU's only, through inproc as they are, and where they are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transports.makers as makers
from compute.separate_double import CountingDouble, SeparateDouble, check_races, closing, put
from torch import Tensor
from transports.checks import CHECKS
from transports.on_device import CpuOnlyInproc, over
from transports.reordering import reordered
from transports.staged_ends import MakeTransport, ends, is_on, on, zmq

from rrfp.compute.lanes.stream import StreamLane
from rrfp.devices.copies import DeviceCopies
from rrfp.errors import ConfigError, FrameError
from rrfp.lab.device_double import DoubleEvent
from rrfp.testing.transport_checks import PairOptions
from rrfp.testing.transport_checks.pair import assert_same, data, index_of, receive, running, soon, stays_pending
from rrfp.transports.base import Message
from rrfp.transports.inproc import InprocTransport
from rrfp.transports.tunnel.p2p import STAGED
from rrfp.transports.tunnel.transport import StagedTransport, staged
from rrfp.transports.zmq.transport import ZmqTransport


@pytest.mark.parametrize("make", [CpuOnlyInproc, InprocTransport, zmq])
async def test_cpu_and_device_tensors_mix_in_one_message(make: MakeTransport) -> None:
    async with ends(make) as pair:
        device, target = pair.devices
        sent = (on(device, 1, 2), torch.arange(3), None, torch.ones(2), on(device, 5).requires_grad_())
        await pair.left.send(1, data(*sent, flag=True))
        received = await receive(pair.right)
        for index, tensor in enumerate(sent):
            assert_same(received.tensors[index], tensor, f"tensor {index}")
        assert [None if t is None else is_on(target, t) for t in received.tensors] == [True, False, None, False, True]
        assert dict(received.body) == {"flag": True}


@pytest.mark.parametrize("make", [CpuOnlyInproc, InprocTransport, zmq])
@pytest.mark.parametrize("device", [SeparateDouble, lambda: None], ids=["from-device-to-cpu", "from-cpu-to-device"])
async def test_a_rank_on_the_cpu_talks_to_one_on_a_device(
    make: MakeTransport, device: Callable[[], SeparateDouble | None]
) -> None:
    source = device()
    async with ends(make, (source, SeparateDouble() if source is None else None)) as pair:
        for sender, receiver, here, there in (
            (pair.left, pair.right, pair.devices[0], pair.devices[1]),
            (pair.right, pair.left, pair.devices[1], pair.devices[0]),
        ):
            peer = receiver.context.rank
            await sender.send(peer, data(on(here, 1, 2), torch.ones(2)))
            received = await receive(receiver)
            assert_same(received.tensors[0], torch.tensor([1.0, 2.0]), "the first tensor")
            assert_same(received.tensors[1], torch.ones(2), "the second tensor")
            assert not is_on(there, received.tensors[0])


def test_what_carries_the_device_is_not_wrapped() -> None:
    (context, _), device = makers.contexts(), SeparateDouble()
    with_device = replace(context, copies=DeviceCopies(device, StreamLane))
    inproc = InprocTransport(with_device)
    assert staged(inproc, with_device.copies) is inproc
    assert staged(ZmqTransport(context), None).carries == {"cpu"}
    wrapped = staged(ZmqTransport(with_device), with_device.copies)
    assert isinstance(wrapped, StagedTransport)
    assert wrapped.carries == {"cpu", "double"}
    passed_on = reordered(InprocTransport, lambda count: 0)(with_device)
    assert staged(passed_on, with_device.copies) is passed_on


@pytest.mark.parametrize("make", [InprocTransport, zmq])
async def test_a_tensor_of_a_device_that_the_rank_does_not_use_is_refused(make: MakeTransport) -> None:
    async with ends(make, (None, None)) as pair:
        elsewhere = torch.empty(3, device="meta")
        with pytest.raises(ConfigError, match=r"tensor is on meta.*pass device=, or move the rank's modules"):
            await pair.left.send(1, data(elsewhere))


@pytest.mark.parametrize("make", [CpuOnlyInproc, InprocTransport, zmq])
async def test_a_device_tensor_that_cannot_be_sent_is_refused_before_it_is_copied(make: MakeTransport) -> None:
    async with ends(make, max_message_bytes=1000) as pair:
        device = pair.devices[0]
        assert device is not None
        copied: list[Tensor] = []
        device.empty_on_host = copied.append  # type: ignore[method-assign, assignment]
        with pytest.raises(ConfigError, match="message has 4004 bytes, max_message_bytes is 1000"):
            await pair.left.send(1, data(put(device, torch.ones(1001))))
        with pytest.raises(ConfigError, match="has 65 dimensions"):
            await pair.left.send(1, data(put(device, torch.ones([1] * 65))))
        with pytest.raises(ConfigError, match="peer is 7, must be one of: 1"):
            await pair.left.send(7, data(put(device, torch.ones(1))))
        assert copied == []


NO_ARRAY = r"must be an ascending array of indices of tensors, which are \[0\]"

BAD_LISTS: list[Any] = ["many", ["0"], [True], [0.0], [-1], [1], [2], [0, 0], [0, 1], {"0": 0}, 0]


async def test_a_bad_list_of_staged_tensors_is_one_named_error_and_the_next_message_arrives() -> None:
    async with ends() as pair:
        for index, indices in enumerate(BAD_LISTS):
            bad = replace(data(torch.ones(2), None), body={STAGED: indices})
            await pair.inner[0].send(1, bad)
            await pair.left.send(1, data(on(pair.devices[0], 3), index=index))
            with pytest.raises(FrameError, match=rf"from rank 0: body.{STAGED}: is .*, {NO_ARRAY}"):
                await receive(pair.right)
            assert index_of(await receive(pair.right)) == index
        assert pair.right.statistics().dropped_frames == len(BAD_LISTS)


@pytest.mark.parametrize("make", [CpuOnlyInproc, zmq])
async def test_staged_memory_is_bounded_on_both_sides(make: MakeTransport) -> None:
    size, count = 1 << 16, 40
    devices = CountingDouble(), CountingDouble()
    async with ends(make, devices, queue_bytes=4 * size) as pair:

        async def send_all() -> None:
            for index in range(count):
                await pair.left.send(1, data(put(devices[0], torch.zeros(size, dtype=torch.uint8)), index=index))

        async def until_full() -> None:
            while pair.inner[0].statistics().messages_sent < 4:  # noqa: ASYNC110 - the contract has no event for it
                await asyncio.sleep(0.001)

        async with running(send_all()) as sending:
            await soon(until_full(), "the queue is full")
            await stays_pending(sending, "40 messages were sent into a queue of 4")
            assert pair.inner[0].statistics().messages_sent == 4
            assert devices[1].peak == 0
            for index in range(count):
                assert index_of(await receive(pair.right)) == index
                await asyncio.sleep(0)
            await soon(sending, "all is sent")
        assert 0 < devices[0].peak <= (4 + 1) * size  # in the inner queue, and the one that waits for it
        assert 0 < devices[1].peak <= 2 * size


@pytest.mark.parametrize("check", ["every_dtype", "memory_layouts", "large_tensor", "fifo_per_channel"])
@pytest.mark.parametrize("make", [CpuOnlyInproc, InprocTransport])
async def test_copies_whose_events_are_not_waited_for_fail_the_suite(
    make: MakeTransport, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DoubleEvent, "synchronize", lambda event: None)
    with pytest.raises(AssertionError, match=r"the values differ|a tensor is another's"):
        await CHECKS[check](over(make, lambda: SeparateDouble(5.0), is_shared=make is InprocTransport))


async def test_over_inproc_device_tensors_do_not_touch_host_memory() -> None:
    device = CountingDouble()
    async with ends(InprocTransport, (device, device)) as pair:
        await pair.left.send(1, data(on(device, 1), torch.ones(3)))
        assert is_on(device, (await receive(pair.right)).tensors[0])
    assert device.peak == 0


async def test_between_two_devices_of_one_process_tensors_do_not_touch_host_memory() -> None:
    devices = CountingDouble(), CountingDouble()
    async with ends(InprocTransport, devices) as pair:
        await pair.left.send(1, data(on(devices[0], 1)))
        tensor = (await receive(pair.right)).tensors[0]
        assert is_on(devices[1], tensor)
        assert not is_on(devices[0], tensor)
    assert devices[0].peak == devices[1].peak == 0


async def test_messages_without_device_tensors_pass_as_they_are() -> None:
    sent: list[Message] = []

    class Recording(CpuOnlyInproc):
        async def send(self, peer: int, message: Message) -> None:
            sent.append(message)

    async with ends(Recording) as pair:
        message = data(torch.ones(2), None)
        await pair.left.send(1, message)
        assert sent[0] is message


async def test_three_ranks_of_which_one_computes_on_the_cpu() -> None:
    device = SeparateDouble()
    contexts = makers.contexts(PairOptions(ranks=3))
    copies = [None, DeviceCopies(device, StreamLane), DeviceCopies(device, StreamLane)]
    ranks = [InprocTransport(replace(c, copies=own)) for c, own in zip(contexts, copies, strict=True)]
    async with closing([device]), makers.started(*ranks):
        for receiver in (0, 2):
            await ranks[1].send(receiver, data(put(device, torch.ones(2))))
            assert is_on(device, (await receive(ranks[receiver])).tensors[0]) is (receiver == 2)
    check_races([device])
