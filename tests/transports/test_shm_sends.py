"""Sends over shm that are cancelled, aborted or closed over, and messages at the edges of what a datagram carries."""

from __future__ import annotations

import asyncio
import errno
import socket

import pytest
import torch
from transports.makers import contexts
from transports.shm_state import (
    MIB,
    copies_held,
    descriptors,
    filled,
    mappings,
    no_garbage,
    no_mappings,
    only,
    shm_pair,
    until,
)

from rrfp.errors import PeerLostError, TransportClosedError, TransportError
from rrfp.testing.transport_checks.pair import data, index_of, note, receive, soon, stays_pending
from rrfp.transports.base import Channel
from rrfp.transports.shm.transport import ShmTransport, address_key
from rrfp.transports.wire.codec import MAX_HEADER_BYTES

__all__ = ["no_garbage", "no_mappings"]

#: Copied in the helper thread.
LARGE = 3 * MIB

pytestmark = pytest.mark.allow_blocking(reason="the tests wait for the helper thread to be held")


async def test_a_message_has_as_many_tensors_as_its_header_names() -> None:
    """The kernel takes 1024 parts of a datagram."""
    async with shm_pair() as (left, right):
        for count in (1023, 1024, 3000):
            await soon(left.send(1, data(*map(torch.tensor, range(count)))), "the send returns")
            message = await receive(right)
            assert [int(tensor) for tensor in message.tensors if tensor is not None] == list(range(count))
        large = [torch.full((700,), index % 100, dtype=torch.uint8) for index in range(2500)]
        await left.send(1, data(*large))  # in a slot
        message = await receive(right)
        assert all(torch.equal(got, sent) for got, sent in zip(message.tensors, large, strict=True) if got is not None)


async def test_the_largest_header_beside_the_most_inline_bytes() -> None:
    async with shm_pair() as (left, right):
        spare = MAX_HEADER_BYTES - 200
        await left.send(1, data(filled(64 << 10, 7), channel=Channel.BACKWARD, text="x" * spare))
        message = await receive(right)
        assert torch.equal(only(message), filled(64 << 10, 7))
        assert message.body == {"text": "x" * spare}


async def test_a_slot_of_a_cancelled_copy_is_lent_again_once_the_copy_has_ended() -> None:
    async with shm_pair() as (left, right):
        await left.send(1, data(filled(LARGE, 1)))
        assert torch.equal(only(await receive(right)), filled(LARGE, 1))  # and is dropped: slot 1 is free
        pool = left._links[1].outlets[Channel.FORWARD].pool
        await until(lambda: len(pool.free_slots()) == 1)
        with copies_held(left) as go:
            cancelled = asyncio.create_task(left.send(1, data(filled(LARGE, 2))))
            await stays_pending(cancelled, "the copy is held")
            cancelled.cancel()
            await asyncio.wait({cancelled})
            assert cancelled.cancelled()
            assert pool.free_slots() == []
            following = asyncio.create_task(left.send(1, data(filled(LARGE, 3), index=3)))
            await stays_pending(following, "the copy is held")
            go()
        message = await receive(right)
        assert index_of(message) == 3
        assert torch.equal(only(message), filled(LARGE, 3))
        await following
        await until(lambda: len(pool.free_slots()) == 1)  # the message above still has the other one
        assert left.statistics().queued_bytes in (0, LARGE)  # of the window nothing is lost
        await until(lambda: left.statistics().queued_bytes == 0)


async def test_a_cancelled_copy_into_a_new_slot_leaves_none() -> None:
    before = descriptors(), len(mappings())
    async with shm_pair() as (left, right):
        with copies_held(left):
            sending = asyncio.create_task(left.send(1, data(filled(LARGE, 2))))
            await stays_pending(sending, "the copy is held")
            sending.cancel()
            await asyncio.wait({sending})
        del sending
        await until(lambda: len(mappings()) == before[1])
        await left.send(1, data(filled(10, 4), index=4))
        assert index_of(await receive(right)) == 4
    await until(lambda: descriptors() == before[0])


