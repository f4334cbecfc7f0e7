"""A rank in a process of its own, that tests kill, stop and cut off. Stage 1; its peer is stage 0, in the test."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from multiprocessing.connection import Connection

import torch

from rrfp.core.topology import Topology
from rrfp.errors import PeerLostError
from rrfp.testing.transport_checks.pair import data
from rrfp.transports.base import TransportContext
from rrfp.transports.rendezvous import StoreRendezvous
from rrfp.transports.zmq.transport import ZmqTransport


def run(role: str, variables: Mapping[str, str], line: Connection) -> None:
    """In a process of its own, with torchrun's variables; says what it sees."""
    torch.set_num_threads(1)
    asyncio.run(_main(role, variables, line))


async def _main(role: str, variables: Mapping[str, str], line: Connection) -> None:
    topology = Topology.from_env(variables)
    rendezvous = await StoreRendezvous.from_env(topology, variables)
    transport = ZmqTransport(
        TransportContext(1, (0,), topology.run_id, rendezvous, topology.restart, connect_timeout_s=20, patience_s=1.5)
    )
    await transport.start()
    if role == "stream":  # tensors without end
        index = 0
        while True:
            await transport.send(0, data(torch.full((3 << 20,), index % 251, dtype=torch.uint8), index=index))
            index += 1
    if role == "exit":  # without a word, once both are connected
        await transport.receive()
        return
    try:
        while True:
            message = await transport.receive()
            await transport.send(0, message)
    except PeerLostError:
        line.send("lost")
    transport.abort()
