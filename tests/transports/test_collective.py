"""Tensors over gloo: bad announcements, edges that fail or are not made, and the ends of transfers under way."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import transports.makers as makers

from rrfp.core import timeouts
from rrfp.errors import ConfigError, FrameError, PeerLostError, TransportClosedError, TransportError
from rrfp.testing.transport_checks import Pair, PairOptions
from rrfp.testing.transport_checks.pair import data, index_of, note, pass_on, receive, soon
from rrfp.transports.base import Channel, Plain, TransportContext
from rrfp.transports.collective.announcements import CREDIT, EDGE, FAREWELL
from rrfp.transports.collective.backends import choose_backend
from rrfp.transports.collective.gloo import GlooBackend
from rrfp.transports.collective.nccl import check_environment
from rrfp.transports.collective.transport import CollectiveTransport
from rrfp.transports.collective.wires import EdgeName
from rrfp.transports.device_copies import DeviceCopies
from rrfp.transports.inproc import InprocTransport
from rrfp.transports.rendezvous import LocalRendezvous

_LIMIT = 1 << 20


@asynccontextmanager
async def ends(**changes: Any) -> AsyncIterator[tuple[CollectiveTransport, CollectiveTransport]]:
    """Two started ends in this process, announcements over shm."""
    left, right = map(CollectiveTransport, makers.contexts(**({"rendezvous": makers.Store()} | changes)))
    async with makers.started(left, right):
        yield left, right


async def announce(left: CollectiveTransport, *specs: Any, number: Any = 0, channel: Channel = Channel.FORWARD) -> None:
    """Send an announcement past the checks of ``left``'s own."""
    message = data(*(None for _ in specs), index=99, channel=channel)
    await left._carrier.send(1, replace(message, body={EDGE: [number, list(specs)]}))


BAD: dict[str, tuple[str, Plain]] = {
    "no array": (EDGE, "many"),
    "too short": (EDGE, [0]),
    "no number": (f"{EDGE}.number", ["0", []]),
    "negative": (f"{EDGE}.number", [-1, []]),
    "no specs": ("tensors", [0, 5]),
    "too many specs": ("tensors", [0, [None, None]]),
    "dtype": ("tensors[0].dtype", [0, [["object", [4], False]]]),
    "shape": ("tensors[0].shape", [0, [["uint8", [-4], False]]]),
    "gradient": ("tensors[0].requires_grad", [0, [["uint8", [4], True]]]),
    "too large": ("tensors", [0, [["uint8", [_LIMIT + 1], False]]]),
}


@pytest.mark.parametrize(("field", "entry"), BAD.values(), ids=BAD)
async def test_a_bad_announcement_is_one_frame_error_and_the_next_message_arrives(field: str, entry: Plain) -> None:
    """One whose number is good takes that number: its tensors may have been posted."""
    async with ends(max_message_bytes=_LIMIT) as (left, right):
        await left._carrier.send(1, replace(data(None), body={EDGE: entry}))
        with pytest.raises(FrameError) as raised:
            await soon(right.receive(), "the bad announcement is raised")
        assert (raised.value.peer, raised.value.field) == (0, field)
        assert right.statistics().dropped_frames == 1
        if isinstance(entry, list) and len(entry) == 2 and entry[0] == 0:
            left._links[1]._sender._edge.number += 1  # type: ignore[union-attr]
        pair = Pair(left, right, makers.RUN_ID)
        assert index_of(await pass_on(pair, data(torch.ones(3), index=5))) == 5


async def test_announcements_on_control_again_or_with_the_tensor_itself_are_refused() -> None:
    spec: list[Plain] = ["float32", [3], False]
    async with ends() as (left, right):
        carrier = left._carrier
        await announce(left, spec, channel=Channel.CONTROL)
        await carrier.send(1, replace(data(torch.ones(3)), body={EDGE: [0, [spec]]}))
        await announce(left, spec, number=0)
        for field in (EDGE, "tensors[0]", f"{EDGE}.number"):
            with pytest.raises(FrameError) as raised:
                await soon(right.receive(), f"{field} is raised")
            assert raised.value.field == field


