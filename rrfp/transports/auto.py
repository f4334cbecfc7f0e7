"""The default: the best transport for each peer. In one process `inproc`; in one host `shm`; otherwise `zmq` over tcp.

Tensors of a device whose memory processes can share travel by `cuda_ipc` within a host.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from rrfp.devices.copies import SharesDeviceMemory
from rrfp.errors import ConfigError, RrfpError, TransportClosedError
from rrfp.log import get_logger
from rrfp.transports.base import Channel, Deliver, Loan, Message, Transport, TransportContext, TransportStatistics
from rrfp.transports.host_choice import HostChoice
from rrfp.transports.inproc import InprocTransport
from rrfp.transports.links.flow import CLOSED, HomeLoop, background
from rrfp.transports.rendezvous import LocalRendezvous
from rrfp.transports.shm.transport import ShmTransport
from rrfp.transports.shm.trial import Host, this_host
from rrfp.transports.zmq.transport import ZmqTransport

_log = get_logger(__name__)


def auto_transport(context: TransportContext) -> Transport:
    """The best transport for each peer, as a plugin's factory makes it."""
    if isinstance(context.rendezvous, LocalRendezvous):
        return InprocTransport(context)
    if not isinstance(context.copies, SharesDeviceMemory):
        return AutoTransport(context)
    from rrfp.transports.cuda_ipc.transport import CudaIpcTransport

    return CudaIpcTransport(context)


async def host_transports(context: TransportContext, home: HomeLoop, deadline_s: float) -> Sequence[Transport]:
    """The best transports between host memories, each with its part of the peers."""
    if isinstance(context.rendezvous, LocalRendezvous):
        return (InprocTransport(context),)
    choice = HostChoice(context, this_host(context.max_message_bytes))
    await choice.look(home, deadline_s)
    log_choice(context.rank, {peer: choice.describe(peer) for peer in context.peers})
    return tuple(choice.transports(context))


def explain() -> str:
    """The choice that `auto` would make for a rank of this process."""
    host = this_host()
    if host.obstacle:
        return f"inproc in one process; zmq between all others, and device tensors staged there, since {host.obstacle}"
    namespaces = ", ".join((host.user_namespace, host.network_namespace, host.pid_namespace))
    return (
        f"inproc in one process; shm with processes of user {host.user} on this host in the namespaces {namespaces}, "
        "and cuda_ipc with those that can open memory of each other's CUDA devices; zmq with all others; device "
        "tensors staged where cuda_ipc does not move them (collective, with NCCL, by name only)"
    )


def log_choice(rank: int, choices: Mapping[int, str]) -> None:
    """Log the choice for each peer, in one line."""
    by_choice: dict[str, list[str]] = {}
    for peer, choice in choices.items():
        by_choice.setdefault(choice, []).append(str(peer))
    text = "; ".join(f"{choice} with rank {', '.join(peers)}" for choice, peers in by_choice.items())
    if text:
        _log.info("transport of rank %d: %s", rank, text)


class AutoTransport(Transport):
    """Between processes: shm with the peers that this rank can share memory with, zmq with the others.

    Args:
        context: this rank, its peers and the limits.
    """

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self._by_peer: dict[int, ShmTransport | ZmqTransport] = {}
        self._inners: tuple[ShmTransport | ZmqTransport, ...] = ()
        self._receiving: dict[ShmTransport | ZmqTransport, asyncio.Task[Message]] = {}
        self._started = False
        self._closed = False

    def _host(self) -> Host:
        return this_host(self.context.max_message_bytes)

    async def start(self) -> None:
        """Choose a transport for each peer, and start those; see `Transport.start`."""
        if self._started or self._closed:
            raise TransportClosedError("a transport starts once")
        self._started = True
        context, home = self.context, HomeLoop()
        choice = HostChoice(context, self._host())
        try:
            await choice.look(home, home.loop.time() + context.connect_timeout_s)
            self._check_open()
            log_choice(context.rank, {peer: choice.describe(peer) for peer in context.peers})
            self._inners = tuple(choice.transports(context))
            self._by_peer = {peer: inner for inner in self._inners for peer in inner.context.peers}
            await asyncio.gather(*(inner.start() for inner in self._inners))
        except BaseException:
            self.abort()
            raise

    def _check_open(self) -> None:
        if self._closed or not self._started:
            raise TransportClosedError(CLOSED if self._started else "the transport is not started")

    def _check_running(self) -> None:
        self._check_open()
        if not self._inners:
            raise TransportClosedError("the transport is not started")

    async def send(self, peer: int, message: Message) -> None:
        self._check_running()
        inner = self._by_peer.get(peer)
        if inner is None:
            raise ConfigError(f"peer is {peer}, must be one of: {', '.join(map(str, self.context.peers))}")
        await inner.send(peer, message)

    def send_at_once(self, peer: int, message: Message) -> bool:
        inner = self._by_peer.get(peer)
        return inner is not None and inner.send_at_once(peer, message)

    async def receive(self) -> Message:
        self._check_running()
        if len(self._inners) == 1:
            return await self._inners[0].receive()
        for inner in self._inners:
            if inner not in self._receiving:
                self._receiving[inner] = background(inner.receive())
        done, _ = await asyncio.wait(self._receiving.values(), return_when=asyncio.FIRST_COMPLETED)
        self._check_open()
        inner = min((each for each, task in self._receiving.items() if task in done), key=self._is_later)
        return self._receiving.pop(inner).result()

    def _is_later(self, inner: ShmTransport | ZmqTransport) -> bool:
        """Whether its message waits behind another one's control message or error."""
        task = self._receiving[inner]
        return task.exception() is None and task.result().channel is not Channel.CONTROL

    def deliver_to(self, deliver: Deliver) -> None:
        self._check_running()
        receiving, self._receiving = self._receiving, {}
        for inner in self._inners:
            if (task := receiving.get(inner)) is not None and not task.cancel():  # read ahead by `receive`
                deliver(_outcome(task))
            if not self._closed:
                inner.deliver_to(deliver)

    def lend(self, peer: int, channel: Channel, sizes: Sequence[int]) -> Loan | None:
        inner = self._by_peer.get(peer)
        return inner.lend(peer, channel, sizes) if isinstance(inner, ShmTransport) else None

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(inner.close() for inner in self._inners))
        self._end_receiving()

    def abort(self) -> None:
        self._closed = True
        for inner in self._inners:
            inner.abort()
        self._end_receiving()

    def _end_receiving(self) -> None:
        for task in self._receiving.values():
            task.cancel()

    def statistics(self) -> TransportStatistics:
        """See `Transport.statistics`: the sums."""
        parts = [inner.statistics() for inner in self._inners]
        totals: dict[str, Any] = {
            field.name: sum(getattr(part, field.name) for part in parts) for field in fields(TransportStatistics)
        }
        return TransportStatistics(**totals)


def _outcome(receiving: asyncio.Task[Message]) -> Message | RrfpError:
    """The message that was received, or the error that was raised."""
    error = receiving.exception()
    if error is None:
        return receiving.result()
    if isinstance(error, RrfpError):
        return error
    raise error
