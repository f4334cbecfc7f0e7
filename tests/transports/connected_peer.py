"""A transport here that is connected to a rank in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

from fork_server import context
from torch.distributed import FileStore  # type: ignore[attr-defined]
from transports.peer_process import PATIENCE_S, RUN_ID, copies_for, make_transport, serve

from rrfp.errors import PeerLostError
from rrfp.lab.device_double import DoubleDevice
from rrfp.testing.transport_checks.pair import soon
from rrfp.transports.base import Message, Transport, TransportContext
from rrfp.transports.rendezvous import StoreRendezvous

#: Twice the patience that the ranks here have, in seconds.
SILENT_LIMIT_S = 2 * PATIENCE_S


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
async def connected(store: str, name: str, role: str, own_role: str = "") -> AsyncIterator[tuple[Transport, Peer]]:
    """A transport here and one in a process of the given role."""
    here, there = context().Pipe(duplex=False)
    process = context().Process(target=serve, args=(name, role, store, there))
    await asyncio.to_thread(process.start)
    there.close()
    rendezvous = StoreRendezvous(FileStore(store, 2), run_id=RUN_ID)
    copies = copies_for(name, own_role)
    own = TransportContext(
        0,
        (1,),
        RUN_ID,
        rendezvous,
        connect_timeout_s=30,
        patience_s=PATIENCE_S,
        copies=copies,
    )
    transport = make_transport(name, own)
    try:
        await transport.start()
        yield transport, Peer(process, here)
    finally:
        transport.abort()
        if copies is not None and isinstance(copies._device, DoubleDevice):
            await asyncio.to_thread(copies._device.close)
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