@pytest.mark.parametrize("entry", [["forward", 1], ["sideways", 1, 1], ["forward", -1, 1]], ids=str)
async def test_a_bad_credit_is_one_frame_error(entry: Plain) -> None:
    async with ends() as (left, right):
        await left._carrier.send(1, replace(note(), body={CREDIT: entry}))
        with pytest.raises(FrameError, match=CREDIT):
            await soon(right.receive(), "the bad credit is raised")


@pytest.mark.parametrize("name", [EDGE, CREDIT, FAREWELL])
async def test_a_body_with_an_entry_of_the_transport_s_own_is_refused(name: str) -> None:
    async with ends() as (left, _):
        with pytest.raises(ConfigError, match=name):
            await left.send(1, replace(note(), body={name: 1}))


async def test_an_announcement_that_overtook_an_earlier_one_waits_for_it() -> None:
    """The edge is one FIFO, whatever channels the announcements came on."""
    async with ends() as (left, right):
        edge = left._links[1]._sender._edge
        assert edge is not None
        sent = [edge.post([torch.full((3,), float(number))]) for number in range(2)]
        await announce(left, ["float32", [3], False], number=1, channel=Channel.BACKWARD)
        await left.send(1, note(7))
        assert index_of(await receive(right)) == 7
        assert right._links[0]._arrivals.posted == 0
        await announce(left, ["float32", [3], False], number=0)
        values = {message.channel: message.tensors[0] for message in [await receive(right), await receive(right)]}
        assert values[Channel.FORWARD].tolist() == [0.0] * 3  # type: ignore[union-attr]
        assert values[Channel.BACKWARD].tolist() == [1.0] * 3  # type: ignore[union-attr]
        await soon(asyncio.gather(*sent), "both transfers end")


async def test_a_message_without_tensors_keeps_its_place_behind_one_with_tensors() -> None:
    async with ends() as (left, right):
        edge = left._links[1]._sender._edge
        assert edge is not None
        await announce(left, ["float32", [3], False])
        await left.send(1, data(index=5))
        await left.send(1, note(7))
        assert index_of(await receive(right)) == 7
        await soon(edge.post([torch.ones(3)]), "the transfer ends")
        assert [index_of(await receive(right)) for _ in range(2)] == [99, 5]


async def test_peers_without_an_edge_exchange_tensors_over_the_carrier() -> None:
    async with ends(data_peers=()) as (left, right):
        assert left._links[1]._sender._edge is None
        pair = Pair(left, right, makers.RUN_ID)
        message = await pass_on(pair, data(torch.arange(4.0), None, torch.empty(0)))
        assert message.tensors[0].tolist() == [0.0, 1.0, 2.0, 3.0]  # type: ignore[union-attr]


async def test_a_send_cancelled_after_its_announcement_waits_until_its_memory_is_free() -> None:
    async with ends() as (left, right):
        held = Held(right)
        tensor = torch.ones(3)
        sending = asyncio.create_task(left.send(1, data(tensor, index=3)))
        await soon(held.announced.wait(), "the announcement comes")
        sending.cancel()
        done, _ = await asyncio.wait({sending}, timeout=0.05)
        assert not done
        held.release()
        assert index_of(await receive(right)) == 3
        await soon(asyncio.wait({sending}), "the send ends")
        assert sending.cancelled()


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
    monkeypatch.setattr(timeouts, "LAST_WORDS_S", 0.05)
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


async def test_an_announcement_for_which_there_is_no_memory_ends_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timeouts, "LAST_WORDS_S", 0.05)

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


async def test_a_peer_that_makes_no_edge_is_named_in_time() -> None:
    left, right = makers.contexts(rendezvous=makers.Store(), connect_timeout_s=0.5)
    one = CollectiveTransport(left)
    other = CollectiveTransport(right, Refusing(1))
    started = asyncio.gather(one.start(), other.start(), return_exceptions=True)
    first, second = await soon(started, "both give up")
    assert isinstance(first, TransportError)
    assert str(first).startswith("no edge with rank 1 within 0.5 s: ")
    assert isinstance(second, TransportError)
    assert str(second) == "no edge with rank 0 within 0.5 s: no network here"


