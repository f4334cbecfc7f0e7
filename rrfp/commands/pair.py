"""Two or three connected transports of one kind in this process: for the checks and the doctor."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rrfp.testing.transport_checks import Pair, PairOptions
from rrfp.transports.base import TransportContext
from rrfp.transports.registry import TransportSpec, create_transport
from rrfp.transports.rendezvous import LocalRendezvous
from rrfp.transports.secret import Secret

RUN_ID = "checks"


@asynccontextmanager
async def started_pair(
    spec: TransportSpec, options: PairOptions, secret: Secret | None = None, *, allow_insecure: bool = False
) -> AsyncIterator[Pair]:
    """A started pair, or three transports with ``options.ranks`` 3; all are aborted in the end.

    With a ``secret`` tensors may travel in plain text, within this process.
    """
    rendezvous, ranks = LocalRendezvous(), range(options.ranks)
    transports = [
        create_transport(
            spec,
            TransportContext(
                rank=rank,
                peers=tuple(peer for peer in ranks if peer != rank),
                run_id=RUN_ID,
                rendezvous=rendezvous,
                queue_bytes=options.queue_bytes,
                max_message_bytes=options.max_message_bytes,
                connect_timeout_s=10.0,
                allow_insecure=allow_insecure,
                secret=secret,
                plain_data=secret is not None,
            ),
        )
        for rank in ranks
    ]
    try:
        await asyncio.gather(*(transport.start() for transport in transports))
        left, right, *others = transports
        yield Pair(left, right, RUN_ID, third=others[0] if others else None)
    finally:
        for transport in transports:
            transport.abort()
