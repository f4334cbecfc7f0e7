"""The ends of transfers over gloo that are under way: aborts, edges that fail, closing, the end of the process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import transports.makers as makers
from transports.collective_pair import Held, announce, ends
from transports.shm_state import until

from rrfp import timeouts
from rrfp.errors import PeerLostError, TransportClosedError
from rrfp.testing.transport_checks import Pair, PairOptions
from rrfp.testing.transport_checks.pair import data, index_of, note, pass_on, receive, soon
from rrfp.transports.carried.announcements import EDGE, FAREWELL
from rrfp.transports.collective.gloo import GlooBackend
from rrfp.transports.collective.transport import CollectiveTransport


async def test_an_abort_ends_transfers_at_both_ends() -> None:
    """Sends that wait for a receive, and receives that wait for a send; no thread stays (the leak guard looks)."""
    async with ends() as (left, right):
        held = Held(right)
        sending = asyncio.create_task(left.send(1, data(torch.ones(3))))
        await soon(held.announced.wait(), "the announcement comes")
        await right._carrier.send(0, replace(data(None), body={EDGE: [0, [["float32", [3], False]]]}))
        await right.send(0, note(4))
        assert index_of(await receive(left)) == 4
        left.abort()
        with pytest.raises(TransportClosedError):
            await soon(sending, "the send ends")
        with pytest.raises(PeerLostError):
            await soon(right.receive(), "the loss is reported")


@pytest.mark.parametrize("direction", [(0, 1), (1, 0)], ids=["to it", "from it"])
async def test_an_edge_that_fails_is_a_loss_when_the_carrier_knows_no_other(
    direction: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came before is received first; the loss is reported once, and sends raise the same."""
    monkeypatch.setattr(timeouts, "FAREWELL_TIMEOUT_S", 0.05)
    async with ends() as (left, right):
        pair = Pair(left, right, makers.RUN_ID)
        assert index_of(await pass_on(pair, data(torch.ones(3), index=1))) == 1
        edges = {edge._wire for edge in right._links[0]._edges}
        for wire in edges:
            wire.abort()
        if direction == (0, 1):
            with pytest.raises(PeerLostError, match="rank 1 is lost: its edge failed"):
                await soon(left.send(1, data(torch.ones(3))), "the send ends")
        else:
            await right._carrier.send(0, replace(data(None), body={EDGE: [0, [["float32", [3], False]]]}))
        with pytest.raises(PeerLostError, match="rank 1 is lost: its edge failed") as raised:
            await soon(left.receive(), "the loss is reported")
        assert raised.value.peer == 1
        with pytest.raises(PeerLostError, match="rank 1 is lost: its edge failed"):
            await left.send(1, note())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(left.receive(), 0.1)


@pytest.mark.parametrize("order", ["farewell", "failure"])
async def test_a_transfer_that_fails_before_its_sender_left_in_order_is_a_loss(order: str) -> None:
    """The sender holds it for delivered, so nothing else would say that a message is missing."""
    async with ends() as (left, right):
        await announce(left, ["float32", [3], False])
        await left.send(1, note(4))
        assert index_of(await receive(right)) == 4
        wire = right._links[0]._arrivals._edge._wire  # type: ignore[union-attr]
        if order == "failure":
            wire.abort()
            await until(lambda: right._links[0]._arrivals.posted == 0)
        await left._carrier.send(1, replace(note(), body={FAREWELL: True}))
        await left.send(1, note(5))
        assert index_of(await receive(right)) == 5 if order == "farewell" else True
        wire.abort()
        with pytest.raises(PeerLostError, match="it closed its end, but its edge failed before"):
            await soon(right.receive(), "the loss is reported")


async def test_an_announcement_for_which_there_is_no_memory_ends_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timeouts, "FAREWELL_TIMEOUT_S", 0.05)

    def full(self: GlooBackend, spec: object) -> torch.Tensor:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(GlooBackend, "empty", full)
    async with ends() as (left, right):
        sending = asyncio.create_task(left.send(1, data(torch.ones(3))))
        with pytest.raises(PeerLostError, match="not enough memory"):
            await soon(right.receive(), "the loss is reported")
        right.abort()
        with pytest.raises(PeerLostError):
            await soon(sending, "the send ends")


async def test_three_ranks_close_at_once_and_deliver() -> None:
    contexts = makers.contexts(PairOptions(ranks=3), rendezvous=makers.Store(), allow_insecure=True)
    ranks = list(map(CollectiveTransport, contexts))
    async with makers.started(*ranks):
        for rank, transport in enumerate(ranks):
            for peer in {0, 1, 2} - {rank}:
                await soon(transport.send(peer, data(torch.full((3,), float(rank)))), "sent")
        await soon(asyncio.gather(*(transport.close() for transport in ranks)), "all close")


EXITS = """
import asyncio, torch
import transports.makers as makers
from rrfp.transports.collective.gloo import GlooBackend
from rrfp.transports.collective.transport import RendezvousStore
from rrfp.transports.carried.wires import EdgeName
from rrfp.transports.rendezvous import LocalRendezvous

async def main():
    store, edge = RendezvousStore(LocalRendezvous(), "", 10.0), EdgeName(0, 1)
    stores = [store, RendezvousStore(store._rendezvous, "", 10.0)]
    connects = [asyncio.to_thread(GlooBackend(rank, "127.0.0.1").connect, edge, stores[rank], 10.0) for rank in (0, 1)]
    return stores, await asyncio.gather(*connects)

kept = asyncio.run(main())
kept[1][1].post(0, [torch.ones(3)], print)
"""


def test_a_process_that_leaves_a_transfer_under_way_ends_in_order() -> None:
    """A thread that came back from gloo into an ending interpreter would end the process by SIGABRT."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(
        [sys.executable, "-c", EXITS], capture_output=True, text=True, timeout=50, check=False, env=environment
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "Application timeout caused pair closure\n"
