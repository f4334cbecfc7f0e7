"""Shm beside processes that are no peers: refused, logged, and nothing leaks."""

from __future__ import annotations

import array
import asyncio
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
import transports.shm_children as children
from fork_server import fork_server
from transports.children import NEW_NETWORK, NEW_PIDS, in_child
from transports.makers import contexts
from transports.shm_state import (
    MIB,
    descriptors,
    filled,
    frame,
    no_garbage,
    no_mappings,
    until,
)

from rrfp.errors import TransportError
from rrfp.testing.transport_checks.pair import data, index_of, receive, soon
from rrfp.transports.links.flow import HomeLoop
from rrfp.transports.shm.endpoint import Connected, Listener, connect
from rrfp.transports.shm.packets import BUFFER_BYTES, pack
from rrfp.transports.shm.transport import ShmTransport, address_key
from rrfp.transports.wire.codec import VERSION

__all__ = ["fork_server", "no_garbage", "no_mappings"]

NOBODY = 65534


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


async def test_a_flood_of_connections_leaves_turns_of_the_loop_to_others() -> None:
    accepted = 0

    def refuse(connected: Connected) -> None:
        nonlocal accepted
        accepted += 1
        raise TransportError("no peer")

    listener = Listener(0, HomeLoop(), refuse, lambda sentence: None)
    strangers = [stranger(listener.address) for _ in range(100)]
    try:
        in_turns = [0]
        while accepted < len(strangers):
            await asyncio.sleep(0)
            in_turns.append(accepted)
        assert max(after - before for before, after in pairwise(in_turns)) <= 32
    finally:
        listener.close()
        for sock in strangers:
            sock.close()


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
        with pytest.raises(
            TransportError,
            match=rf"which rank 0 or another program wrote to the store: .* belongs to user {NOBODY}, must be",
        ):
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
