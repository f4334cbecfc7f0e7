"""The memory of shm: received tensors are the receiver's, and slots are as many as stated."""

from __future__ import annotations

import asyncio
import gc
import random
import threading

import pytest
import torch
from torch import Tensor
from transports.shm_state import (
    MIB,
    descriptors,
    filled,
    mappings,
    no_garbage,
    no_mappings,
    only,
    room,
    shm_pair,
    until,
)

import rrfp.transports.shm.slot_pool as slot_pool
import rrfp.transports.shm.transport as shm_transport
from rrfp.errors import PeerLostError
from rrfp.testing.transport_checks import PairOptions
from rrfp.testing.transport_checks.pair import data, index_of, receive, running
from rrfp.transports.base import Channel
from rrfp.transports.shm.slot_pool import IDLE_BYTES, SlotPool, drop_surplus
from rrfp.transports.shm.slots import HEAD_BYTES, size_class
from rrfp.transports.shm.transport import ShmTransport

__all__ = ["no_garbage", "no_mappings"]


def noise(num_bytes: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


async def pass_on(left: ShmTransport, right: ShmTransport, *tensors: Tensor) -> list[Tensor]:
    _, message = await asyncio.gather(left.send(1, data(*tensors)), right.receive())
    return [tensor for tensor in message.tensors if tensor is not None]


async def test_held_tensors_keep_every_bit_while_others_come_and_go() -> None:
    """Of 200 ragged messages a receiver holds each for a while; views of parts, of other dtypes and shapes count."""
    choices = random.Random(5)
    held: list[tuple[Tensor, Tensor]] = []
    async with shm_pair() as (left, right):
        for index in range(200):
            sent = [noise(choices.choice([70_000, 100_000, 300_001, MIB]), 2 * index), noise(90_000, index)]
            for got, want in zip(await pass_on(left, right, *sent), sent, strict=True):
                assert torch.equal(got, want)
                if choices.random() < 0.3:
                    start = choices.randrange(60_000) // 8 * 8
                    held.append((got[start : start + 800].view(torch.int64), want[start : start + 800].clone()))
                del got
            sent[0].fill_(0xFF)
            while len(held) > 20:
                held.pop(choices.randrange(20))
            for view, want in held:
                assert torch.equal(view.view(torch.uint8), want)


async def test_a_write_into_a_received_tensor_harms_no_other_message() -> None:
    async with shm_pair() as (left, right):
        sent = noise(MIB, 1)
        (first,) = await pass_on(left, right, sent)
        (second,) = await pass_on(left, right, sent)
        first.fill_(0xFF)
        assert torch.equal(second, sent)
        del first
        gc.collect()
        (third,) = await pass_on(left, right, sent)
        assert torch.equal(third, sent)


@pytest.mark.parametrize("end", ["close", "abort of the sender", "abort of the receiver"])
async def test_tensors_outlive_the_connection(end: str) -> None:
    before = len(mappings())
    async with shm_pair() as (left, right):
        (first,) = await pass_on(left, right, noise(MIB, 1))
        await left.send(1, data(noise(MIB, 2)))
        if end == "close":
            await left.close()
        elif end == "abort of the sender":
            left.abort()
        else:
            second = only(await right.receive())
            right.abort()
        if end != "abort of the receiver":
            second = only(await receive(right))
    assert torch.equal(first, noise(MIB, 1))
    assert torch.equal(second, noise(MIB, 2))
    view = second[: MIB // 2].view(torch.int32)
    del first, second
    await until(lambda: len(mappings()) == before + 1)
    assert torch.equal(view.view(torch.uint8), noise(MIB, 2)[: MIB // 2])
    del view
    await until(lambda: len(mappings()) == before)


async def test_a_view_in_another_thread_keeps_its_slot_and_gives_it_back_there() -> None:
    async with shm_pair() as (left, right):
        pool = left._links[1].outlets[Channel.FORWARD].pool
        release = threading.Event()
        held = await pass_on(left, right, noise(MIB, 3))

        def hold(views: list[Tensor]) -> None:
            release.wait(10)
            views.clear()

        thread = threading.Thread(target=hold, args=([held.pop()[5:100]],))
        thread.start()
        await pass_on(left, right, noise(MIB, 4))
        await until(lambda: len(pool.free_slots()) == 1)
        assert pool.num_bytes == 2 * MIB
        release.set()
        await until(lambda: len(pool.free_slots()) == 2)
        await asyncio.to_thread(thread.join)


async def test_a_receiver_may_hold_three_windows_of_messages_and_nobody_waits() -> None:
    window, size, count = 8 * MIB, MIB, 24
    before = sum(mappings())
    async with shm_pair(PairOptions(queue_bytes=window)) as (left, right):
        held = []

        async def send_all() -> None:
            for index in range(count):
                await left.send(1, data(filled(size, index), index=index))

        async with running(send_all()) as sending:
            for _ in range(count):
                held.append(await receive(right))
                # Those in the window, those that are held, and one whose credit is on its way; both ends map each.
                most = (len(held) + window // size + 1) * room(size)
                assert sum(mappings()) - before <= 2 * most
            await sending
        for index, message in enumerate(held):
            assert index_of(message) == index
            assert torch.equal(only(message), filled(size, index))
        assert sum(mappings()) - before <= 2 * count * room(size)


async def test_ragged_messages_take_no_more_than_was_lent_at_once_and_what_may_be_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each message has another size; one is held at a time. Without a bound, each would leave a slot of its own."""
    monkeypatch.setattr(slot_pool, "IDLE_BYTES", 4 * MIB)
    before, descriptors_before = sum(mappings()), descriptors()
    largest, most = 2 * MIB, 0
    async with shm_pair() as (left, right):
        opened = descriptors()
        for index in range(60):
            size = 100_000 + index * (largest - 100_000) // 60
            for channel in (Channel.FORWARD, Channel.BACKWARD):
                message = data(filled(size, index), channel=channel)
                _, got = await asyncio.gather(left.send(1, message), right.receive())
                assert torch.equal(only(got), filled(size, index))
                most = max(most, sum(mappings()) - before)
                del got
            assert descriptors() <= opened
        # One message at a time is lent at each end, and a freed slot may be seen a message late.
        assert most <= 2 * (4 * MIB + 3 * room(largest))
        assert most > 4 * MIB  # the bound was met
    assert descriptors() == descriptors_before


async def test_thousands_of_messages_open_no_descriptors() -> None:
    async with shm_pair() as (left, right):
        await pass_on(left, right, filled(70_000, 1))
        opened, mapped = descriptors(), len(mappings())
        for index in range(1000):
            await pass_on(left, right, filled(70_000 if index % 2 else 100, index))
        assert (descriptors(), len(mappings())) <= (opened, mapped + 2)


@pytest.mark.parametrize("num_bytes", [1, 4096, 65_537, 100_000, MIB, MIB + 1, 33 * MIB - 1, 64 * MIB, 1 << 40])
def test_a_slot_has_an_eighth_and_a_page_more_than_its_tensors_at_most(num_bytes: int) -> None:
    size = size_class(num_bytes)
    assert num_bytes <= size <= max(4096, num_bytes + num_bytes // 8)
    assert size_class(size) == size
    assert (HEAD_BYTES + size) // 4096 * 4096 + 4096 <= room(size)


async def test_idle_slots_beyond_the_limit_are_dropped_at_both_ends_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slot_pool, "IDLE_BYTES", 3 * MIB)
    monkeypatch.setattr(shm_transport, "IDLE_S", 0.05)
    before = len(mappings())
    async with shm_pair() as (left, right):
        held = [await pass_on(left, right, filled(MIB, index)) for index in range(8)]
        await asyncio.sleep(0.15)  # some trims see that all are lent
        assert len(mappings()) - before == 16
        held.clear()
        await until(lambda: len(mappings()) - before <= 6)
        assert len(mappings()) - before == 6
        held = [await pass_on(left, right, filled(MIB, index)) for index in range(8)]
        for index, (tensor,) in enumerate(held):
            assert torch.equal(tensor, filled(MIB, index))


def test_the_least_recently_used_are_dropped_first() -> None:
    now_s = 0.0
    dropped: list[int] = []
    size = IDLE_BYTES // 2
    pool = SlotPool(lambda: now_s, dropped.append, lambda memory: None, lambda: None)
    for _ in range(5):
        now_s += 1.0
        pool.acquire(size)
    drop_surplus([pool], now_s)
    assert dropped == []  # all are lent
    for slots in pool._by_size.values():
        for slot in slots:
            slot.free()
    drop_surplus([pool], unused_since_s=2.0)
    assert dropped == [1, 2]
    drop_surplus([pool])
    assert dropped == [1, 2, 3]
    assert pool.num_bytes == 2 * size


async def test_a_lost_peer_leaves_no_slots_at_either_end() -> None:
    before, opened = len(mappings()), descriptors()
    async with shm_pair() as (left, right):
        for index in range(5):
            await left.send(1, data(filled(MIB, index), index=index))
        left.abort()
        for index in range(5):
            assert index_of(await receive(right)) == index
        with pytest.raises(PeerLostError):
            await right.receive()
    await until(lambda: len(mappings()) == before)
    assert descriptors() == opened
