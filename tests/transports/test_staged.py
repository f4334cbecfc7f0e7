"""Device tensors: over transports that carry the CPU's only, through inproc as they are, and where they are refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import transports.makers as makers
from compute.separate_double import CountingDouble, SeparateDouble, check_races, closing, put
from torch import Tensor
from transports.on_device import CpuOnlyInproc, over

from rrfp.compute.devices.base import Device
from rrfp.compute.devices.copies import StreamCopies
from rrfp.errors import ConfigError, FrameError, PeerLostError, TransportClosedError
from rrfp.testing.device_double import DoubleError, DoubleEvent
from rrfp.testing.order import reordered
from rrfp.testing.transport_checks import Check, PairOptions
from rrfp.testing.transport_checks.data import check_every_dtype, check_large_tensor, check_memory_layouts
from rrfp.testing.transport_checks.flow import check_fifo_per_channel
from rrfp.testing.transport_checks.pair import assert_same, data, index_of, note, receive, running, soon, stays_pending
from rrfp.transports.base import Channel, Message, Transport, TransportContext
from rrfp.transports.inproc import InprocTransport
from rrfp.transports.staged import DEVICES, StagedTransport, staged
from rrfp.transports.zmq.transport import ZmqTransport

MakeTransport = Callable[[TransportContext], Transport]


def zmq(context: TransportContext) -> Transport:
    return ZmqTransport(context, "ipc")


class GatedCopies(StreamCopies):
    """Copies that begin when the test allows it."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.gate = asyncio.Event()
        self.gate.set()

    async def to_device(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        await self.gate.wait()
        return await super().to_device(tensors)


class Ends:
    """Two started transports of ranks with a device each, or None for the CPU; and what is behind them."""

    def __init__(self, make: MakeTransport, devices: Sequence[SeparateDouble | None], **changes: Any) -> None:
        self.devices = devices
        self.copies = [None if device is None else GatedCopies(device) for device in devices]
        contexts = [
            replace(context, copies=copies)
            for context, copies in zip(makers.contexts(**changes), self.copies, strict=True)
        ]
        self.inner = [make(context) for context in contexts]
        self.left, self.right = (staged(end, context.copies) for end, context in zip(self.inner, contexts, strict=True))


@asynccontextmanager
async def ends(
    make: MakeTransport = CpuOnlyInproc,
    devices: Sequence[SeparateDouble | None] | None = None,
    **changes: Any,
) -> AsyncIterator[Ends]:
    made = Ends(make, (SeparateDouble(), SeparateDouble()) if devices is None else devices, **changes)
    async with closing(made.devices), makers.started(made.left, made.right):
        yield made
    check_races(made.devices)


def on(device: SeparateDouble | None, *values: float) -> Tensor:
    tensor = torch.tensor(values, dtype=torch.float32)
    return tensor if device is None else put(device, tensor)


def is_on(device: SeparateDouble | None, tensor: Tensor | None) -> bool:
    assert tensor is not None
    return device is not None and device.holds(tensor)


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
    with_device = replace(context, copies=StreamCopies(device))
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


BAD_LISTS = {
    "many": "tensor_devices: is 'many', must be an array of 2",
    ("cuda",): r"tensor_devices: is \['cuda'\], must be an array of 2",
    ("cuda", "cuda"): r"tensor_devices\[1\]: is 'cuda', must be null like the tensor",
    (7, None): r"tensor_devices\[0\]: is 7, must be the type of a device",
    ("", None): r"tensor_devices\[0\]: is '', must be the type",
    ("c" * 33, None): r"tensor_devices\[0\]: is 'c+', must be the type",
    (None, None): r"tensor_devices\[0\]: is None, must be the type",
}


async def test_a_bad_list_of_devices_is_one_named_error_and_the_next_message_arrives() -> None:
    async with ends() as pair:
        for index, (devices, error) in enumerate(BAD_LISTS.items()):
            bad = replace(data(torch.ones(2), None), body={DEVICES: devices})
            await pair.inner[0].send(1, bad)
            await pair.left.send(1, data(on(pair.devices[0], 3), index=index))
            with pytest.raises(FrameError, match=f"from rank 0: body.{error}"):
                await receive(pair.right)
            assert index_of(await receive(pair.right)) == index
        assert pair.right.statistics().dropped_frames == len(BAD_LISTS)


async def test_control_passes_a_message_on_its_way_to_the_device_and_nothing_else_does() -> None:
    async with ends() as pair:
        device, gate = pair.devices[0], pair.copies[1]
        assert gate is not None
        gate.gate.clear()
        for index in range(3):
            await pair.left.send(1, data(on(device, index), index=index))
            await pair.left.send(1, data(index=index, channel=Channel.BACKWARD))
        async with running(pair.right.receive()) as receiving:
            await stays_pending(receiving, "a message was received before its tensors were copied")
            # One message is being copied, one was read ahead; all others count in the inner transport's queue.
            assert pair.inner[1].statistics().messages_received == 2
        await pair.left.send(1, note(7))
        async with running(pair.right.receive()) as receiving:
            await stays_pending(receiving, "a message that is not control was overtaken")
            gate.gate.set()
            seen = [await soon(receiving, "the copy ends")]
        seen += [await receive(pair.right) for _ in range(6)]
        for channel in Channel:
            indices = [index_of(message) for message in seen if message.channel is channel]
            assert indices == ([7] if channel is Channel.CONTROL else [0, 1, 2])


async def test_control_is_received_while_tensors_are_on_their_way_to_the_device() -> None:
    async with ends() as pair:
        gate = pair.copies[1]
        assert gate is not None
        gate.gate.clear()
        await pair.left.send(1, data(on(pair.devices[0], 1), index=1))
        async with running(pair.right.receive()) as receiving:
            await stays_pending(receiving, "a message was received before its tensors were copied")
            await pair.left.send(1, note(5))
            assert index_of(await soon(receiving, "control is received")) == 5
        # With device tensors of its own, control stays behind the others in its channel.
        gate.gate.set()
        await pair.left.send(1, replace(note(6), tensors=(on(pair.devices[0], 1),)))
        await pair.left.send(1, note(7))
        assert [index_of(await receive(pair.right)) for _ in range(3)] == [1, 6, 7]


@pytest.mark.parametrize("make", [CpuOnlyInproc, InprocTransport])
async def test_a_message_without_device_tensors_does_not_overtake_one_that_is_copied(make: MakeTransport) -> None:
    source = SeparateDouble(never)
    copied = data(on(source, 1), index=0)
    async with ends(make, (source, SeparateDouble())) as pair, running(pair.left.send(1, copied)) as first:
        await stays_pending(first, "a copy was complete before the device had made it")
        async with running(pair.left.send(1, data(torch.ones(1), index=1))) as second:
            await stays_pending(second, "a message overtook another one in its channel")
            await soon(pair.left.send(1, data(index=2, channel=Channel.BACKWARD)), "another channel is free")
            await soon(pair.left.send(1, note(3)), "control is free")
            await asyncio.to_thread(source.close)  # the device makes the copy now
            seen = [index_of(await receive(pair.right)) for _ in range(4)]
            assert seen.index(0) < seen.index(1)
            await soon(asyncio.gather(first, second), "both are sent")


async def test_two_receivers_get_a_message_each() -> None:
    async with ends() as pair, running(pair.right.receive()) as first, running(pair.right.receive()) as second:
        await asyncio.sleep(0)
        for index in range(2):
            await pair.left.send(1, data(on(pair.devices[0], index), index=index))
        both = await soon(asyncio.gather(first, second), "both messages are received")
        assert sorted(map(index_of, both)) == [0, 1]


async def test_after_close_no_message_is_received_that_was_copied_before() -> None:
    async with ends() as pair:
        await pair.left.send(1, data(on(pair.devices[0], 1), index=1))
        gate = pair.copies[1]
        assert gate is not None
        gate.gate.clear()
        async with running(pair.right.receive()) as receiving:
            await stays_pending(receiving, "a message was received before its tensors were copied")
        gate.gate.set()
        assert isinstance(pair.right, StagedTransport)
        assert pair.right._copying is not None
        await pair.right._copying.task
        await pair.right.close()
        with pytest.raises(TransportClosedError):
            await pair.right.receive()


async def test_control_stays_in_order_behind_a_copy_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrfp.transports.staged.LATE_S", 0.0)
    async with ends() as pair:
        device, gate = pair.devices[0], pair.copies[1]
        assert gate is not None
        gate.gate.clear()
        await pair.left.send(1, data(on(device, 1), index=1))
        async with running(pair.right.receive()) as receiving:
            await stays_pending(receiving, "a message was received before its tensors were copied")
            await pair.left.send(1, note(2))
            seen = [index_of(await soon(receiving, "control is received"))]
        await pair.left.send(1, replace(note(3), tensors=(on(device, 1),)))
        await pair.left.send(1, note(4))
        async with running(pair.right.receive()) as receiving:
            await stays_pending(receiving, "control overtook control")
            gate.gate.set()
            seen.append(index_of(await soon(receiving, "the copy ends")))
        seen += [index_of(await receive(pair.right)) for _ in range(2)]
        assert seen == [2, 1, 3, 4]


async def test_a_peer_is_lost_after_its_last_message_was_copied() -> None:
    async with ends() as pair:
        gate = pair.copies[1]
        assert gate is not None
        gate.gate.clear()
        await pair.left.send(1, data(on(pair.devices[0], 4)))
        async with running(pair.right.receive()) as receiving:
            await stays_pending(receiving, "a message was received before its tensors were copied")
            pair.left.abort()
            await stays_pending(receiving, "the loss overtook the last message")
            gate.gate.set()
            assert_same((await soon(receiving, "the last message arrives")).tensors[0], torch.tensor([4.0]), "it")
        with pytest.raises(PeerLostError, match="rank 0 is lost"):
            await soon(pair.right.receive(), "the loss is reported")
        async with running(pair.right.receive()) as receiving:
            await stays_pending(receiving, "a lost peer was reported twice")


def never(count: int) -> float:
    return 3600.0


async def test_an_abort_and_a_loss_get_through_although_the_device_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrfp.transports.staged.LATE_S", 0.05)
    async with ends(devices=(SeparateDouble(), SeparateDouble(never))) as pair:
        for index in range(4):
            await pair.left.send(1, data(on(pair.devices[0], index), index=index))
        for index in range(2):
            await pair.left.send(1, note(index))
        assert [index_of(await receive(pair.right)) for _ in range(2)] == [0, 1]
        pair.left.abort()
        with pytest.raises(PeerLostError):
            await soon(pair.right.receive(), "the loss is reported")
        assert pair.devices[1] is not None
        await asyncio.to_thread(pair.devices[1].close)  # the device goes on
        for index in range(4):
            message = await receive(pair.right)
            assert_same(message.tensors[0], torch.tensor([float(index)]), f"message {index}")


async def test_a_loss_that_was_read_before_the_copy_is_late_is_raised_once_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rrfp.transports.staged.LATE_S", 0.2)
    async with ends(devices=(SeparateDouble(), SeparateDouble(never))) as pair:
        await pair.left.send(1, data(on(pair.devices[0], 1)))
        pair.left.abort()  # so the loss is read right behind the message
        with pytest.raises(PeerLostError, match="rank 0 is lost"):
            await soon(pair.right.receive(), "the loss is reported")


@pytest.mark.parametrize("make", [CpuOnlyInproc, InprocTransport, zmq])
@pytest.mark.parametrize("how", ["abort", "close"])
async def test_calls_that_wait_for_a_copy_end_with_the_transport(make: MakeTransport, how: str) -> None:
    async with ends(make, (SeparateDouble(), SeparateDouble(never))) as pair:
        await pair.left.send(1, data(on(pair.devices[0], 1)))
        if make is InprocTransport:
            await receive(pair.right)  # it comes complete
        async with (
            running(pair.right.receive()) as receiving,
            running(pair.right.send(0, data(on(pair.devices[1], 2)))) as sending,
        ):
            await stays_pending(receiving, "a copy was complete before the device had made it")
            await stays_pending(sending, "a copy was complete before the device had made it")
            if how == "abort":
                pair.right.abort()
            elif make is InprocTransport:  # waits for copies, which the device makes at last
                assert pair.devices[1] is not None
                await asyncio.gather(pair.right.close(), asyncio.to_thread(pair.devices[1].close))
            else:
                await soon(pair.right.close(), "close returns")
            for call in (receiving, sending):
                with pytest.raises(TransportClosedError):
                    await soon(call, f"a call ends with {how}")


@pytest.mark.parametrize("make", [CpuOnlyInproc, InprocTransport, zmq])
async def test_a_send_that_copies_while_its_peer_dies_raises(make: MakeTransport) -> None:
    source = SeparateDouble(never)
    tensor = on(source, 1)
    async with ends(make, (source, SeparateDouble())) as pair, running(pair.left.send(1, data(tensor))) as sending:
        await stays_pending(sending, "a copy was complete before the device had made it")
        pair.right.abort()
        with pytest.raises(PeerLostError):
            await soon(pair.left.receive(), "the loss is reported")
        await asyncio.to_thread(source.close)  # the device makes the copy now
        with pytest.raises(PeerLostError):
            await soon(sending, "send raises")


async def test_a_failure_of_the_device_is_raised_by_both_ends() -> None:
    async with ends() as pair:
        source, target = pair.devices
        assert source is not None
        assert target is not None
        await pair.left.send(1, data(on(source, 1), index=4))
        target.fail()
        with pytest.raises(DoubleError) as caught:
            await soon(pair.right.receive(), "the failure is raised")
        assert "while tensors of output F4@0 from rank 0 were received" in caught.value.__notes__
        await pair.left.send(1, data(torch.ones(2), index=5))
        assert index_of(await receive(pair.right)) == 5
        with pytest.raises(DoubleError):
            await soon(pair.right.send(0, data(on(target, 1))), "the failure is raised")


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


@pytest.mark.parametrize("check", [check_every_dtype, check_memory_layouts, check_large_tensor, check_fifo_per_channel])
@pytest.mark.parametrize("make", [CpuOnlyInproc, InprocTransport])
async def test_copies_whose_events_are_not_waited_for_fail_the_suite(
    make: MakeTransport, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DoubleEvent, "synchronize", lambda event: None)
    with pytest.raises(AssertionError, match=r"the values differ|a tensor is another's"):
        await check(over(make, lambda: SeparateDouble(0.05), is_shared=make is InprocTransport))


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


def test_messages_without_device_tensors_pass_as_they_are() -> None:
    (context, _), sent = makers.contexts(), []

    class Recording(InprocTransport):
        async def send(self, peer: int, message: Message) -> None:
            sent.append(message)

    message = data(torch.ones(2), None)
    asyncio.run(StagedTransport(Recording(context), StreamCopies(SeparateDouble())).send(1, message))
    assert sent[0] is message


async def test_three_ranks_of_which_one_computes_on_the_cpu() -> None:
    device = SeparateDouble()
    contexts = makers.contexts(PairOptions(ranks=3))
    copies = [None, StreamCopies(device), StreamCopies(device)]
    ranks = [InprocTransport(replace(c, copies=own)) for c, own in zip(contexts, copies, strict=True)]
    async with closing([device]), makers.started(*ranks):
        for receiver in (0, 2):
            await ranks[1].send(receiver, data(put(device, torch.ones(2))))
            assert is_on(device, (await receive(ranks[receiver])).tensors[0]) is (receiver == 2)
    check_races([device])
