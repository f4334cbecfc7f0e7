"""Connections of nobody's to the socket of a rank."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import zmq

from rrfp.testing.transport_checks import Pair
from rrfp.transports.zmq.transport import endpoint_key


@asynccontextmanager
async def stranger(pair: Pair, identity: bytes) -> AsyncIterator[zmq.Socket[bytes]]:
    """A connection of nobody's to the right transport."""
    endpoint = await pair.right.context.rendezvous.lookup(endpoint_key(pair.right.context, 1), 1.0)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    socket.connect(endpoint.decode().split(" ")[0])
    try:
        yield socket
    finally:
        context.destroy(linger=0)
