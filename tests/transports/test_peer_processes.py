"""A peer process that is killed, stopped or gone is named in time, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import long
from fork_server import context, fork_server
from torch.distributed import FileStore  # type: ignore[attr-defined]
from transports.peer_process import LARGE_BYTES, PATIENCE_S, RUN_ID, STREAMED_BYTES, send_without_end, serve
from transports.shm_state import descriptors, mappings, until

from rrfp.errors import PeerLostError
from rrfp.testing.transport_checks.pair import data, index_of, soon
from rrfp.transports.base import Message, Transport, TransportContext
from rrfp.transports.registry import create_transport
from rrfp.transports.rendezvous import StoreRendezvous

__all__ = ["fork_server"]

#: Twice the patience that the ranks here have, in seconds.
SILENT_LIMIT_S = 2 * PATIENCE_S

both = pytest.mark.parametrize("name", ["shm", "zmq"])
all_three = pytest.mark.parametrize("name", ["shm", "zmq", "collective"])


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store")


class Peer:
    """The process of the other rank."""

    def __init__(self, process: Any, connection: Connection) -> None:
        self._process = process
        self._connection = connection

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    async def wait(self) -> None:
        await asyncio.to_thread(self._process.join, 10)

    async def hear(self) -> object:
        """What it reports next."""
        assert await asyncio.to_thread(self._connection.poll, SILENT_LIMIT_S + 5), "the peer reports nothing"
        return await asyncio.to_thread(self._connection.recv)


@asynccontextmanager
async def connected(store: str, name: str, role: str) -> AsyncIterator[tuple[Transport, Peer]]:
    """A transport here and one in a process of the given role."""
    here, there = context().Pipe(duplex=False)
    process = context().Process(target=serve, args=(name, role, store, there))
    await asyncio.to_thread(process.start)
    there.close()
    rendezvous = StoreRendezvous(FileStore(store, 2), run_id=RUN_ID)
    own = TransportContext(0, (1,), RUN_ID, rendezvous, connect_timeout_s=30, patience_s=PATIENCE_S)
    transport = create_transport(name, own)
    try:
        await transport.start()
        yield transport, Peer(process, here)
    finally:
        transport.abort()
        process.kill()
        await asyncio.to_thread(process.join)
        process.close()
        here.close()


async def next_loss(transport: Transport) -> tuple[PeerLostError, list[Message]]:
    """Receive until a peer is lost."""
    messages = []
    while True:
        try:
            messages.append(await soon(transport.receive(), "the loss is reported"))
        except PeerLostError as error:
            return error, messages


def assert_streamed(messages: Sequence[Message], first: int) -> None:
    """They are those of role "stream" or "large" from ``first`` on, in every byte."""
    for number, message in enumerate(messages, start=first):
        assert index_of(message) == number
        tensor = message.tensors[0]
        assert tensor is not None
        assert bool((tensor == number % 251).all())


def abstract_sockets() -> str:
    return Path("/proc/net/unix").read_text()


async def addresses(transport: Transport, name: str) -> list[str]:
    """Where the ranks listen, or did."""
    return [
        (await transport.context.rendezvous.lookup(f"{name}/{RUN_ID}/0/{rank}", 1.0)).decode().removeprefix("ipc://")
        for rank in (0, 1)
    ]


@both
async def test_killed_peer_is_named_at_once(store: str, name: str) -> None:
    shared = set(os.listdir("/dev/shm"))
    async with connected(store, name, "echo") as (transport, process):
        listening = [address.removeprefix("@") for address in await addresses(transport, name)]
        assert listening[1] in abstract_sockets() or name == "shm"  # which listens only until all have connected
        await transport.send(1, data(torch.ones(3)))
        assert index_of(await soon(transport.receive(), "the echo comes")) == 0
        process.send_signal(signal.SIGKILL)
        start_s = time.monotonic()
        error, _ = await next_loss(transport)
        assert time.monotonic() - start_s < 1.0
        assert error.peer == 1
        with pytest.raises(PeerLostError):
            await transport.send(1, data(torch.ones(3)))
        await transport.close()
        await process.wait()
        assert not any(address in abstract_sockets() for address in listening)
    assert set(os.listdir("/dev/shm")) <= shared


@pytest.mark.parametrize(
    ("name", "role"),
    [("shm", "stream"), ("shm", "large"), ("zmq", "stream"), long("zmq", "large"), ("collective", "large")],
)
async def test_peer_killed_while_it_sends_delivered_whole_messages(store: str, name: str, role: str) -> None:
    """It dies in the middle of a tensor: what came whole is received, the rest is no frame error."""
    before, mapped = descriptors(), len(mappings())
    async with connected(store, name, role) as (transport, process):
        held = [await soon(transport.receive(), "a tensor comes") for _ in range(3)]
        process.send_signal(signal.SIGKILL)
        _, messages = await next_loss(transport)
        await process.wait()
        assert len(messages) * (STREAMED_BYTES if role == "stream" else LARGE_BYTES) <= 64 << 20
        assert_streamed([*held, *messages], first=0)  # also long after its death
        assert transport.statistics().dropped_frames == 0
    held.clear()
    messages.clear()
    if name == "shm":
        await until(lambda: len(mappings()) == mapped)
        await until(lambda: descriptors() <= before)


async def test_a_peer_that_holds_this_rank_s_tensors_may_be_killed(store: str) -> None:
    """Its slots are this rank's alone then, and end with the link."""
    mapped = len(mappings())
    async with connected(store, "shm", "hold") as (transport, process):
        for index in range(4):
            await transport.send(1, data(torch.full((1 << 20,), index, dtype=torch.uint8), index=index))
            assert index_of(await soon(transport.receive(), "the echo comes")) == index
        process.send_signal(signal.SIGKILL)
        await next_loss(transport)
        await until(lambda: len(mappings()) == mapped)


