"""The default: the best transport for each peer. In one process `inproc`; in one host `shm`; otherwise `zmq` over tcp.

Every rank publishes what two processes must have in common to share memory. Of two ranks that have it, the higher one
passes a slot to the lower one and publishes whether that worked, so both choose the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import msgpack

from rrfp.core import timeouts
from rrfp.errors import ConfigError, TransportClosedError, TransportError
from rrfp.log import get_logger
from rrfp.transports.base import Channel, Message, Transport, TransportContext, TransportStatistics
from rrfp.transports.flow import CLOSED, Deliver, HomeLoop, background
from rrfp.transports.inproc import InprocTransport
from rrfp.transports.lending import Loan
from rrfp.transports.rendezvous import LocalRendezvous, publish_in_time
from rrfp.transports.shm.transport import ShmTransport
from rrfp.transports.shm.trial import Host, TrialAnswers, is_reached_by_ipc, obstacle_between, this_host, try_slot
from rrfp.transports.zmq.transport import ZmqTransport

_log = get_logger(__name__)


_Inner = ShmTransport | ZmqTransport


def auto_transport(context: TransportContext) -> Transport:
    """The best transport for each peer: inproc in one process, shm in one host, otherwise zmq over tcp.

    Args:
        context: this rank, its peers and the limits.
    """
    return InprocTransport(context) if isinstance(context.rendezvous, LocalRendezvous) else AutoTransport(context)


def explain() -> str:
    """The choice that `auto` would make for a rank in this process, in a sentence."""
    host = this_host()
    if host.obstacle:
        return f"inproc in one process; zmq between all others, since {host.obstacle}"
    namespaces = ", ".join((host.user_namespace, host.network_namespace, host.pid_namespace))
    return (
        f"inproc in one process; shm with processes of user {host.user} on this host in the namespaces {namespaces}; "
        "zmq with all others"
    )


@dataclass(frozen=True, slots=True)
class _Published:
    """What a rank publishes about itself."""

    host: Host
    address: str

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb([self.host.to_plain(), self.address])
        return packed

    @classmethod
    def unpack(cls, rank: int, value: bytes) -> _Published:
        try:
            host, address = msgpack.unpackb(value)
            if not isinstance(address, str):
                raise ValueError("the address must be a string")
            return cls(Host.from_plain(host), address)
        except Exception as error:  # msgpack raises many types
            raise TransportError(f"rank {rank} published {value!r:.200}, which is malformed: {error}") from error


class AutoTransport(Transport):
    """Between processes: shm with the peers that this rank can share memory with, zmq with the others.

    Args:
        context: this rank, its peers and the limits.
    """

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self._hosts: dict[int, Host] = {}
        self._by_peer: dict[int, _Inner] = {}
        self._inners: tuple[_Inner, ...] = ()
        self._receiving: dict[_Inner, asyncio.Task[Message]] = {}
        self._started = False
        self._closed = False

    async def start(self) -> None:
        """Choose a transport for each peer, and start those; see `Transport.start`."""
        if self._started or self._closed:
            raise TransportClosedError("a transport starts once")
        self._started = True
        try:
            home = HomeLoop()
            obstacles = await self._obstacles(home, home.loop.time() + self.context.connect_timeout_s)
            self._check_open()
            self._log_choice(obstacles)
            self._inners = tuple(self._chosen(obstacles))
            self._by_peer = {peer: inner for inner in self._inners for peer in inner.context.peers}
            await asyncio.gather(*(inner.start() for inner in self._inners))
        except BaseException:
            self.abort()
            raise

    def _host(self) -> Host:
        return this_host()

    def _key(self, *ranks: int) -> str:
        return f"auto/{self.context.run_id}/{self.context.restart}/{'-'.join(map(str, ranks))}"

    async def _obstacles(self, home: HomeLoop, deadline_s: float) -> dict[int, str]:
        """For each peer, why this rank cannot share memory with it; empty where it can."""
        context = self.context
        own = self._hosts[context.rank] = self._host()
        answers = None if own.obstacle else TrialAnswers(context.rank, home)
        try:
            published = _Published(own, "" if answers is None else answers.address)
            await publish_in_time(context, self._key(context.rank), published.pack())
            looks = [asyncio.create_task(self._obstacle(peer, own, home, deadline_s)) for peer in context.peers]
            try:
                return dict(zip(context.peers, await asyncio.gather(*looks), strict=True))
            finally:
                for look in looks:
                    look.cancel()  # those that are left behind an error
        finally:
            if answers is not None:
                answers.close()

    async def _obstacle(self, peer: int, own: Host, home: HomeLoop, deadline_s: float) -> str:
        value = await self._lookup(peer, self._key(peer), deadline_s)
        published = _Published.unpack(peer, value)
        self._hosts[peer] = published.host
        if obstacle := obstacle_between(own, published.host):
            return obstacle
        rank = self.context.rank
        if peer > rank:
            return (await self._lookup(peer, self._key(rank, peer), deadline_s)).decode()
        timeout_s = max(0.0, min(timeouts.TRIAL_S, deadline_s - home.loop.time()))
        obstacle = await try_slot(published.address, home, timeout_s)
        await publish_in_time(self.context, self._key(peer, rank), obstacle.encode())
        return obstacle

    async def _lookup(self, peer: int, key: str, deadline_s: float) -> bytes:
        timeout_s = max(0.0, deadline_s - asyncio.get_running_loop().time())
        try:
            return await self.context.rendezvous.lookup(key, timeout_s)
        except TransportError as error:
            raise TransportError(f"rank {peer} did not connect: {error}") from error

    def _chosen(self, obstacles: dict[int, str]) -> Iterator[_Inner]:
        """The transports, each with its peers: at least one."""
        context = self.context
        shared = tuple(peer for peer, obstacle in obstacles.items() if not obstacle)
        others = tuple(peer for peer, obstacle in obstacles.items() if obstacle)
        if shared:
            yield ShmTransport(replace(context, peers=shared))
        if others or not shared:
            own = self._hosts[context.rank]
            is_near = all(is_reached_by_ipc(own, self._hosts[peer]) for peer in others)
            yield ZmqTransport(replace(context, peers=others, single_host=context.single_host and is_near))

    def _log_choice(self, obstacles: dict[int, str]) -> None:
        by_choice: dict[str, list[str]] = {}
        for peer, obstacle in obstacles.items():
            choice = f"zmq ({obstacle})" if obstacle else "shm"
            by_choice.setdefault(choice, []).append(str(peer))
        choices = "; ".join(f"{choice} with rank {', '.join(peers)}" for choice, peers in by_choice.items())
        if choices:
            _log.info("transport of rank %d: %s", self.context.rank, choices)

    def _check_open(self) -> None:
        if self._closed or not self._started:
            raise TransportClosedError(CLOSED if self._started else "the transport is not started")

    def _check_running(self) -> None:
        self._check_open()
        if not self._inners:
            raise TransportClosedError("the transport is not started")

    async def send(self, peer: int, message: Message) -> None:
        """See `Transport.send`."""
        self._check_running()
        inner = self._by_peer.get(peer)
        if inner is None:
            raise ConfigError(f"peer is {peer}, must be one of: {', '.join(map(str, self.context.peers))}")
        await inner.send(peer, message)

    def send_at_once(self, peer: int, message: Message) -> bool:
        """See `rrfp.transports.direct.SendsAtOnce`."""
        inner = self._by_peer.get(peer)
        return inner is not None and inner.send_at_once(peer, message)

    def deliver_to(self, deliver: Deliver) -> None:
        """See `rrfp.transports.direct.DeliversMessages`."""
        self._check_running()
        for inner in self._inners:
            inner.deliver_to(deliver)

    def lend(self, peer: int, channel: Channel, sizes: Sequence[int]) -> Loan | None:
        """See `rrfp.transports.lending.LendsMemory`."""
        inner = self._by_peer.get(peer)
        return inner.lend(peer, channel, sizes) if isinstance(inner, ShmTransport) else None

    async def receive(self) -> Message:
        """See `Transport.receive`."""
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

    def _is_later(self, inner: _Inner) -> bool:
        """Whether what it received waits behind a control message or an error of another one."""
        task = self._receiving[inner]
        return task.exception() is None and task.result().channel is not Channel.CONTROL

    async def close(self) -> None:
        """See `Transport.close`."""
        self._closed = True
        await asyncio.gather(*(inner.close() for inner in self._inners))
        self._end_receiving()

    def abort(self) -> None:
        """See `Transport.abort`."""
        self._closed = True
        for inner in self._inners:
            inner.abort()
        self._end_receiving()

    def _end_receiving(self) -> None:
        for task in self._receiving.values():
            task.cancel()

    def statistics(self) -> TransportStatistics:
        """See `Transport.statistics`: the sums."""
        return _sum([inner.statistics() for inner in self._inners])


def _sum(parts: Sequence[TransportStatistics]) -> TransportStatistics:
    totals: dict[str, Any] = {
        field.name: sum(getattr(part, field.name) for part in parts) for field in fields(TransportStatistics)
    }
    return TransportStatistics(**totals)