async def test_an_abort_in_the_middle_of_a_copy_leaves_nothing() -> None:
    """The memory under the copy stays mapped until the copy has ended; the descriptor is closed once."""
    before = descriptors(), len(mappings())
    async with shm_pair() as (left, right):
        await left.send(1, data(filled(LARGE, 1)))
        kept = await receive(right)
        with copies_held(left):
            sends = [asyncio.create_task(left.send(1, data(filled(LARGE + MIB * n, n)))) for n in (0, 1)]
            await stays_pending(sends[0], "the copy is held")
            left.abort()
            await stays_pending(sends[0], "the caller's memory is read until the copy has ended")
        for result in await asyncio.gather(*sends, return_exceptions=True):
            assert isinstance(result, TransportClosedError)
        with pytest.raises(PeerLostError):
            await right.receive()
        del sends, result
        await until(lambda: len(mappings()) == before[1] + 1)  # the one of the message that is kept
        assert torch.equal(only(kept), filled(LARGE, 1))
        del kept
        await until(lambda: len(mappings()) == before[1])
    await until(lambda: descriptors() == before[0])


async def test_close_delivers_the_messages_whose_copies_are_under_way() -> None:
    async with shm_pair() as (left, right):
        with copies_held(left) as go:
            sends = [
                asyncio.create_task(left.send(1, data(filled(LARGE, index), index=index, channel=channel)))
                for index, channel in enumerate((Channel.FORWARD, Channel.BACKWARD))
            ]
            await stays_pending(sends[0], "the copy is held")
            closing = asyncio.create_task(left.close())
            await stays_pending(closing, "close waits for the copies")
            go()
            await soon(closing, "close returns")
        assert [task.exception() for task in sends] == [None, None]
        messages = sorted([await receive(right), await receive(right)], key=index_of)
        assert [torch.equal(only(message), filled(LARGE, n)) for n, message in enumerate(messages)] == [True, True]
        with pytest.raises(PeerLostError, match="closed its end"):
            await right.send(0, note())


async def test_a_peer_that_is_still_leaving_is_sent_to_until_it_has_left_on_every_channel() -> None:
    async with shm_pair() as (left, right):
        last = list(left._links[1].outlets)[-1]  # where it says bye last
        with copies_held(left) as go:
            sending = asyncio.create_task(left.send(1, data(filled(LARGE, 1), channel=last)))
            await stays_pending(sending, "the copy is held")
            closing = asyncio.create_task(left.close())
            await stays_pending(closing, "close waits for the copy")
            await soon(right.send(0, note()), "it has left on two channels of three")
            go()
            await soon(closing, "close returns")
        assert torch.equal(only(await receive(right)), filled(LARGE, 1))
        with pytest.raises(PeerLostError, match="closed its end"):
            await right.send(0, note())


async def test_a_start_that_is_aborted_while_the_peer_accepts_nothing_says_that_it_was_closed() -> None:
    backlog = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    backlog.bind("\0rrfp-test-full")
    backlog.listen(0)
    fillers: list[socket.socket] = []
    while not fillers or fillers[-1].connect_ex("\0rrfp-test-full") != errno.EAGAIN:
        fillers.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        fillers[-1].setblocking(False)
    context = contexts(connect_timeout_s=0.5)[1]
    await context.rendezvous.publish(address_key(context, 0), b"rrfp-test-full")
    try:
        with pytest.raises(TransportError, match=r"rank 0 accepted no connection within 0\.5 s"):
            await ShmTransport(context).start()
        end = ShmTransport(contexts(rendezvous=context.rendezvous)[1])
        starting = asyncio.create_task(end.start())
        await stays_pending(starting, "nobody accepts")
        end.abort()
        with pytest.raises(TransportClosedError):
            await starting
    finally:
        for sock in (backlog, *fillers):
            sock.close()
