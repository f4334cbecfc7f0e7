"""Device tensors that are still copied: the messages behind them, control messages, and ends of all kinds."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
import transports.makers as makers
from compute.separate_double import SeparateDouble, closing
from transports.on_device import CpuOnlyInproc
from transports.staged_ends import MakeTransport, ends, on, zmq

from rrfp.compute.lanes.stream import StreamLane
from rrfp.devices.copies import DeviceCopies
from rrfp.errors import PeerLostError, TransportClosedError, TransportError
from rrfp.lab.device_double import DoubleError
from rrfp.testing.transport_checks import PairOptions
from rrfp.testing.transport_checks.pair import assert_same, data, index_of, note, receive, running, soon, stays_pending
from rrfp.transports.base import Channel
from rrfp.transports.inproc import InprocTransport
from rrfp.transports.tunnel.transport import staged


async def test_other_channels_pass_a_message_on_its_way_to_the_device_and_its_own_does_not() -> None:
    async with ends() as pair:
        device, gate = pair.devices[0], pair.copies[1]
        assert gate is not None
        gate.gate.clear()
        await pair.left.send(1, data(on(device, 0), index=0))
        for index in range(2):
            await pair.left.send(1, data(index=index, channel=Channel.BACKWARD))
            assert index_of(await receive(pair.right)) == index
        for index in range(1, 4):
            await pair.left.send(1, data(index=index))
        async with running(pair.right.receive()) as receiving:
            await stays_pending(receiving, "a message overtook another one of its channel")
            # One more of the channel was read; the others count in the inner transport's queue.
            assert pair.inner[1].statistics().messages_received == 4
            gate.gate.set()
            assert index_of(await soon(receiving, "the copy ends")) == 0
        assert [index_of(await receive(pair.right)) for _ in range(3)] == [1, 2, 3]


async def test_two_peers_do_not_wait_for_each_other_s_copies() -> None:
    """As the two neighbours in a V placement: one's tensors are stuck on their way, in both directions."""
    stuck: list[int] = []
    device = SeparateDouble(lambda count: 3600.0 if count in stuck else 0.0)
    contexts = makers.contexts(PairOptions(ranks=3))
    devices = [SeparateDouble(0.0), SeparateDouble(0.0), device]
    copies = [DeviceCopies(each, StreamLane) for each in devices]
    ranks = [staged(CpuOnlyInproc(c), own) for c, own in zip(contexts, copies, strict=True)]
    async with closing(devices), makers.started(*ranks):
        stuck.append(device._count + 1)
        await ranks[0].send(2, data(on(devices[0], 4), index=0))
        async with running(ranks[2].receive()) as receiving:
            await stays_pending(receiving, "a copy was complete before the device had made it")
            await ranks[1].send(2, data(on(devices[1], 5), index=1))
            assert index_of(await soon(receiving, "the other peer's message arrives")) == 1
        first, second = on(device, 1), on(device, 2)
        stuck.append(device._count + 1)
        async with running(ranks[2].send(0, data(first))) as sending:
            await stays_pending(sending, "a copy was complete before the device had made it")
            await soon(ranks[2].send(1, data(second)), "a message to the other peer is sent")
            assert_same((await receive(ranks[1])).tensors[0], torch.tensor([2.0]), "it")


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
        seen = [index_of(await receive(pair.right)) for _ in range(3)]
        seen.remove(1)
        assert seen == [6, 7]


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


async def test_control_stays_in_order_behind_a_copy_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrfp.transports.tunnel.transport.LATE_S", 0.0)
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
        seen.remove(1)  # whose place among the messages of another channel is free
        assert seen == [2, 3, 4]


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
    monkeypatch.setattr("rrfp.transports.tunnel.transport.LATE_S", 0.05)
    async with ends(devices=(SeparateDouble(), SeparateDouble(never))) as pair:
        for index in range(4):
            await pair.left.send(1, data(on(pair.devices[0], index), index=index))
        for index in range(2):
            await pair.left.send(1, note(index))
        assert [index_of(await receive(pair.right)) for _ in range(2)] == [0, 1]
        pair.left.abort()
        with pytest.raises(PeerLostError):
            await soon(pair.right.receive(), "the loss is reported")


async def test_a_loss_that_was_read_before_the_copy_is_late_is_raised_once_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rrfp.transports.tunnel.transport.LATE_S", 0.2)
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
        with pytest.raises(
            TransportError, match=r"DoubleError: .*, while tensors of output F4@0 from rank 0 were received"
        ):
            await soon(pair.right.receive(), "the failure is raised")
        await pair.left.send(1, data(torch.ones(2), index=5))
        assert index_of(await receive(pair.right)) == 5
        with pytest.raises(DoubleError):
            await soon(pair.right.send(0, data(on(target, 1))), "the failure is raised")
