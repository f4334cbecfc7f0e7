"""The reordering transport ends as every transport does."""

from __future__ import annotations

import asyncio

import pytest
from transports.makers import contexts, started
from transports.reordering import reordered

from rrfp.errors import TransportClosedError
from rrfp.testing.transport_checks.pair import data, index_of, running, soon, stays_pending
from rrfp.transports.inproc import InprocTransport


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_close_and_abort_end_waiting_and_later_receives(how: str) -> None:
    make = reordered(InprocTransport, lambda count: 0)
    async with started(*map(make, contexts())) as pair:
        await pair.left.send(1, data(index=3))
        assert index_of(await soon(pair.right.receive(), "a message arrives")) == 3
        async with running(pair.right.receive()) as receiving:
            await stays_pending(receiving, "a message arrived that nobody sent")
            if how == "close":
                await pair.right.close()
            else:
                pair.right.abort()
            with pytest.raises(TransportClosedError):
                await soon(receiving, "the waiting receive ends")
        with pytest.raises(TransportClosedError):
            await soon(pair.right.receive(), "a later receive ends")
        await asyncio.sleep(0)
