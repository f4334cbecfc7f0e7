"""Rendezvous of the ranks of one run: a dictionary within one process, torchrun's TCPStore between processes.

Under torchrun's agent neither starts a server. Keys belong to one run and one restart of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from rrfp import timeouts
from rrfp.errors import ConfigError, TransportError
from rrfp.model.topology import Topology
from rrfp.transports.base import TransportContext
from rrfp.transports.links.flow import settle

_Result = TypeVar("_Result")

_LAST_PORT = 65535


class LocalRendezvous:
    """For ranks of one process, on any number of loops and threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}

    async def publish(self, key: str, value: bytes) -> None:
        """See `Rendezvous.publish`."""
        with self._lock:
            self._values[key] = value
            waiting = self._waiting.pop(key, [])
        for loop, event in waiting:
            with contextlib.suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(event.set)

    async def lookup(self, key: str, timeout_s: float) -> bytes:
        """See `Rendezvous.lookup`."""
        entry = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            if key in self._values:
                return self._values[key]
            self._waiting.setdefault(key, []).append(entry)
        try:
            async with asyncio.timeout(timeout_s):
                await entry[1].wait()
        except TimeoutError:
            raise _absent(key, timeout_s) from None
        finally:
            with self._lock, contextlib.suppress(KeyError, ValueError):
                self._waiting[key].remove(entry)
        return self._values[key]


class StoreRendezvous:
    """Over a ``torch.distributed`` store, usually torchrun's TCPStore.

    Args:
        store: any store; this object talks to it from short-lived threads.
        run_id: the job.
        restart: its restart count.
    """

    def __init__(self, store: Any, *, run_id: str, restart: int = 0) -> None:
        from torch.distributed.distributed_c10d import PrefixStore

        #: Whether rank 0's process hosts the store, or the launcher on its host.
        self.is_of_first_host = False
        self._owner = store  # PrefixStore does not keep a store alive that this process hosts
        self._store: Any = PrefixStore(f"rrfp/{run_id}/{restart}", store)
        #: By loop, since each pipeline may run on one of its own: calls take turns.
        self._turns = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]()

    @classmethod
    async def from_env(
        cls, topology: Topology, environ: Mapping[str, str] | None = None, timeout_s: float = timeouts.CONNECT_S
    ) -> StoreRendezvous:
        """Connect to the store that torchrun's environment names.

        That is the default store of an initialised ``torch.distributed``, over a connection of its own. Otherwise this
        connects to MASTER_ADDR:MASTER_PORT, where torchrun's agent hosts a store (TORCHELASTIC_USE_AGENT_STORE);
        without an agent rank 0 hosts one.

        Args:
            topology: its run id and restart count prefix all keys.
            environ: torchrun's variables; ``os.environ`` by default.
            timeout_s: seconds to wait for the store.

        Returns:
            The rendezvous, connected.

        Raises:
            ConfigError: if a variable is missing; the message says how to launch.
            TransportError: if the store does not answer within ``timeout_s`` seconds.
        """
        owner = _default_store()
        if owner is None:
            store = owner = await _connect(os.environ if environ is None else environ, timeout_s)
        else:
            store = await _cloned(owner, timeout_s)
        rendezvous = cls(store, run_id=topology.run_id, restart=topology.restart)
        rendezvous._owner, rendezvous.is_of_first_host = owner, True
        return rendezvous

    async def publish(self, key: str, value: bytes) -> None:
        """See `Rendezvous.publish`."""
        await self._call(key, lambda: self._store.set(key, value))

    async def lookup(self, key: str, timeout_s: float) -> bytes:
        """See `Rendezvous.lookup`."""
        # The store's own wait cannot be cancelled and keeps its connection to itself; polling does neither.
        pause_s, waited_s = timeouts.FIRST_PAUSE_S, 0.0
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._call(key, lambda: self._store.check([key])):
                    await asyncio.sleep(pause_s)
                    waited_s += pause_s
                    pause_s = min(2 * pause_s, max(timeouts.LAST_PAUSE_S, waited_s / 20), timeouts.LONGEST_PAUSE_S)
                return bytes(await self._call(key, lambda: self._store.get(key)))
        except TimeoutError:
            raise _absent(key, timeout_s) from None

    async def _call(self, key: str, function: Callable[[], _Result]) -> _Result:
        async with self._turns.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            try:
                return await in_thread(function)
            except RuntimeError as error:  # torch's DistError derives from it
                raise TransportError(f"rendezvous store failed at key {key!r}: {error!s:.200}") from error


