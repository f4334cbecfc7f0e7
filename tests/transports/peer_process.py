"""A rank in a process of its own, that tests kill, stop and cut off. Stage 1; its peer is stage 0, in the test.

Usage: peer_process.py ROLE, with torchrun's variables in the environment. Prints what it sees, one word a line.
"""

from __future__ import annotations

import asyncio
import sys

import torch

from rrfp.core.topology import Topology
from rrfp.errors import PeerLostError
from rrfp.testing.transport_checks.pair import data
from rrfp.transports.base import TransportContext
from rrfp.transports.rendezvous import StoreRendezvous
from rrfp.transports.zmq.transport import ZmqTransport


async def main(role: str) -> None:
    topology = Topology.from_env()
    rendezvous = await StoreRendezvous.from_env(topology)
    transport = ZmqTransport(
        TransportContext(1, (0,), topology.run_id, rendezvous, topology.restart, connect_timeout_s=20, patience_s=1.5)
    )
    await transport.start()
    if role == "stream":  # tensors without end
        index = 0
        while True:
            await transport.send(0, data(torch.full((3 << 20,), index % 251, dtype=torch.uint8), index=index))
            index += 1
    if role == "exit":  # without a word
        return
    try:
        while True:
            message = await transport.receive()
            await transport.send(0, message)
    except PeerLostError:
        sys.stdout.write("lost\n")
    transport.abort()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(sys.argv[1]))