async def test_a_killed_peer_whose_child_keeps_its_sockets_is_named_at_once(store: str) -> None:
    """No socket ends, but the process does."""
    async with connected(store, "shm", "fork") as (transport, process):
        child = await process.hear()
        assert isinstance(child, int)
        try:
            process.send_signal(signal.SIGKILL)
            start_s = time.monotonic()
            error, _ = await next_loss(transport)
            assert time.monotonic() - start_s < 1.0
            assert (error.peer, error.reason) == (1, "its process ended")
        finally:
            os.kill(child, signal.SIGKILL)


@all_three
async def test_stopped_peer_is_named_in_time_and_learns_of_it(store: str, name: str) -> None:
    """SIGSTOP: connections stay open but silent. When it wakes it sees that it was given up."""
    async with connected(store, name, "echo") as (transport, process):
        process.send_signal(signal.SIGSTOP)
        start_s = time.monotonic()
        error, _ = await next_loss(transport)
        assert time.monotonic() - start_s < SILENT_LIMIT_S
        assert error.peer == 1
        process.send_signal(signal.SIGCONT)
        assert await process.hear() == "lost"


@all_three
async def test_send_that_waits_for_a_stopped_peer_ends(store: str, name: str) -> None:
    """The window or the operating system's buffers are full: the loss is noticed by what does not come."""
    async with connected(store, name, "echo") as (transport, process):
        process.send_signal(signal.SIGSTOP)
        start_s = time.monotonic()
        with pytest.raises(PeerLostError):
            await soon(send_without_end(transport, 64 << 20), "the send ends")
        assert time.monotonic() - start_s < SILENT_LIMIT_S
        await soon(transport.close(), "close returns")


@all_three
async def test_a_send_that_waits_while_its_peer_is_killed_ends(store: str, name: str) -> None:
    """A stopped peer reads nothing, so the send waits; SIGKILL ends it all the same."""
    async with connected(store, name, "echo") as (transport, process):
        await transport.send(1, data(torch.ones(3)))
        await soon(transport.receive(), "the echo comes")
        process.send_signal(signal.SIGSTOP)
        sending = asyncio.create_task(send_without_end(transport, 64 << 20))
        done, _ = await asyncio.wait({sending}, timeout=0.2)
        assert not done
        process.send_signal(signal.SIGKILL)
        start_s = time.monotonic()
        with pytest.raises(PeerLostError):
            await soon(sending, "the send ends")
        error, _ = await next_loss(transport)
        assert time.monotonic() - start_s < 1.0
        assert error.peer == 1


async def test_a_peer_that_pauses_goes_on(store: str) -> None:
    async with connected(store, "shm", "echo") as (transport, process):
        process.send_signal(signal.SIGSTOP)
        await transport.send(1, data(torch.ones(3), index=5))
        await asyncio.sleep(PATIENCE_S / 2)
        process.send_signal(signal.SIGCONT)
        assert index_of(await soon(transport.receive(), "the echo comes")) == 5


@all_three
async def test_peer_that_exits_without_closing_is_lost(store: str, name: str) -> None:
    async with connected(store, name, "exit") as (transport, _):
        await transport.send(1, data())
        error, messages = await next_loss(transport)
        assert (error.peer, messages) == (1, [])


@pytest.mark.parametrize("name", ["shm", long("zmq"), "collective"])
async def test_peer_that_closes_in_order_delivers_all_and_is_not_lost(store: str, name: str) -> None:
    async with connected(store, name, "close") as (transport, process):
        message = await soon(transport.receive(), "its last message comes")
        assert message.num_bytes == STREAMED_BYTES
        await process.wait()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await transport.receive()
        with pytest.raises(PeerLostError, match="it closed its end"):
            await transport.send(1, data())
