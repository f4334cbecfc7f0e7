"""Tensors over a process group of two ranks for each direction; announcements and everything else over shm or zmq.

EXPERIMENTAL. A sender announces each message with tensors, then posts their transfer; the receiver posts the receives
when it gets the announcement, in the announced order. So no transfer waits for memory or for a task.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed.distributed_c10d import Store

from rrfp.errors import ConfigError, PeerLostError, RrfpError, TransportClosedError, TransportError
from rrfp.threads import start_thread
from rrfp.transports.auto import host_transport
from rrfp.transports.base import Message, Rendezvous, TransportContext
from rrfp.transports.collective.channel import Backend, GroupChannel, PairGroup, RankPair
from rrfp.transports.collective.nccl import NcclBackend
from rrfp.transports.links.flow import CLOSED, HomeLoop
from rrfp.transports.rendezvous import in_thread
from rrfp.transports.tunnel.link import TunnelLink
from rrfp.transports.tunnel.p2p import P2PChannel
from rrfp.transports.tunnel.transport import TunnelTransport
from rrfp.transports.zmq.endpoint import LOOPBACK, interface_towards_master

_Result = TypeVar("_Result")

#: The kind of device between which NCCL moves tensors.
CUDA = "cuda"


class RendezvousStore(Store):
    """A torch store over a `Rendezvous`. Create it on the loop; use it on other threads, one at a time."""

    # Process groups ask for keys in C++, on a thread that waits; the rendezvous lives on the loop. So every call runs
    # on the loop, and `close` ends those that wait.

    def __init__(self, rendezvous: Rendezvous, prefix: str, timeout_s: float) -> None:
        super().__init__()
        self._rendezvous = rendezvous
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._waiting: Future[Any] | None = None
        self._closed = threading.Event()

    def set(self, key: str, value: bytes | str) -> None:
        self._run(self._rendezvous.publish(self._prefix + key, value if isinstance(value, bytes) else value.encode()))

    def get(self, key: str) -> bytes:
        return self._run(self._rendezvous.lookup(self._prefix + key, self._timeout_s))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
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


async def nccl_backend(context: TransportContext) -> Backend:
    """NCCL, for a rank that computes on a CUDA device."""
    copies, where = context.copies, "the CPU" if context.copies is None else context.copies.kind
    reason = "" if where == CUDA else "it moves tensors between CUDA devices"
    if not (reason or (distributed.is_available() and distributed.is_nccl_available())):
        reason = "this torch has no NCCL"
    if copies is None or reason:
        raise ConfigError(
            f"transport is 'collective', must be another one for ranks on {where}: {reason}; 'auto' copies tensors "
            "through host memory where nothing better fits"
        )
    await check_leave(context)
    index = torch.cuda.current_device() if copies.index is None else copies.index
    return NcclBackend(context.rank, torch.device(CUDA, index), copies)


async def check_leave(context: TransportContext) -> str:
    """The address where groups listen, if the job permits plain connections."""
    # Within a host too: any user of it may connect to its loopback addresses.
    address = LOOPBACK if context.single_host else await in_thread(interface_towards_master)
    if context.secret is not None and not context.plain_data:
        raise ConfigError(
            f"collective would move tensors in plain text over tcp at {address}, and the job has a secret; pass "
            "data='plain' if those who can read the network may read them, or choose transport 'auto'"
        )
    if context.secret is None and not context.allow_insecure:
        raise ConfigError(
            f"collective would use tcp at {address} without authentication; pass allow_insecure=True if the network "
            "and the host are yours alone, or choose transport 'auto'"
        )
    return address


class CollectiveTransport(TunnelTransport):
    """Tensors between CUDA devices over NCCL, or what another ``backend`` moves."""

    def __init__(self, context: TransportContext, backend: Backend | None = None) -> None:
        super().__init__(context)
        self._backend = backend
        #: Those that no link has yet.
        self._groups: dict[RankPair, PairGroup] = {}
        self._store: RendezvousStore | None = None
        self._making: asyncio.Task[None] | None = None
        #: Why they are not made, once that is so.
        self._failure: RrfpError | None = None

    async def _connect(self, home: HomeLoop, deadline_s: float) -> None:
        context = self.context
        backend = self._backend or await nccl_backend(context)
        base = host_transport(context)
        await self._start_bases([base])
        self._read(base)  # already: a peer that ends while groups are made would be waited for
        self._making = asyncio.create_task(self._make_groups(backend, deadline_s))
        try:
            await self._making
        except asyncio.CancelledError:
            if self._failure is None:
                raise
            raise self._failure from None
        self._attach(TunnelLink(peer, base, self, home, self._channel_with(peer, backend)) for peer in context.peers)

    def _channel_with(self, peer: int, backend: Backend) -> Callable[[TunnelLink], P2PChannel] | None:
        """Makes the channel with a peer; None where there are no groups."""
        rank = self.context.rank
        outgoing, incoming = (self._groups.pop(pair, None) for pair in (RankPair(rank, peer), RankPair(peer, rank)))
        return None if outgoing is None or incoming is None else partial(GroupChannel, outgoing, incoming, backend)

    async def _make_groups(self, backend: Backend, deadline_s: float) -> None:
        """Make both groups with each peer, in the same order on all ranks."""
        context, rank = self.context, self.context.rank
        pairs = (pair for peer in context.tensor_peers for pair in (RankPair(rank, peer), RankPair(peer, rank)))
        for pair in sorted(pairs):
            timeout_s = max(deadline_s - asyncio.get_running_loop().time(), 0.001)
            prefix = f"collective/{context.run_id}/{context.restart}/{pair}/"
            self._store = RendezvousStore(context.rendezvous, prefix, timeout_s)
            try:
                # A backend that connects may take no notice of its time limit, as gloo does when the other end died.
                async with asyncio.timeout_at(deadline_s):
                    await in_thread(partial(self._make_group, backend, pair, self._store, timeout_s), start_thread)
            except Exception as error:
                peer = pair.target if pair.source == rank else pair.source
                reason, limit_s = f"{error!s:.200}" or "its end did not come", context.connect_timeout_s
                raise TransportError(f"no process group with rank {peer} within {limit_s:g} s: {reason}") from error

    def _make_group(self, backend: Backend, pair: RankPair, store: RendezvousStore, timeout_s: float) -> None:
        self._groups[pair] = backend.connect(pair, store, timeout_s)
        if self._failure is not None:  # while it connected
            self._abort_groups()

    def _abort_groups(self) -> None:
        """Free the groups that no link has; on any thread."""
        for pair in list(self._groups):
            if (group := self._groups.pop(pair, None)) is not None:
                group.abort()

    def _give_up(self, error: RrfpError) -> None:
        """Make no groups; ``start`` raises the first ``error``."""
        self._failure = self._failure or error
        if self._making is not None:
            self._making.cancel()
        if self._store is not None:
            self._store.close()
        self._abort_groups()

    def _on_entry(self, entry: Message | RrfpError) -> None:
        super()._on_entry(entry)
        if not self._links and isinstance(entry, PeerLostError):
            self._give_up(TransportError(f"rank {entry.peer} connected, then left: {entry.reason}"))

    def _free(self) -> None:
        self._give_up(TransportClosedError(CLOSED))
        super()._free()
