"""A peer process that stops or goes away is named in time; one that pauses or closes is not lost."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest
import torch
from batches import long
from fork_server import fork_server
from transports.connected_peer import SILENT_LIMIT_S, connected, next_loss
from transports.peer_process import PATIENCE_S, STREAMED_BYTES, send_without_end

from rrfp.errors import PeerLostError
from rrfp.testing.transport_checks.pair import data, index_of, soon

__all__ = ["fork_server"]

all_of_them = pytest.mark.parametrize("name", ["shm", "zmq", "collective", "cuda_ipc"])


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@all_of_them
async def test_stopped_peer_is_named_in_time_and_learns_of_it(store: str, name: str) -> None:
    """SIGSTOP: connections stay open but silent. When it wakes it sees that it was given up."""
    async with connected(store, name, "echo") as (transport, process):
        await transport.send(1, data(torch.ones(3)))
        await soon(transport.receive(), "the echo comes")  # so its own start has ended too
        process.send_signal(signal.SIGSTOP)
        start_s = time.monotonic()
        error, _ = await next_loss(transport)
        assert time.monotonic() - start_s < SILENT_LIMIT_S
        assert error.peer == 1
        process.send_signal(signal.SIGCONT)
        assert await process.hear() == "lost"


@all_of_them
async def test_send_that_waits_for_a_stopped_peer_ends(store: str, name: str) -> None:
    """The window or the operating system's buffers are full: the loss is noticed by what does not come."""
    async with connected(store, name, "echo") as (transport, process):
        process.send_signal(signal.SIGSTOP)
        start_s = time.monotonic()
        with pytest.raises(PeerLostError):
            await soon(send_without_end(transport, 64 << 20), "the send ends")
        assert time.monotonic() - start_s < SILENT_LIMIT_S
        await soon(transport.close(), "close returns")


async def test_a_peer_that_pauses_goes_on(store: str) -> None:
    async with connected(store, "shm", "echo") as (transport, process):
        process.send_signal(signal.SIGSTOP)
        await transport.send(1, data(torch.ones(3), index=5))
        await asyncio.sleep(PATIENCE_S / 2)
        process.send_signal(signal.SIGCONT)
        assert index_of(await soon(transport.receive(), "the echo comes")) == 5


@all_of_them
async def test_peer_that_exits_without_closing_is_lost(store: str, name: str) -> None:
    async with connected(store, name, "exit") as (transport, _):
        await transport.send(1, data())
        error, messages = await next_loss(transport)
        assert (error.peer, messages) == (1, [])


@pytest.mark.parametrize("name", ["shm", long("zmq"), "collective", "cuda_ipc"])
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
