"""Two ends over gloo in one process, for tests of transport collective, and ways past their own checks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import transports.makers as makers

from rrfp.testing.transport_checks.pair import data
from rrfp.transports.base import Channel
from rrfp.transports.carried.announcements import EDGE
from rrfp.transports.collective.transport import CollectiveTransport


@asynccontextmanager
async def ends(**changes: Any) -> AsyncIterator[tuple[CollectiveTransport, CollectiveTransport]]:
    """Two started ends in this process, announcements over shm."""
    fields = {"rendezvous": makers.Store(), "allow_insecure": True, **changes}
    left, right = map(CollectiveTransport, makers.contexts(**fields))
    async with makers.started(left, right):
        yield left, right


async def announce(left: CollectiveTransport, *specs: Any, number: Any = 0, channel: Channel = Channel.FORWARD) -> None:
    """Send an announcement past the checks of ``left``'s own."""
    message = data(*(None for _ in specs), index=99, channel=channel)
    await left._carrier.send(1, replace(message, body={EDGE: [number, list(specs)]}))


class Held:
    """Keeps a receiver from posting anything."""

    def __init__(self, end: CollectiveTransport) -> None:
        self.announced = asyncio.Event()
        arrivals: Any = end._links[0]._arrivals
        self._arrivals, self._post = arrivals, arrivals._post_in_order
        self._edge: Any = None
        arrivals._post_in_order = self._hold

    def _hold(self, edge: Any) -> None:
        self._edge = edge
        self.announced.set()

    def release(self) -> None:
        self._arrivals._post_in_order = self._post
        self._post(self._edge)