async def publish_in_time(context: TransportContext, key: str, value: bytes) -> None:
    """Publish a value within ``connect_timeout_s``, or raise a TransportError."""
    try:
        async with asyncio.timeout(context.connect_timeout_s):
            await context.rendezvous.publish(key, value)
    except TimeoutError:
        limit_s = context.connect_timeout_s
        raise TransportError(f"the rendezvous did not accept {key!r} within {limit_s:g} s") from None


async def lookup_peer(context: TransportContext, peer: int, key: str, deadline_s: float) -> bytes:
    """What ``peer`` published; a TransportError that names it after the deadline."""
    timeout_s = max(0.0, deadline_s - asyncio.get_running_loop().time())
    try:
        return await context.rendezvous.lookup(key, timeout_s)
    except TransportError as error:
        raise TransportError(f"rank {peer} did not connect: {error}") from error


async def by_peer(peers: Iterable[int], look: Callable[[int], Coroutine[Any, Any, _Result]]) -> dict[int, _Result]:
    """The results for all peers, awaited at once; behind an error those that are left are cancelled."""
    looks = {peer: asyncio.create_task(look(peer)) for peer in peers}
    try:
        return dict(zip(looks, await asyncio.gather(*looks.values()), strict=True))
    finally:
        for each in looks.values():
            each.cancel()


def _absent(key: str, timeout_s: float) -> TransportError:
    return TransportError(f"no rank published {key!r} within {timeout_s:g} s")


def _default_store() -> Any:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    # Private, but torch has no other accessor; where it is missing, `_connect` connects to the same server.
    get = getattr(dist.distributed_c10d, "_get_default_store", None)
    return None if get is None else get()


async def _cloned(store: Any, timeout_s: float) -> Any:
    """``store`` over a connection that no wait of torch's, as in ``new_group``, keeps to itself; else as it is."""
    try:
        async with asyncio.timeout(timeout_s):
            return await in_thread(store.clone)
    except TimeoutError:
        raise TransportError(f"the rendezvous store did not take a connection within {timeout_s:g} s") from None
    except (AttributeError, RuntimeError):  # torch before 2.7, or a store that is written in Python
        return store


async def _connect(environ: Mapping[str, str], timeout_s: float) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "RANK") if name not in environ]
    if missing:
        raise ConfigError(
            f"environment variable {missing[0]} is not set; launch with: "
            "torchrun --standalone --nproc-per-node STAGES script.py"
        )
    host, port = environ["MASTER_ADDR"], environ["MASTER_PORT"]
    if not port.isdecimal() or not 1 <= int(port) <= _LAST_PORT:
        raise ConfigError(f"environment variable MASTER_PORT is {port!r}, must be a port number, 1..{_LAST_PORT}")
    agent_hosts = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def connect() -> Any:
        # multi_tenant: a later init_process_group of this process may host on the same port.
        return TCPStore(
            host,
            int(port),
            is_master=not agent_hosts and environ["RANK"] == "0",
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )

    try:
        return await in_thread(connect)
    except RuntimeError as error:
        raise TransportError(f"no rendezvous store at {host}:{port} within {timeout_s:g} s: {error!s:.200}") from error


def start_daemon(serve: Callable[[], None], name: str) -> None:
    """Run ``serve`` on a thread that no exit waits for."""
    threading.Thread(target=serve, name=name, daemon=True).start()


async def in_thread(
    function: Callable[[], _Result], start: Callable[[Callable[[], None], str], None] = start_daemon
) -> _Result:
    """Run a blocking ``function`` in a thread. Cancelled, its result is dropped."""
    # Not the loop's executor: closing a loop waits for its threads, and a store that hangs would hang the exit.
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Result] = loop.create_future()

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed, and its waiters are gone
            loop.call_soon_threadsafe(settle, future, error, result)

    start(run, "rrfp-blocking-call")
    return await future
