"""A torch store over a `Rendezvous`, so that process groups meet wherever the transports do.

Process groups ask for keys in C++, on a thread that waits; the rendezvous lives on the loop. So every call here is run
on the loop, and `close` ends those that wait.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import Store

from rrfp.errors import TransportClosedError
from rrfp.transports.base import Rendezvous
from rrfp.transports.flow import CLOSED

_Result = TypeVar("_Result")


class RendezvousStore(Store):
    """Create it on the loop of ``rendezvous``; use it on other threads, one at a time.

    Args:
        rendezvous: its keys must be a run's own.
        prefix: of all keys.
        timeout_s: how long `get` waits for a key.
    """

    def __init__(self, rendezvous: Rendezvous, prefix: str, timeout_s: float) -> None:
        super().__init__()
        self._rendezvous = rendezvous
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._waiting: Future[Any] | None = None
        self._closed = threading.Event()

    def set(self, key: str, value: bytes | str) -> None:
        """Publish a value."""
        self._run(self._rendezvous.publish(self._prefix + key, value if isinstance(value, bytes) else value.encode()))

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        return self._run(self._rendezvous.lookup(self._prefix + key, self._timeout_s))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for some keys."""
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        for key in keys:
            self._run(self._rendezvous.lookup(self._prefix + key, timeout_s))

    def close(self) -> None:
        """Make the call that waits and all later ones raise; from any thread."""
        self._closed.set()
        if (waiting := self._waiting) is not None:
            waiting.cancel()

    def _run(self, call: Coroutine[Any, Any, _Result]) -> _Result:
        if self._closed.is_set():
            call.close()
            raise TransportClosedError(CLOSED)
        self._waiting = future = asyncio.run_coroutine_threadsafe(call, self._loop)
        if self._closed.is_set():
            future.cancel()
        return future.result()
