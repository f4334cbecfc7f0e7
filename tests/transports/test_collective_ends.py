"""The ends of transfers over gloo that are under way: aborts, groups that fail, closing."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
import transports.makers as makers
from transports.collective_pair import Held, announce, ends, link_of
from transports.gloo_backend import GlooBackend, over_gloo
from transports.shm_state import until

from rrfp import timeouts
from rrfp.errors import PeerLostError, TransportClosedError
from rrfp.testing.transport_checks import Pair, PairOptions
from rrfp.testing.transport_checks.pair import data, index_of, note, pass_on, receive, soon
from rrfp.transports.tunnel.p2p import FAREWELL


async def test_an_abort_ends_transfers_at_both_ends() -> None:
    """Sends that wait for a receive, and receives that wait for a send; no thread stays (the leak guard looks)."""
    async with ends() as (left, right):
        held = Held(right)
        sending = asyncio.create_task(left.send(1, data(torch.ones(3))))
        await soon(held.announced.wait(), "the announcement comes")
        await announce(right, ["float32", [3], False])
        await right.send(0, note(4))
        assert index_of(await receive(left)) == 4
        left.abort()
        with pytest.raises(TransportClosedError):
            await soon(sending, "the send ends")
        with pytest.raises(PeerLostError):
            await soon(right.receive(), "the loss is reported")


@pytest.mark.parametrize("direction", [(0, 1), (1, 0)], ids=["to it", "from it"])
async def test_a_group_that_fails_is_a_loss_when_the_base_transport_knows_no_other(
    direction: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came before is received first; the loss is reported once, and sends raise the same."""
    monkeypatch.setattr(timeouts, "FAREWELL_TIMEOUT_S", 0.05)
    async with ends() as (left, right):
        pair = Pair(left, right, makers.RUN_ID)
        assert index_of(await pass_on(pair, data(torch.ones(3), index=1))) == 1
        for one_way in (link_of(right).beside._incoming, link_of(right).beside._outgoing):
            one_way.group.abort()
        if direction == (0, 1):
            with pytest.raises(PeerLostError, match="rank 1 is lost: its tensors failed to arrive"):
                await soon(left.send(1, data(torch.ones(3))), "the send ends")
        else:
            await announce(right, ["float32", [3], False])
        with pytest.raises(PeerLostError, match="rank 1 is lost: its tensors failed to arrive") as raised:
            await soon(left.receive(), "the loss is reported")
        assert raised.value.peer == 1
        with pytest.raises(PeerLostError, match="rank 1 is lost: its tensors failed to arrive"):
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
        link = link_of(right)
        if order == "failure":
            link.beside._incoming.group.abort()
            await until(lambda: not link._arrivals.completing)
        await link_of(left).base.send(1, replace(note(), body={FAREWELL: True}))
        await left.send(1, note(5))
        assert index_of(await receive(right)) == 5 if order == "farewell" else True
        if order == "farewell":
            link.beside._incoming.group.abort()
        with pytest.raises(PeerLostError, match="it closed its end, but its tensors failed to arrive"):
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
    ranks = list(map(over_gloo, makers.contexts(PairOptions(ranks=3), rendezvous=makers.Store())))
    async with makers.started(*ranks):
        for rank, transport in enumerate(ranks):
            for peer in {0, 1, 2} - {rank}:
                await soon(transport.send(peer, data(torch.full((3,), float(rank)))), "sent")
        await soon(asyncio.gather(*(transport.close() for transport in ranks)), "all close")
