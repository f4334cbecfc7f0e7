"""Two transports of one kind that are each other's only peer, in this process: what checks and the doctor try."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rrfp.testing.transport_checks import Pair, PairOptions
from rrfp.transports.base import TransportContext
from rrfp.transports.registry import TransportSpec, create_transport
from rrfp.transports.rendezvous import LocalRendezvous

RUN_ID = "checks"


@asynccontextmanager
async def started_pair(spec: TransportSpec, options: PairOptions) -> AsyncIterator[Pair]:
    """A started pair; both are aborted in the end.

    Raises:
        ConfigError: for an unknown name, or something that does not make a Transport.
    """
    rendezvous = LocalRendezvous()
    left, right = (
        create_transport(
            spec,
            TransportContext(
                rank=rank,
                peers=(1 - rank,),
                run_id=RUN_ID,
                rendezvous=rendezvous,
                queue_bytes=options.queue_bytes,
                max_message_bytes=options.max_message_bytes,
                connect_timeout_s=10.0,
            ),
        )
        for rank in (0, 1)
    )
    try:
        await asyncio.gather(left.start(), right.start())
        yield Pair(left, right, RUN_ID)
    finally:
        left.abort()
        right.abort()
