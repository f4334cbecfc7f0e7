"""Tensors by slots of device memory: when memory is free, large messages, and either end's end meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
import transports.makers as makers
from compute.separate_double import SeparateDouble, check_races, closing, put, scribble
from transports.shm_state import until
from transports.slot_ends import Ends, Stuck, ends, kinds
from transports.staged_ends import on

from rrfp import timeouts
from rrfp.errors import PeerLostError, TransportClosedError, TransportError
from rrfp.lab.device_double import DoubleError, DoubleEvent, DoubleMemory
from rrfp.testing.transport_checks.pair import (
    assert_same,
    data,
    index_of,
    note,
    receive,
    running,
    soon,
    stays_pending,
)
from rrfp.transports.base import Channel
from rrfp.transports.cuda_ipc.slots import MIN_SLOT_BYTES, SLOTS


async def test_send_returns_once_its_memory_was_copied_and_the_message_comes_when_it_was_read() -> None:
    target = Stuck()
    async with ends(SeparateDouble(0.0), target) as made:
        tensor = on(made.devices[0], 1, 2, 3)
        await soon(made.left.send(1, data(tensor)), "send returns although the receiver copies nothing")
        scribble(tensor)
        async with running(made.right.receive()) as receiving:
            await stays_pending(receiving, "a message was received before its tensor was copied")
            await soon(made.left.send(1, note(7)), "control is free")
            assert index_of(await soon(receiving, "control is received")) == 7
        await asyncio.to_thread(target.close)  # the device makes the copy now
        assert_same((await receive(made.right)).tensors[0], torch.tensor([1.0, 2.0, 3.0]), "the tensor")


@pytest.mark.parametrize("early", ["the sender", "the receiver"])
async def test_a_copy_that_is_taken_for_complete_too_early_brings_other_bits(
    early: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tests before and after rely on."""
    slow, fast = Stuck(), SeparateDouble(0.0)
    async with ends(*((slow, fast) if early == "the sender" else (fast, slow)), may_race=True) as made:
        monkeypatch.setattr(DoubleEvent, "synchronize", lambda event: None)
        await made.left.send(1, data(on(made.devices[0], 1, 2, 3)))
        (tensor,) = (await receive(made.right)).tensors
        assert tensor is not None
        assert tensor.isnan().all()


async def test_a_slot_that_is_used_again_too_early_is_a_problem() -> None:
    """What else they rely on: the receiver's double sees that memory changes which it reads."""
    target = Stuck()
    async with ends(SeparateDouble(0.0), target, may_race=True) as made:
        channel = made.left._links[1].beside  # type: ignore[attr-defined]
        for index in range(16 * SLOTS):  # the receiver has begun to read one of them before it is written again
            await made.left.send(1, data(on(made.devices[0], index), index=index))
            channel._take_back(index % SLOTS)
        await asyncio.to_thread(target.close)
        assert [line for line in target.problems if "were written to before it was complete" in line]


async def test_a_message_without_tensors_keeps_its_place_behind_one_that_is_copied() -> None:
    target = Stuck()
    async with ends(SeparateDouble(0.0), target) as made:
        await made.left.send(1, data(on(made.devices[0], 1), index=0))
        await made.left.send(1, data(index=1))
        await made.left.send(1, data(index=2, channel=Channel.BACKWARD))
        assert index_of(await receive(made.right)) == 2
        await asyncio.to_thread(target.close)
        assert [index_of(await receive(made.right)) for _ in range(2)] == [0, 1]


#: In slots of 64 KiB; sizes of the tensors of one message.
LARGE = {
    "one byte more than a slot": [MIN_SLOT_BYTES + 1],
    "more than all slots": [5 * SLOTS * MIN_SLOT_BYTES + 3],
    "many that share pieces": [1, MIN_SLOT_BYTES - 1, 0, 3 * MIN_SLOT_BYTES, 5, MIN_SLOT_BYTES, 70_000],
}


