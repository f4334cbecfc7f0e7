"""A rank in a process of its own, that tests kill, stop and cut off. Stage 1; its peer is stage 0, in the test."""

from __future__ import annotations

import asyncio
import os
import signal
from multiprocessing.connection import Connection

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]
from transports.gloo_backend import over_gloo

from rrfp.compute.lanes.stream import StreamLane
from rrfp.devices.copies import DeviceCopies, copies_of
from rrfp.errors import PeerLostError
from rrfp.lab.device_double import DoubleDevice
from rrfp.testing.transport_checks.pair import data
from rrfp.transports.base import Message, Transport, TransportContext
from rrfp.transports.registry import create_transport
from rrfp.transports.rendezvous import StoreRendezvous

RUN_ID = "processes"

#: To the device and from it, and a copy into a slot and out of one.
TRIAL_BLOCKS = 4

#: For how long a peer may be silent here, in seconds.
PATIENCE_S = 1.5

#: Bytes of the tensors that role "stream" sends, and of those of role "large".
STREAMED_BYTES, LARGE_BYTES = 3 << 20, 32 << 20


def serve(name: str, role: str, store: str, reports: Connection) -> None:
    """Play ``role`` over transport ``name``; sends what it sees to ``reports``."""
    torch.set_num_threads(1)
    asyncio.run(_main(name, role, store, reports))


def make_transport(name: str, context: TransportContext) -> Transport:
    """The transport of a name; collective over gloo."""
    return over_gloo(context) if name == "collective" else create_transport(name, context)


def copies_for(name: str, role: str = "") -> DeviceCopies | None:
    """Of a double, for a transport between devices; in the role "stuck" it completes nothing after the start."""
    if name != "cuda_ipc":
        return None
    return copies_of(DoubleDevice(stuck_after_trial if role == "stuck" else 0.0), StreamLane)


def stuck_after_trial(count: int) -> float:
    """The seconds of a block of a double: the first ones belong to the trial with one peer."""
    return 0.0 if count <= TRIAL_BLOCKS else 3600.0


async def _main(name: str, role: str, store: str, reports: Connection) -> None:
    rendezvous = StoreRendezvous(FileStore(store, 2), run_id=RUN_ID)
    context = TransportContext(
        1,
        (0,),
        RUN_ID,
        rendezvous,
        connect_timeout_s=20,
        patience_s=PATIENCE_S,
        copies=copies_for(name, role),
    )
    transport = make_transport(name, context)
    await transport.start()
    if role in ("stream", "large"):
        await send_without_end(transport, STREAMED_BYTES if role == "stream" else LARGE_BYTES)
    if role == "exit":  # without a word, once both are connected
        await transport.receive()
        return
    if role == "close":
        await transport.send(0, data(torch.ones(STREAMED_BYTES, dtype=torch.uint8)))
        await transport.close()
        return
    if role == "fork":  # as a data loader does; the child keeps the sockets and outlives a kill
        if (child := os.fork()) == 0:
            signal.pause()
        reports.send(child)
    held: list[Message] = []
    try:
        while True:
            message = await transport.receive()
            if role == "hold":
                held.append(message)
            await transport.send(0, message)
    except PeerLostError:
        reports.send("lost")
    transport.abort()


async def send_without_end(transport: Transport, num_bytes: int) -> None:
    """Send tensors to the other of two ranks."""
    index = 0
    while True:
        await transport.send(
            1 - transport.context.rank, data(torch.full((num_bytes,), index % 251, dtype=torch.uint8), index=index)
        )
        index += 1
