"""Checks of order, of bounded memory, and of the state after a cancelled call."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import Any

import torch

from rrfp.testing.transport_checks.pair import (
    MakePair,
    Pair,
    PairOptions,
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

_KIB = 1 << 10
_MIB = 1 << 20


async def check_fifo_per_channel(make_pair: MakePair) -> None:
    """Interleaved messages of all channels and sizes, both ways at once, keep their order within each channel."""
    sizes = (1, 300 * _KIB, 0, 70 * _KIB, 3 * _MIB, 16)
    count = 24

    async def send_all(pair: Pair, sender: int, channel: Channel) -> None:
        transport = (pair.left, pair.right)[sender]
        for index in range(count):
            size = 0 if channel is Channel.CONTROL else sizes[index % len(sizes)]
            tensor = torch.full((size,), index % 251, dtype=torch.uint8)
            await transport.send(1 - sender, data(tensor, index=index, channel=channel))

    async def receive_all(pair: Pair, receiver: int) -> dict[Channel, list[int]]:
        seen: dict[Channel, list[int]] = defaultdict(list)
        for _ in range(count * len(Channel)):
            message = await (pair.left, pair.right)[receiver].receive()
            tensor = message.tensors[0]
            assert tensor is not None, "a tensor is missing"
            assert bool((tensor == index_of(message) % 251).all()), "a tensor is another's"
            seen[message.channel].append(index_of(message))
        return seen

    async with make_pair(PairOptions(queue_bytes=8 * _MIB)) as pair:
        sends = [send_all(pair, sender, channel) for sender in (0, 1) for channel in Channel]
        async with running(_all(sends)) as sending:
            both = await soon(asyncio.gather(receive_all(pair, 0), receive_all(pair, 1)), "all messages arrive")
            await soon(sending, "all messages are sent")
        for seen in both:
            for channel in Channel:
                assert seen[channel] == list(range(count)), f"{channel}: order is {seen[channel]}"


async def _all(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*coroutines)


async def check_control_not_behind_data(make_pair: MakePair) -> None:
    """A control message overtakes tensors that were sent before it and wait for the receiver."""
    count = 64
    async with make_pair(PairOptions(queue_bytes=4 * _MIB)) as pair:

        async def send_data() -> None:
            for index in range(count):
                await pair.left.send(1, data(torch.zeros(_MIB, dtype=torch.uint8), index=index))

        async with running(send_data()) as sending:
            await stays_pending(sending, "64 MiB were sent into a queue of 4 MiB without a receiver")
            await soon(pair.left.send(1, note()), "a control message is sent while data waits")
            before = 0
            while (await receive(pair.right)).channel is not Channel.CONTROL:
                before += 1
            assert before <= count // 2, f"the control message came behind {before} of {count} tensors"
            for _ in range(count - before):
                await receive(pair.right)
            await soon(sending, "all data is sent")


async def check_channels_do_not_wait_for_each_other(make_pair: MakePair) -> None:
    """A full forward channel does not block the backward channel."""
    async with make_pair(PairOptions(queue_bytes=_MIB)) as pair:
        tensor = torch.zeros(_MIB, dtype=torch.uint8)
        await soon(pair.left.send(1, data(tensor, index=0)), "one message fits")
        async with running(pair.left.send(1, data(tensor, index=1))) as blocked:
            await stays_pending(blocked, "a second message fitted into a full queue")
            await soon(pair.left.send(1, data(tensor, channel=Channel.BACKWARD)), "the backward channel is free")
            seen = [(await receive(pair.right)).channel for _ in range(3)]
            assert sorted(seen) == [Channel.BACKWARD, Channel.FORWARD, Channel.FORWARD], f"received {seen}"
            await soon(blocked, "the second message is sent when there is room")


async def check_backpressure(make_pair: MakePair) -> None:
    """A sender waits while its receiver does not receive, and continues when it does; nothing is lost."""
    size, limit, count = 256 * _KIB, 4 * _MIB, 64
    accepted = 0
    async with make_pair(PairOptions(queue_bytes=limit)) as pair:

        async def send_all() -> None:
            nonlocal accepted
            for index in range(count):
                await pair.left.send(1, data(torch.full((size,), index, dtype=torch.uint8), index=index))
                accepted += 1

        async with running(send_all()) as sending:
            await stays_pending(sending, f"{count * size} bytes were accepted, queue_bytes is {limit}")
            for received in range(count):
                most = (received + pair.read_ahead) * size + limit
                assert accepted * size <= most, f"{accepted * size} bytes were accepted, at most {most} may be"
                if received == count // 4:
                    await stays_pending(sending, "the sender ran ahead of the receiver")
                    assert accepted * size <= most, f"{accepted * size} bytes were accepted, at most {most} may be"
                message = await receive(pair.right)
                assert index_of(message) == received, f"message {index_of(message)} came, {received} was next"
            await soon(sending, "all messages are sent")


async def check_message_larger_than_the_queue(make_pair: MakePair) -> None:
    """A message larger than queue_bytes travels alone; the others follow it."""
    async with make_pair(PairOptions(queue_bytes=64 * _KIB)) as pair:
        tensors = [torch.full((size,), size % 251, dtype=torch.uint8) for size in (10, 5 * _MIB, 10, 12 * _MIB)]

        async def send_all() -> None:
            for index, tensor in enumerate(tensors):
                await pair.left.send(1, data(tensor, index=index))

        async with running(send_all()) as sending:
            for index, tensor in enumerate(tensors):
                message = await receive(pair.right)
                assert index_of(message) == index, f"message {index_of(message)} came, {index} was next"
                assert_same(message.tensors[0], tensor, f"message {index}")
            await soon(sending, "all messages are sent")


async def check_cancelled_send(make_pair: MakePair) -> None:
    """A cancelled send has sent the whole message or nothing; its memory is free; the channel stays in order."""
    async with make_pair(PairOptions(queue_bytes=8 * _MIB)) as pair:

        async def send_and_cancel() -> None:
            for index in range(24):
                tensor = torch.full((5 * _MIB,), index, dtype=torch.uint8)
                sending = asyncio.create_task(pair.left.send(1, data(tensor, index=index)))
                for _ in range(index % 12):
                    await asyncio.sleep(0)
                sending.cancel()
                with suppress(asyncio.CancelledError):
                    await sending
                tensor.fill_(255)
            await pair.left.send(1, data(index=1000))

        async with running(send_and_cancel()) as sending:
            last = -1
            while (message := await receive(pair.right, "the message after the cancelled ones arrives")).tensors:
                index, tensor = index_of(message), message.tensors[0]
                assert index > last, f"message {index} came after {last}"
                assert_same(tensor, torch.full((5 * _MIB,), index, dtype=torch.uint8), f"cancelled message {index}")
                last = index
            assert index_of(message) == 1000, "the last message is not the one sent last"
            await soon(sending, "the last send returns")


async def check_cancelled_send_that_waits(make_pair: MakePair) -> None:
    """A send that is cancelled while it waits for room has sent nothing."""
    async with make_pair(PairOptions(queue_bytes=_MIB)) as pair:
        tensor = torch.zeros(_MIB, dtype=torch.uint8)
        await soon(pair.left.send(1, data(tensor, index=0)), "one message fits")
        async with (
            running(pair.left.send(1, data(tensor, index=1))) as first,
            running(pair.left.send(1, data(tensor, index=2))) as second,
            running(pair.left.send(1, data(tensor, index=3))) as third,
        ):
            await stays_pending(first, "a second message fitted into a full queue")
            for task in (first, second):
                task.cancel()
                await asyncio.wait({task})
            seen = [index_of(await receive(pair.right)) for _ in range(2)]
            assert seen == [0, 3], f"received {seen}, must be [0, 3]"
            await soon(third, "the send that was not cancelled returns")


async def check_cancelled_receive(make_pair: MakePair) -> None:
    """Cancelling receive, at any moment, loses no message."""
    count = 60
    async with make_pair(PairOptions()) as pair:

        async def send_all() -> None:
            for index in range(count):
                await pair.left.send(1, data(torch.full((9,), index), index=index))
                for _ in range(index % 5):
                    await asyncio.sleep(0)

        async def receive_all() -> list[int]:
            seen: list[int] = []
            attempt = 0
            while len(seen) < count:
                attempt += 1
                receiving = asyncio.create_task(pair.right.receive())
                for _ in range(attempt % 7):
                    await asyncio.sleep(0)
                receiving.cancel()
                with suppress(asyncio.CancelledError):
                    seen.append(index_of(await receiving))
            return seen

        async with running(send_all()) as sending:
            seen = await soon(receive_all(), "all messages arrive although receive is cancelled again and again")
            assert seen == list(range(count)), f"received {seen}"
            await soon(sending, "all messages are sent")
