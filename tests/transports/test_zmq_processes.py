"""A peer process that is killed, stopped or gone is named in time, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import context, fork_server
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from transports import peer_process

from rrfp.errors import PeerLostError
from rrfp.testing.transport_checks.pair import data, index_of, soon
from rrfp.transports.base import Message, TransportContext
from rrfp.transports.rendezvous import StoreRendezvous
from rrfp.transports.zmq.transport import ZmqTransport, endpoint_key

__all__ = ["fork_server"]

RUN_ID = "processes"

#: Twice the patience that the ranks here have, in seconds.
SILENT_LIMIT_S = 3.0


@pytest.fixture
def store() -> Any:
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20), wait_for_workers=False)


class Peer:
    """The rank in a process of its own.

    Args:
        role: what it does, see `peer_process`.
        variables: torchrun's.
    """

    def __init__(self, role: str, variables: dict[str, str]) -> None:
        forked = context()
        self.line: Connection
        self.line, there = forked.Pipe()
        self.process = forked.Process(target=peer_process.run, args=(role, variables, there))
        self.process.start()
        there.close()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def hear(self) -> Any:
        """What it says next."""
        assert self.line.poll(SILENT_LIMIT_S + 5)
        return self.line.recv()

    def end(self) -> None:
        """Leave nothing behind."""
        self.process.kill()
        self.process.join()
        self.line.close()


@asynccontextmanager
async def connected(store: Any, role: str) -> AsyncIterator[tuple[ZmqTransport, Peer]]:
    """A transport here and one in a process of the given role."""
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": RUN_ID,
        "RANK": "1",
        "WORLD_SIZE": "2",
    }
    peer = await asyncio.to_thread(Peer, role, variables)
    rendezvous = StoreRendezvous(store, run_id=RUN_ID)
    transport = ZmqTransport(TransportContext(0, (1,), RUN_ID, rendezvous, connect_timeout_s=30, patience_s=1.5))
    try:
        await transport.start()
        yield transport, peer
    finally:
        transport.abort()
        await asyncio.to_thread(peer.end)


async def next_loss(transport: ZmqTransport) -> tuple[PeerLostError, list[Message]]:
    """Receive until a peer is lost."""
    messages = []
    while True:
        try:
            messages.append(await soon(transport.receive(), "the loss is reported"))
        except PeerLostError as error:
            return error, messages


def abstract_sockets() -> str:
    return Path("/proc/net/unix").read_text()


async def test_killed_peer_is_named_at_once(store: Any) -> None:
    async with connected(store, "echo") as (transport, peer):
        address = (
            (await transport.context.rendezvous.lookup(endpoint_key(transport.context, 1), 1.0))
            .decode()
            .removeprefix("ipc://")
        )
        assert address in abstract_sockets()
        await transport.send(1, data(torch.ones(3)))
        assert index_of(await soon(transport.receive(), "the echo comes")) == 0
        peer.signal(signal.SIGKILL)
        start_s = time.monotonic()
        error, _ = await next_loss(transport)
        assert time.monotonic() - start_s < 1.0
        assert error.peer == 1
        with pytest.raises(PeerLostError):
            await transport.send(1, data(torch.ones(3)))
        await transport.close()
        await asyncio.to_thread(peer.process.join)
        assert address not in abstract_sockets()


async def test_peer_killed_while_it_sends_delivered_whole_messages(store: Any) -> None:
    """It dies between two pieces of a tensor: what came whole is received, the rest is no frame error."""
    async with connected(store, "stream") as (transport, peer):
        for index in range(5):
            assert index_of(await soon(transport.receive(), "a tensor comes")) == index
        peer.signal(signal.SIGKILL)
        _, messages = await next_loss(transport)
        for number, message in enumerate(messages, start=5):
            assert index_of(message) == number
            tensor = message.tensors[0]
            assert tensor is not None
            assert bool((tensor == number % 251).all())
        assert transport.statistics().dropped_frames == 0


async def test_stopped_peer_is_named_in_time_and_learns_of_it(store: Any) -> None:
    """SIGSTOP: connections stay open but silent. When it wakes it sees that it was given up."""
    async with connected(store, "echo") as (transport, peer):
        peer.signal(signal.SIGSTOP)
        start_s = time.monotonic()
        error, _ = await next_loss(transport)
        assert time.monotonic() - start_s < SILENT_LIMIT_S
        assert error.peer == 1
        peer.signal(signal.SIGCONT)
        assert await asyncio.to_thread(peer.hear) == "lost"


async def test_send_that_waits_for_a_stopped_peer_ends(store: Any) -> None:
    """The operating system's buffers are full, so nothing can be written: the loss is noticed by what does not come."""
    async with connected(store, "echo") as (transport, peer):
        peer.signal(signal.SIGSTOP)
        start_s = time.monotonic()
        with pytest.raises(PeerLostError):
            await soon(transport.send(1, data(torch.zeros(64 << 20, dtype=torch.uint8))), "the send ends")
        assert time.monotonic() - start_s < SILENT_LIMIT_S
        await soon(transport.close(), "close returns")


async def test_peer_that_exits_without_closing_is_lost(store: Any) -> None:
    async with connected(store, "exit") as (transport, _):
        await transport.send(1, data(torch.ones(3)))
        error, messages = await next_loss(transport)
        assert (error.peer, messages) == (1, [])