@pytest.mark.parametrize("sizes", LARGE.values(), ids=LARGE)
async def test_messages_larger_than_a_slot_go_in_pieces(sizes: list[int]) -> None:
    async with ends(queue_bytes=SLOTS * MIN_SLOT_BYTES) as made:
        source = made.devices[0]
        assert source is not None
        generator = torch.Generator().manual_seed(1)
        tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
        for index in range(3):
            sending = asyncio.create_task(made.left.send(1, data(*(put(source, t) for t in tensors), index=index)))
            received = await receive(made.right)
            assert index_of(received) == index
            for got, want in zip(received.tensors, tensors, strict=True):
                assert_same(got, want, f"message {index}")
            await soon(sending, "send returns")


async def test_large_messages_of_both_channels_share_the_slots_and_both_arrive() -> None:
    async with ends(queue_bytes=SLOTS * MIN_SLOT_BYTES) as made:
        source = made.devices[0]
        assert source is not None
        sends = [
            made.left.send(
                1, data(put(source, torch.full((9 * MIN_SLOT_BYTES,), value, dtype=torch.uint8)), channel=channel)
            )
            for value, channel in ((1, Channel.FORWARD), (2, Channel.BACKWARD))
        ]
        async with running(asyncio.wait_for(asyncio.gather(*sends), 20)) as sending:
            values = {}
            for _ in range(2):
                message = await receive(made.right)
                (tensor,) = message.tensors
                assert tensor is not None
                values[message.channel] = sorted(set(tensor.tolist()))
            await soon(sending, "both are sent")
        assert values == {Channel.FORWARD: [1], Channel.BACKWARD: [2]}


async def test_a_send_that_waits_for_a_slot_goes_on_when_one_is_given_back() -> None:
    target = Stuck()
    async with ends(SeparateDouble(0.0), target) as made:
        for index in range(SLOTS):
            await soon(made.left.send(1, data(on(made.devices[0], index), index=index)), "there is a slot")
        async with running(made.left.send(1, data(on(made.devices[0], SLOTS), index=SLOTS))) as sending:
            await stays_pending(sending, "a slot was used that the receiver has not read")
            await soon(made.left.send(1, note(7)), "control is free")
            sending.cancel()
            await stays_pending(sending, "a send that has begun was given up")
            await asyncio.to_thread(target.close)
            seen = [index_of(await receive(made.right)) for _ in range(SLOTS + 2)]
            assert sorted(seen) == [0, 1, 2, 3, 4, 7]
            await soon(asyncio.wait({sending}), "the send ends")
            assert sending.cancelled()


@pytest.mark.parametrize("how", ["abort", "close"])
async def test_calls_that_wait_for_copies_end_with_the_receiver(how: str) -> None:
    async with ends(SeparateDouble(0.0), Stuck(), may_race=True) as made:
        for index in range(SLOTS):
            await made.left.send(1, data(on(made.devices[0], 1), index=index))
        async with (
            running(made.left.send(1, data(on(made.devices[0], 1)))) as sending,
            running(made.right.receive()) as receiving,
        ):
            await stays_pending(receiving, "a message was received before its tensor was copied")
            if how == "abort":
                made.right.abort()
            else:
                await soon(made.right.close(), "close returns")
            with pytest.raises(TransportClosedError):
                await soon(receiving, "receive ends")
            with pytest.raises(PeerLostError):
                await soon(sending, "send ends")


