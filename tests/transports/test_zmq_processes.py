"""A peer process that is killed, stopped or gone is named in time, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rrfp.errors import PeerLostError
from rrfp.testing.transport_checks.pair import data, index_of, soon
from rrfp.transports.base import Message, TransportContext
from rrfp.transports.rendezvous import StoreRendezvous
from rrfp.transports.zmq.transport import ZmqTransport, endpoint_key

RUN_ID = "processes"
SCRIPT = Path(__file__).with_name("peer_process.py")

#: Twice the patience that the ranks here have, in seconds.
SILENT_LIMIT_S = 3.0


@pytest.fixture
def store() -> Any:
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20), wait_for_workers=False)


@asynccontextmanager
async def connected(store: Any, role: str) -> AsyncIterator[tuple[ZmqTransport, subprocess.Popen[bytes]]]:
    """A transport here and one in a process of the given role."""
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": RUN_ID,
        "RANK": "1",
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(  # noqa: ASYNC220 - a fork is short
        [sys.executable, str(SCRIPT), role], env=os.environ | environment, stdout=subprocess.PIPE
    )
    rendezvous = StoreRendezvous(store, run_id=RUN_ID)
    transport = ZmqTransport(TransportContext(0, (1,), RUN_ID, rendezvous, connect_timeout_s=30, patience_s=1.5))
    try:
        await transport.start()
        yield transport, process
    finally:
        transport.abort()
        process.kill()
        await asyncio.to_thread(process.communicate)


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
    async with connected(store, "echo") as (transport, process):
        address = (
            (await transport.context.rendezvous.lookup(endpoint_key(transport.context, 1), 1.0))
            .decode()
            .removeprefix("ipc://")
        )
        assert address in abstract_sockets()
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
        await asyncio.to_thread(process.wait)
        assert address not in abstract_sockets()


async def test_peer_killed_while_it_sends_delivered_whole_messages(store: Any) -> None:
    """It dies between two pieces of a tensor: what came whole is received, the rest is no frame error."""
    async with connected(store, "stream") as (transport, process):
        for index in range(5):
            assert index_of(await soon(transport.receive(), "a tensor comes")) == index
        process.send_signal(signal.SIGKILL)
        _, messages = await next_loss(transport)
        for number, message in enumerate(messages, start=5):
            assert index_of(message) == number
            tensor = message.tensors[0]
            assert tensor is not None
            assert bool((tensor == number % 251).all())
        assert transport.statistics().dropped_frames == 0


async def test_stopped_peer_is_named_in_time_and_learns_of_it(store: Any) -> None:
    """SIGSTOP: connections stay open but silent. When it wakes it sees that it was given up."""
    async with connected(store, "echo") as (transport, process):
        process.send_signal(signal.SIGSTOP)
        start_s = time.monotonic()
        error, _ = await next_loss(transport)
        assert time.monotonic() - start_s < SILENT_LIMIT_S
        assert error.peer == 1
        process.send_signal(signal.SIGCONT)
        output, _ = await asyncio.to_thread(process.communicate, timeout=SILENT_LIMIT_S + 5)
        assert output == b"lost\n"


async def test_send_that_waits_for_a_stopped_peer_ends(store: Any) -> None:
    """The operating system's buffers are full, so nothing can be written: the loss is noticed by what does not come."""
    async with connected(store, "echo") as (transport, process):
        process.send_signal(signal.SIGSTOP)
        start_s = time.monotonic()
        with pytest.raises(PeerLostError):
            await soon(transport.send(1, data(torch.zeros(64 << 20, dtype=torch.uint8))), "the send ends")
        assert time.monotonic() - start_s < SILENT_LIMIT_S
        await soon(transport.close(), "close returns")


async def test_peer_that_exits_without_closing_is_lost(store: Any) -> None:
    async with connected(store, "exit") as (transport, _):
        error, messages = await next_loss(transport)
        assert (error.peer, messages) == (1, [])
