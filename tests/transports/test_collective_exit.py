"""A process whose peer stops while they connect over gloo ends with its error, not by a signal."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import transports.stopped_peer as stopped_peer
from fork_server import context, fork_server

__all__ = ["fork_server"]

SECONDS = 25.0


@asynccontextmanager
async def ranks(store: str, role: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, Any]]:
    """Rank 0 in an interpreter of its own, and rank 1."""
    peer = context().Process(target=stopped_peer.serve, args=(store, role))
    await asyncio.to_thread(peer.start)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = (sys.executable, stopped_peer.__file__, store, role, str(peer.pid))
    own = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, env=environment)
    try:
        yield own, peer
    finally:
        if own.returncode is None:
            own.kill()
            await own.wait()
        peer.kill()
        await asyncio.to_thread(peer.join)


@pytest.mark.parametrize("role", ["connects", "listens"])
async def test_a_process_ends_in_order_when_its_peer_stopped_after_publishing_its_address(
    role: str, tmp_path: Path
) -> None:
    """Threads that free a group, or return from connecting, while the interpreter ends would abort the process."""
    store = str(tmp_path / "store")
    async with ranks(store, role) as (own, peer):
        if role == "connects":  # gloo needs no answer for that; then it waits for an address that does not come
            await stopped_peer.rendezvous(store).lookup(f"collective/{stopped_peer.RUN_ID}/0/1->0/0/1", SECONDS)
            peer.kill()
            error = "TransportError: rank 1 connected, then left: its connection ended"
        else:  # the peer goes on when the process ends
            error = "TransportClosedError: the transport is closed"
        async with asyncio.timeout(SECONDS):
            _, errors = await own.communicate()
    assert (own.returncode, errors.decode()) == (1, f"{error}\n")