async def test_an_abort_of_the_sender_is_a_loss_although_its_memory_is_being_read() -> None:
    async with ends(SeparateDouble(0.0), Stuck(), may_race=True) as made:
        await made.left.send(1, data(on(made.devices[0], 1)))
        made.left.abort()
        with pytest.raises(PeerLostError):
            await soon(made.right.receive(), "the loss is reported")
        async with running(made.right.receive()) as receiving:
            await stays_pending(receiving, "a lost peer was reported twice")


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whose shared memory was closed."""
    closed, close = list[str](), DoubleMemory.close

    def recording(memory: DoubleMemory, **options: bool) -> None:
        close(memory, **options)
        closed.append("its own" if memory._is_own else "a peer's")

    monkeypatch.setattr(DoubleMemory, "close", recording)
    return closed


async def test_after_an_abort_shared_memory_is_closed_at_both_ends(closed: list[str]) -> None:
    async with ends() as made:
        await made.left.send(1, data(on(made.devices[0], 1)))
        await receive(made.right)
        await made.right.send(0, note(4))  # behind the slot that was given back
        await receive(made.left)
        made.left.abort()
        await until(lambda: sorted(closed) == ["a peer's", "its own"])
        made.right.abort()
        await until(lambda: sorted(closed) == ["a peer's", "a peer's", "its own", "its own"])


async def test_after_an_abort_memory_that_the_peer_may_still_read_is_not_used_again(closed: list[str]) -> None:
    target = Stuck()
    async with ends(SeparateDouble(0.0), target, may_race=True) as made:
        await made.left.send(1, data(on(made.devices[0], 1)))
        made.left.abort()
        await until(lambda: closed == ["a peer's"])
        made.right.abort()
        await asyncio.to_thread(target.close)  # the copy ends
        await until(lambda: sorted(closed) == ["a peer's", "a peer's", "its own"])


async def test_a_failure_of_the_device_is_raised_by_the_end_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "DEVICE_VERDICT_S", 0.05)
    async with ends() as made:
        source, target = made.devices
        assert source is not None
        assert target is not None
        target.fail()
        await soon(made.left.send(1, data(on(source, 1), index=4)), "the memory is free")
        await soon(made.left.send(1, data(torch.ones(2), index=5)), "tensors of the host are free")
        with pytest.raises(TransportError, match="while tensors of output F4@0 from rank 0 were received"):
            await soon(made.right.receive(), "the failure is raised")
        assert index_of(await receive(made.right)) == 5
        with pytest.raises(DoubleError):
            await soon(made.right.send(0, data(on(target, 1))), "the failure is raised")


async def test_more_than_the_window_is_neither_announced_nor_copied() -> None:
    size, count = 1 << 16, 20
    async with ends(queue_bytes=4 * size) as made:
        source, target = made.devices
        assert source is not None
        assert target is not None

        async def send_all() -> None:
            for index in range(count):
                await made.left.send(1, data(put(source, torch.zeros(size, dtype=torch.uint8)), index=index))

        async with running(send_all()) as sending:
            await stays_pending(sending, "20 messages were sent into a queue of 4")
            assert made.left.statistics().messages_sent == 4
            held = [await receive(made.right)]
            for index in range(1, count):
                held.append(await receive(made.right))
                assert index_of(held.pop(0)) == index - 1
            await soon(sending, "all is sent")


async def test_close_delivers_what_was_sent_and_frees_the_copies() -> None:
    async with ends() as made:
        for index in range(5):
            await made.left.send(1, data(on(made.devices[0], index), index=index))
        await soon(made.left.close(), "close returns")
        for index in range(5):
            assert_same((await receive(made.right)).tensors[0], torch.tensor([float(index)]), f"message {index}")
        with pytest.raises(PeerLostError, match="it closed its end"):
            await soon(made.right.send(0, data(on(made.devices[1], 1))), "send raises")
        copies = made.contexts[0].copies
        assert copies is not None
        with pytest.raises(TransportClosedError):
            await copies.to_device([torch.ones(1)])


async def test_memory_is_made_for_peers_that_exchange_tensors_only() -> None:
    made = Ends([SeparateDouble(0.0) for _ in range(3)])
    for rank, peers in enumerate([(1,), (0,), ()]):
        context = replace(made.contexts[rank], data_peers=peers)
        made.contexts[rank] = context
        made.ranks[rank] = type(made.ranks[rank])(context)
    async with closing(made.devices), makers.started(*made.ranks):
        assert {peer for peer, kind in kinds(made.left).items() if kind == "TunnelLink"} == {1}
        await made.left.send(2, data(on(made.devices[0], 4)))  # all the same
        assert_same((await receive(made.ranks[2])).tensors[0], torch.tensor([4.0]), "it")
    check_races(made.devices)


async def test_a_start_that_is_given_up_frees_everything() -> None:
    made = Ends([SeparateDouble(0.0), SeparateDouble(0.0)])
    starting = asyncio.create_task(made.left.start())
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait({starting})
    assert starting.cancelled()
    made.right.abort()
    with pytest.raises(TransportClosedError):
        await made.right.start()
