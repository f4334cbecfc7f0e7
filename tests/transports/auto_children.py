"""A rank in namespaces of its own, whose peer is in the test."""

from __future__ import annotations

import asyncio
import os

from torch.distributed import FileStore  # type: ignore[attr-defined]
from transports.children import NEW_PIDS, NOT_PERMITTED, unshare

from rrfp.transports.auto import AutoTransport
from rrfp.transports.base import TransportContext
from rrfp.transports.rendezvous import StoreRendezvous

RUN_ID = "auto"


def echo_in_new_pid_namespace(store: str) -> str:
    """Rank 1 sends one message back; returns "" or why it could not."""
    if not unshare(NEW_PIDS):
        return NOT_PERMITTED
    if (child := os.fork()) == 0:  # the first process in there
        os._exit(asyncio.run(_echo(store)))
    _, status = os.waitpid(child, 0)
    return "" if os.waitstatus_to_exitcode(status) == 0 else f"ended with status {status}"


async def _echo(store: str) -> int:
    rendezvous = StoreRendezvous(FileStore(store, 2), run_id=RUN_ID)
    transport = AutoTransport(TransportContext(1, (0,), RUN_ID, rendezvous, connect_timeout_s=20))
    await transport.start()
    await transport.send(0, await transport.receive())
    await transport.close()
    return 0
