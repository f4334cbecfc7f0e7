"""Shm beside processes that are no peers, and with datagrams that no RRFP sends: refused, named, and nothing leaks."""

from __future__ import annotations

import array
import asyncio
import fcntl
import logging
import os
import secrets
import socket
import struct
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import pytest
import torch
import transports.shm_children as children
from fork_server import fork_server
from transports.children import NEW_NETWORK, NEW_PIDS, in_child
from transports.makers import RUN_ID, contexts
from transports.shm_state import MIB, descriptors, filled, mappings, no_garbage, no_mappings, only, shm_pair, until

from rrfp.errors import FrameError, PeerLostError, TransportError
from rrfp.testing.transport_checks.pair import data, index_of, receive, soon
from rrfp.transports.base import Channel
from rrfp.transports.shm.datagrams import BUFFER_BYTES, Payload, pack
from rrfp.transports.shm.endpoint import connect
from rrfp.transports.shm.slots import HEAD_BYTES, size_class
from rrfp.transports.shm.transport import ShmTransport, address_key
from rrfp.transports.wire import VERSION

__all__ = ["fork_server", "no_garbage", "no_mappings"]

NOBODY = 65534


def frame(kind: str, *fields: Any, run_id: str = RUN_ID, sender: Any = 1, version: int = VERSION) -> bytes:
    header: bytes = msgpack.packb([version, run_id, 0, sender, kind, *fields])
    return b"".join(pack(header))


def stranger(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MIB)
    sock.setblocking(False)
    sock.connect(f"\0{address}")
    return sock


@asynccontextmanager
async def waiting() -> AsyncIterator[tuple[str, Callable[[], Any]]]:
    """Rank 0 listens; yields its address, and a function that starts rank 1 and passes a message on."""
    ends = [ShmTransport(context) for context in contexts()]
    starting = asyncio.create_task(ends[0].start())
    address = await ends[0].context.rendezvous.lookup(address_key(ends[0].context, 0), 5)

    async def finish() -> None:
        await ends[1].start()
        await soon(starting, "rank 0 starts")
        await ends[1].send(0, data(filled(MIB, 3), index=3))
        assert index_of(await receive(ends[0])) == 3

    try:
        yield address.decode(), finish
    finally:
        starting.cancel()
        await asyncio.wait({starting})
        for end in ends:
            end.abort()


GREETINGS = {
    "none": (b"", "it ended before its greeting"),
    "garbage": (b"GET / HTTP/1.1", "prefix"),
    "no msgpack": (b"".join(pack(b"\xc1")), "header"),
    "too large": (bytes(BUFFER_BYTES + 1), "prefix"),
    "another run": (frame("hello", "control", run_id="other"), "run_id"),
    "another version": (frame("hello", "control", version=VERSION + 1), "version"),
    "an unknown rank": (frame("hello", "control", sender=7), "sender"),
    "its own rank": (frame("hello", "control", sender=0), "sender"),
    "another kind": (frame("bye"), "kind"),
    "an unknown channel": (frame("hello", "sideways"), "hello.channel"),
    "no channel": (frame("hello"), "hello"),
}


@pytest.mark.parametrize("greeting", GREETINGS)
async def test_a_wrong_greeting_is_refused_and_logged(greeting: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also with descriptors, which are closed."""
    text, reason = GREETINGS[greeting]
    before = descriptors()
    async with waiting() as (address, finish):
        with stranger(address) as sock, caplog.at_level(logging.WARNING):
            opened = descriptors()
            read, write = os.pipe()
            sock.sendmsg([text], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [read, write, write]))])
            os.close(read)
            os.close(write)
            async with asyncio.timeout(5):
                assert await asyncio.get_running_loop().sock_recv(sock, 10) == b""
            assert descriptors() == opened  # this end of it is still open, the accepted one was not counted
            (logged,) = caplog.messages
            assert logged.startswith(f"a connection from process {os.getpid()} was refused: ")
            assert reason in logged
        await finish()
    await until(lambda: descriptors() == before)


async def test_strangers_that_never_greet_are_closed_once_all_peers_are_there() -> None:
    async with waiting() as (address, finish):
        silent = [stranger(address) for _ in range(20)]
        await finish()
        for sock in silent:
            assert await asyncio.get_running_loop().sock_recv(sock, 10) == b""
            sock.close()
        with pytest.raises(ConnectionRefusedError):
            connect(address)


async def test_a_second_connection_for_a_channel_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with waiting() as (address, _):
        with stranger(address) as first, stranger(address) as second:
            for sock in (first, second):
                sock.send(frame("hello", "forward"))
            async with asyncio.timeout(5):
                assert await asyncio.get_running_loop().sock_recv(second, 10) == b""
            assert "for channel forward is not expected" in caplog.text


async def test_processes_of_other_users_are_refused_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with waiting() as (address, finish):
        got = await asyncio.to_thread(in_child, children.connect_as, NOBODY, 0, address)
        assert got == b""
        assert f"belongs to user {NOBODY}, must be {os.geteuid()}" in caplog.text
        await finish()


async def test_an_address_that_another_user_took_is_refused() -> None:
    address, ready = secrets.token_hex(16), secrets.token_hex(16)
    context = contexts()[1]
    await context.rendezvous.publish(address_key(context, 0), address.encode())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(f"\0{ready}")
        listening.listen()
        listening.setblocking(False)
        squatter = asyncio.create_task(asyncio.to_thread(in_child, children.squat, NOBODY, address, ready))
        visiting = asyncio.create_task(asyncio.get_running_loop().sock_accept(listening))
        await asyncio.wait({squatter, visiting}, return_when=asyncio.FIRST_COMPLETED)
        if squatter.done():
            visiting.cancel()
            squatter.result()  # skips the test
        sock, _ = visiting.result()
        assert await asyncio.get_running_loop().sock_recv(sock, 10) == b"listening"
        sock.close()
        with pytest.raises(TransportError, match=rf"which rank 0 published: .* belongs to user {NOBODY}, must be"):
            await ShmTransport(context).start()
        assert await squatter == b""  # nothing was said to it


async def test_another_network_namespace_is_named_with_the_transport_that_crosses_it() -> None:
    async with waiting() as (address, _):
        assert "refused" in await asyncio.to_thread(in_child, children.connect_as, 0, NEW_NETWORK, address)
    context = contexts()[1]
    await context.rendezvous.publish(address_key(context, 0), b"of another namespace")
    with pytest.raises(TransportError, match=r"Connection refused; shm joins .* one host and network .*zmq"):
        await ShmTransport(context).start()


async def test_another_pid_namespace_is_named() -> None:
    async with waiting() as (address, finish):
        error = await asyncio.to_thread(in_child, children.connect_as, 0, NEW_PIDS, address)
        assert error == "the process at the other end is in another pid namespace; use transport zmq"
        await finish()


# Datagrams on a connection that was greeted.


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
        inject(left, pack(header(0), Payload(1, MIB, 9, ROOM)), *([] if descriptor is None else [descriptor]))
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
            inject(left, pack(header(sequence, size), Payload(1, MIB, slot.ident, ROOM)))
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
            inject(left, pack(header(sequence), Payload(1, MIB, 1, ROOM)))
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
