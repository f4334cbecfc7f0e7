"""Shm beside datagrams that no RRFP sends, on a connection that stands: one error each, and nothing leaks."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
import tempfile
from collections.abc import Callable

import msgpack
import pytest
import torch
from transports.makers import RUN_ID
from transports.shm_state import (
    MIB,
    descriptors,
    filled,
    frame,
    mappings,
    no_garbage,
    no_mappings,
    only,
    shm_pair,
    until,
)

from rrfp.errors import FrameError, PeerLostError, TransportError
from rrfp.testing.transport_checks.pair import data, index_of, receive, soon
from rrfp.transports.base import Channel
from rrfp.transports.shm.packets import BUFFER_BYTES, DatagramBody, pack
from rrfp.transports.shm.slots import HEAD_BYTES, size_class
from rrfp.transports.shm.transport import ShmTransport
from rrfp.transports.wire.codec import VERSION

__all__ = ["no_garbage", "no_mappings"]


def memfd(num_bytes: int, seals: int) -> int:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


ALL_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
ROOM = size_class(MIB)


def a_pipe() -> int:
    read, write = os.pipe()
    os.close(write)
    return read


def a_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(HEAD_BYTES + ROOM)
        return os.dup(file.fileno())


def header(sequence: int, size: int = MIB) -> bytes:
    packed: bytes = msgpack.packb(
        [VERSION, RUN_ID, 0, 0, "output", "forward", sequence, None, ["F", 0, 0], [["uint8", [size], False]], {}]
    )
    return packed


#: Descriptor, and what the error names.
BAD_SLOTS: dict[str, tuple[Callable[[], int | None], str]] = {
    "a pipe": (a_pipe, "has 0 bytes"),
    "a file": (a_file, "is no memfd|is not sealed"),
    "too small": (lambda: memfd(HEAD_BYTES + ROOM - 4096, ALL_SEALS), "must have"),
    "not sealed": (lambda: memfd(HEAD_BYTES + ROOM, 0), "could shrink"),
    "may grow": (lambda: memfd(HEAD_BYTES + ROOM, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL), "is not sealed"),
    "no descriptor": (lambda: None, "which is unknown here"),
}


def inject(left: ShmTransport, parts: list[bytes | memoryview], *rights: int) -> None:
    """Send a datagram past the sender, with copies of descriptors."""
    left._links[1]._connections[Channel.FORWARD].packets._sock.sendmsg(
        parts, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", rights))] if rights else []
    )
    for descriptor in rights:
        os.close(descriptor)


@pytest.mark.parametrize("slot", BAD_SLOTS)
async def test_a_slot_that_is_none_is_refused(slot: str) -> None:
    make, reason = BAD_SLOTS[slot]
    async with shm_pair() as (left, right):
        opened, mapped = descriptors(), len(mappings())
        descriptor = make()
        inject(left, pack(header(0), DatagramBody(1, MIB, 9, ROOM)), *([] if descriptor is None else [descriptor]))
        with pytest.raises(FrameError, match=reason) as caught:
            await right.receive()
        assert (caught.value.peer, caught.value.field) == (0, "slot")
        assert (descriptors(), len(mappings())) == (opened, mapped)
        await left.send(1, data(filled(MIB, 4), index=4))
        assert index_of(await receive(right)) == 4


async def test_a_good_slot_of_a_bad_message_is_free_again() -> None:
    async with shm_pair() as (left, right):
        await left.send(1, data(filled(MIB, 1)))
        only(await receive(right))
        pool = left._links[1].outlets[Channel.FORWARD].pool
        for sequence, size, field in ((7, MIB, "sequence"), (1, MIB + 1, "frames")):
            await until(lambda: len(pool.free_slots()) == 1)
            slot = pool.acquire(MIB)
            inject(left, pack(header(sequence, size), DatagramBody(1, MIB, slot.ident, ROOM)))
            with pytest.raises(FrameError) as caught:
                await right.receive()
            assert caught.value.field == field
            assert slot.is_free


async def test_a_slot_that_tensors_use_is_neither_filled_nor_freed_by_another_message() -> None:
    async with shm_pair() as (left, right):
        await left.send(1, data(filled(MIB, 1)))
        held = only(await receive(right))
        pool = left._links[1].outlets[Channel.FORWARD].pool
        for sequence, field in ((1, "slot"), (9, "sequence")):
            inject(left, pack(header(sequence), DatagramBody(1, MIB, 1, ROOM)))
            with pytest.raises(FrameError) as caught:
                await right.receive()
            assert caught.value.field == field
            assert pool.free_slots() == []
        await left.send(1, data(filled(MIB, 2)))
        assert torch.equal(only(await receive(right)), filled(MIB, 2))
        assert torch.equal(held, filled(MIB, 1))


GARBAGE: dict[str, bytes] = {
    "short": b"x",
    "a prefix alone": struct.pack("=IIQQQ", 5, 0, 0, 0, 0),
    "more than announced": struct.pack("=IIQQQ", 0, 0, 0, 0, 0) + b"more",
    "a huge slot": struct.pack("=IIQQQ", 0, 1, 1 << 63, 1 << 63, (1 << 64) - 1),
    "too large": bytes(BUFFER_BYTES + 100),
    "a wrong credit": frame("credit", "forward", -5, 1, sender=0),
    "a question for no channel": frame("want", "sideways", sender=0),
    "a drop of nothing": frame("drop", "all", sender=0),
    "a loss of nothing": frame("lost", 0, sender=0),
    "another rank's": frame("bye", sender=1),
}


@pytest.mark.parametrize("count", [0, 1, 3, 7], ids="{} descriptors".format)
@pytest.mark.parametrize("garbage", GARBAGE)
async def test_garbage_is_one_error_and_descriptors_with_it_are_closed(garbage: str, count: int) -> None:
    async with shm_pair() as (left, right):
        opened, mapped = descriptors(), len(mappings())
        rights = [memfd(HEAD_BYTES + ROOM, ALL_SEALS) for _ in range(count)]
        inject(left, [GARBAGE[garbage]], *rights)
        with pytest.raises(TransportError):
            await right.receive()
        assert descriptors() == opened
        assert len(mappings()) <= mapped  # fewer: a test before may have left garbage
        await left.send(1, data(filled(MIB, 4), index=4))
        assert index_of(await receive(right)) == 4
        assert right.statistics().dropped_frames == 1


async def test_an_empty_datagram_ends_the_connection() -> None:
    """It reads like the end, and no peer sends it."""
    async with shm_pair() as (left, right):
        inject(left, [b""])
        with pytest.raises(PeerLostError):
            await soon(right.receive(), "the end is reported")
