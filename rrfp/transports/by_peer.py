"""A transport that consists of others, each for some of its peers."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Generic, TypeVar

from rrfp.errors import ConfigError, TransportClosedError
from rrfp.transports.base import Channel, Message, Transport, TransportContext, TransportStatistics
from rrfp.transports.flow import CLOSED, HomeLoop, background

Inner = TypeVar("Inner", bound=Transport)


class ByPeerTransport(Transport, Generic[Inner]):
    """Chooses a transport for each peer when it starts. A subclass chooses, in `_choose`."""

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self._by_peer: dict[int, Inner] = {}
        self._inners: tuple[Inner, ...] = ()
        self._receiving: dict[Inner, asyncio.Task[Message]] = {}
        self._started = False
        self._closed = False

    @abstractmethod
    async def _choose(self, home: HomeLoop, deadline_s: float) -> Sequence[Inner]:
        """Transports, not started, each with its part of the peers: at least one."""

    async def start(self) -> None:
        """Choose a transport for each peer, and start those; see `Transport.start`."""
        if self._started or self._closed:
            raise TransportClosedError("a transport starts once")
        self._started = True
        try:
            home = HomeLoop()
            inners = await self._choose(home, home.loop.time() + self.context.connect_timeout_s)
            self._check_open()
            self._inners = tuple(inners)
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
        """See `Transport.send`."""
        self._check_running()
        inner = self._by_peer.get(peer)
        if inner is None:
            raise ConfigError(f"peer is {peer}, must be one of: {', '.join(map(str, self.context.peers))}")
        await inner.send(peer, message)

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

    def _is_later(self, inner: Inner) -> bool:
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
        parts = [inner.statistics() for inner in self._inners]
        totals: dict[str, Any] = {
            field.name: sum(getattr(part, field.name) for part in parts) for field in fields(TransportStatistics)
        }
        return TransportStatistics(**totals)
