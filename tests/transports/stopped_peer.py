"""Two ranks of transport collective, of which rank 1 stops while process groups are made.

Rank 1 is `serve`; rank 0 is this file as a script: an interpreter of its own, which ends as one does.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store
from transports.gloo_backend import GlooBackend

from rrfp.errors import RrfpError
from rrfp.transports.base import TransportContext
from rrfp.transports.collective.channel import RankPair
from rrfp.transports.collective.transport import CollectiveTransport
from rrfp.transports.rendezvous import StoreRendezvous

RUN_ID = "stopped"

#: Of the ranks, by the role of rank 0: of two ends of gloo, the one with the lesser address listens.
ADDRESSES = {"connects": ("127.0.0.2", "127.0.0.1"), "listens": ("127.0.0.1", "127.0.0.2")}


def rendezvous(store: str) -> StoreRendezvous:
    """Where the ranks meet."""
    return StoreRendezvous(FileStore(store, 2), run_id=RUN_ID)


def context(rank: int, store: str) -> TransportContext:
    """Of one of the two ranks."""
    return TransportContext(rank, (1 - rank,), RUN_ID, rendezvous(store), connect_timeout_s=30)


class Watched(Store):
    """A store of which a test sees gloo's calls: their names and keys, once they have returned."""

    def __init__(self, store: Any, after: Callable[[str, str], None]) -> None:
        super().__init__()
        self._store = store
        self._after = after

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)
        self._after("set", key)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)
        self._after("get", key)
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, timeout)


class Stopping(GlooBackend):
    """Stops its process when it has published its address."""

    def connect(self, pair: RankPair, store: Any, timeout_s: float) -> Any:
        def stop(call: str, key: str) -> None:
            if call == "set":
                os.kill(os.getpid(), signal.SIGSTOP)

        return super().connect(pair, Watched(store, stop), timeout_s)


def serve(store: str, role: str) -> None:
    """Rank 1, which makes its first group until it stops; ``role`` is that of rank 0."""
    torch.set_num_threads(1)
    asyncio.run(CollectiveTransport(context(1, store), Stopping(1, ADDRESSES[role][1])).start())


class Noting(GlooBackend):
    """Aborts its transport when it is about to wait in gloo for the peer, which wakes when this process ends."""

    def __init__(self, address: str, peer: int) -> None:
        super().__init__(0, address)
        self.transport: CollectiveTransport | None = None
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        atexit.register(self._wake)

    def connect(self, pair: RankPair, store: Any, timeout_s: float) -> Any:
        def note(call: str, key: str) -> None:
            if (call, key) == ("get", "0/1") and self.transport is not None:
                self._loop.call_soon_threadsafe(self.transport.abort)

        return super().connect(pair, Watched(store, note), timeout_s)

    def _wake(self) -> None:
        """At the end of the process, before it waits for threads."""
        os.kill(self._peer, signal.SIGCONT)


async def _main(store: str, role: str, peer: int) -> None:
    address = ADDRESSES[role][0]
    backend = Noting(address, peer) if role == "listens" else GlooBackend(0, address)
    transport = CollectiveTransport(context(0, store), backend)
    if isinstance(backend, Noting):
        backend.transport = transport
    await transport.start()


if __name__ == "__main__":
    try:
        asyncio.run(_main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
    except RrfpError as failure:
        sys.exit(f"{type(failure).__name__}: {failure}")
