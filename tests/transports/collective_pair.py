"""Two ends over gloo in one process, for tests of transport collective, and ways past their own checks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import torch
import transports.makers as makers
from transports.gloo_backend import over_gloo

from rrfp.testing.transport_checks.pair import data
from rrfp.transports.base import Channel
from rrfp.transports.collective.transport import CollectiveTransport
from rrfp.transports.tunnel.p2p import BESIDE


@asynccontextmanager
async def ends(**changes: Any) -> AsyncIterator[tuple[CollectiveTransport, CollectiveTransport]]:
    """Two started ends in this process, announcements over shm."""
    left, right = map(over_gloo, makers.contexts(**{"rendezvous": makers.Store(), **changes}))
    async with makers.started(left, right):
        yield left, right


def link_of(end: CollectiveTransport) -> Any:
    """The link to the other of two ends."""
    (link,) = end._links.values()
    return link


async def announce(left: CollectiveTransport, *specs: Any, number: Any = 0, channel: Channel = Channel.FORWARD) -> None:
    """Send an announcement past the checks of ``left``'s own."""
    await announce_raw(left, [number, list(specs), None], count=len(specs), channel=channel)


async def announce_raw(
    left: CollectiveTransport, entry: Any, *, count: int = 1, channel: Any = Channel.FORWARD
) -> None:
    """Send any announcement."""
    message = data(*[None] * count, index=99, channel=channel)
    link = link_of(left)
    await link.base.send(link.peer, replace(message, body={BESIDE: entry}))


def post(left: CollectiveTransport, *tensors: torch.Tensor) -> asyncio.Future[None]:
    """Send tensors without an announcement, as the next transfer."""
    sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    return link_of(left).beside._outgoing.post(tensors, sent)  # type: ignore[no-any-return]


class Held:
    """Keeps a receiver from posting anything."""

    def __init__(self, end: CollectiveTransport) -> None:
        self.announced = asyncio.Event()
        self._channel = link_of(end).beside
        self._post = self._channel._post
        self._held: list[Any] = []
        self._channel._post = self._hold

    def _hold(self, announced: Any) -> None:
        self._held.append(announced)
        self._channel._incoming.number += 1
        self.announced.set()

    def release(self) -> None:
        self._channel._incoming.number -= len(self._held)
        for announced in self._held:
            self._post(announced)
        self._channel._post = self._post