class Refusing(GlooBackend):
    """Cannot make edges."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, "127.0.0.1")

    def connect(self, edge: EdgeName, store: Any, timeout_s: float) -> Any:
        raise RuntimeError("no network here")


@pytest.mark.parametrize("how", ["cancel", "abort"])
async def test_a_start_that_waits_for_an_edge_can_be_given_up(how: str) -> None:
    """No thread waits on for the peer (the leak guard looks)."""
    entered = threading.Event()

    class Waiting(GlooBackend):
        def connect(self, edge: EdgeName, store: Any, timeout_s: float) -> Any:
            entered.set()
            return super().connect(edge, store, timeout_s)

    rendezvous = LocalRendezvous()
    await rendezvous.publish(f"collective/{makers.RUN_ID}/0/1", b"gloo")
    context = makers.contexts(rendezvous=rendezvous)[0]
    one = CollectiveTransport(context, Waiting(0, "127.0.0.1"))
    one._carrier = InprocTransport(TransportContext(0, (), makers.RUN_ID, LocalRendezvous()))
    starting = asyncio.create_task(one.start())
    await soon(asyncio.to_thread(entered.wait, 10), "the start waits for an edge")
    if how == "abort":
        one.abort()
        with pytest.raises(TransportClosedError):
            await soon(starting, "start ends")
    else:
        starting.cancel()
        await soon(asyncio.wait({starting}), "start ends")
        assert starting.cancelled()


async def test_edges_beyond_loopback_need_allow_insecure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrfp.transports.collective.backends.interface_towards_master", lambda: "192.0.2.7")
    context = makers.contexts(single_host=False)[0]
    with pytest.raises(ConfigError, match=r"collective would listen on 192\.0\.2\.7.*allow_insecure=True"):
        await CollectiveTransport(context).start()


class Other(GlooBackend):
    """Says that it is another one."""

    name = "nccl"


async def test_ranks_with_different_backends_are_named() -> None:
    left, right = makers.contexts(rendezvous=makers.Store())
    one, other = CollectiveTransport(left), CollectiveTransport(right, Other(1, "127.0.0.1"))
    errors = await soon(asyncio.gather(one.start(), other.start(), return_exceptions=True), "both give up")
    assert [type(error) for error in errors] == [ConfigError, ConfigError]
    assert str(errors[0]).startswith("rank 0 moves tensors by gloo, rank 1 by b'nccl': ")


@pytest.mark.parametrize(
    ("environ", "refused"),
    [
        ({}, ""),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8", "NCCL_LAUNCH_ORDER_IMPLICIT": "0"}, ""),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "CUDA_DEVICE_MAX_CONNECTIONS is '1', must be unset or at least 8"),
        ({"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, "NCCL_LAUNCH_ORDER_IMPLICIT is '1', must be unset or '0'"),
    ],
    ids=["none", "good", "one queue", "implicit order"],
)
def test_settings_under_which_nccl_edges_deadlock_are_refused_by_name(environ: dict[str, str], refused: str) -> None:
    if not refused:
        check_environment(environ)
        return
    with pytest.raises(ConfigError, match=refused) as raised:
        check_environment(environ)
    assert "transport='auto', which copies tensors through host memory" in str(raised.value)


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch has NCCL")
async def test_a_rank_on_cuda_without_nccl_is_told_what_is_left() -> None:
    class Copies:
        kind, index = "cuda", 0

    with pytest.raises(ConfigError, match="this torch has no NCCL; 'auto' copies tensors through host memory"):
        await choose_backend(replace(makers.contexts()[0], copies=cast(DeviceCopies, Copies())))


EXITS = """
import asyncio, torch
import transports.makers as makers
from rrfp.transports.collective.gloo import GlooBackend
from rrfp.transports.collective.store import RendezvousStore
from rrfp.transports.collective.wires import EdgeName
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


async def test_three_ranks_close_at_once_and_deliver() -> None:
    contexts = makers.contexts(PairOptions(ranks=3), rendezvous=makers.Store())
    ranks = list(map(CollectiveTransport, contexts))
    async with makers.started(*ranks):
        for rank, transport in enumerate(ranks):
            for peer in {0, 1, 2} - {rank}:
                await soon(transport.send(peer, data(torch.full((3,), float(rank)))), "sent")
        await soon(asyncio.gather(*(transport.close() for transport in ranks)), "all close")
