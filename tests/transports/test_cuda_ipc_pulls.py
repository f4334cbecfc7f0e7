"""Tensors that the receiver pulls: the sender's memory stays until its copy is complete, or either end is gone."""

from __future__ import annotations

import asyncio

import pytest
import torch
from compute.separate_double import SeparateDouble, put, scribble
from transports.pulled_ends import Ends, Stuck, ends, refusing
from transports.staged_ends import on

from rrfp import timeouts
from rrfp.errors import PeerLostError, TransportClosedError, TransportError
from rrfp.lab.device_double import DoubleError, DoubleEvent
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


async def test_send_returns_when_the_copy_is_complete_and_the_memory_may_be_overwritten() -> None:
    target = Stuck()
    async with ends(SeparateDouble(0.0), target) as made:
        tensor = on(made.devices[0], 1, 2, 3)
        async with running(made.left.send(1, data(tensor))) as sending, running(made.right.receive()) as receiving:
            await stays_pending(sending, "send returned before the tensor was pulled")
            await stays_pending(receiving, "a message was received before its tensor was pulled")
            await soon(made.left.send(1, note(7)), "control is free")
            assert index_of(await soon(receiving, "control is received")) == 7
            await asyncio.to_thread(target.close)  # the device makes the copy now
            await soon(sending, "send returns")
            scribble(tensor)
        assert_same((await receive(made.right)).tensors[0], torch.tensor([1.0, 2.0, 3.0]), "the tensor")


async def test_a_pull_that_is_taken_for_complete_too_early_brings_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test before relies on."""
    async with ends(SeparateDouble(0.0), Stuck(), may_race=True) as made:
        monkeypatch.setattr(DoubleEvent, "synchronize", lambda event: None)
        await made.left.send(1, data(on(made.devices[0], 1, 2, 3)))
        (tensor,) = (await receive(made.right)).tensors
        assert tensor is not None
        assert tensor.isnan().all()


async def test_a_message_without_tensors_keeps_its_place_behind_one_that_is_pulled() -> None:
    target = Stuck()
    async with (
        ends(SeparateDouble(0.0), target) as made,
        running(made.left.send(1, data(on(made.devices[0], 1), index=0))) as sending,
    ):
        await stays_pending(sending, "send returned before the tensor was pulled")
        await made.left.send(1, data(index=1))
        await made.left.send(1, data(index=2, channel=Channel.BACKWARD))
        assert index_of(await receive(made.right)) == 2
        await asyncio.to_thread(target.close)
        assert [index_of(await receive(made.right)) for _ in range(2)] == [0, 1]


async def test_a_cancelled_send_that_was_announced_waits_until_its_memory_is_free() -> None:
    target = Stuck()
    async with ends(SeparateDouble(0.0), target) as made:
        sending = asyncio.create_task(made.left.send(1, data(on(made.devices[0], 1), index=3)))
        await stays_pending(sending, "send returned before the tensor was pulled")
        sending.cancel()
        await stays_pending(sending, "send returned before the tensor was pulled")
        await asyncio.to_thread(target.close)
        assert index_of(await receive(made.right)) == 3
        await soon(asyncio.wait({sending}), "the send ends")
        assert sending.cancelled()


@pytest.mark.parametrize("how", ["abort", "close"])
async def test_calls_that_wait_for_a_pull_end_with_the_receiver(how: str) -> None:
    async with (
        ends(SeparateDouble(0.0), Stuck(), may_race=True) as made,
        running(made.left.send(1, data(on(made.devices[0], 1)))) as sending,
        running(made.right.receive()) as receiving,
    ):
        await stays_pending(receiving, "a message was received before its tensor was pulled")
        if how == "abort":
            made.right.abort()
        else:
            await soon(made.right.close(), "close returns")
        with pytest.raises(TransportClosedError):
            await soon(receiving, "receive ends")
        with pytest.raises(PeerLostError):
            await soon(sending, "send ends")


async def test_an_abort_of_the_sender_is_a_loss_although_its_memory_is_being_pulled() -> None:
    async with ends(SeparateDouble(0.0), Stuck(), may_race=True) as made:
        async with running(made.left.send(1, data(on(made.devices[0], 1)))) as sending:
            await stays_pending(sending, "send returned before the tensor was pulled")
            made.left.abort()
            with pytest.raises(TransportClosedError):
                await soon(sending, "send ends")
        with pytest.raises(PeerLostError):
            await soon(made.right.receive(), "the loss is reported")
        async with running(made.right.receive()) as receiving:
            await stays_pending(receiving, "a lost peer was reported twice")


async def test_memory_that_is_gone_though_its_owner_lives_is_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "FAREWELL_TIMEOUT_S", 0.05)
    async with (
        ends(refusing("release", calls=1), SeparateDouble(0.0), may_race=True) as made,
        running(made.left.send(1, data(on(made.devices[0], 1)))) as sending,
    ):
        with pytest.raises(PeerLostError, match=r"rank 0 is lost: its edge failed: .*(No such file|was released)"):
            await soon(made.right.receive(), "the loss is reported")
        await soon(sending, "the memory is free")


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


async def test_more_than_the_window_is_neither_announced_nor_pulled() -> None:
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
