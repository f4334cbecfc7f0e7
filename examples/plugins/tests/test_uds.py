"""The transport keeps the contract of transports: every check of the public suite runs, none is skipped."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
import uvloop
from relay import RelayingRendezvous
from rrfp_plugin_example import UdsTransport
from rrfp_plugin_example.uds.address import connect
from rrfp_plugin_example.uds.records import HELLO, Record

from rrfp.errors import ConfigError, FrameError, TransportClosedError, TransportError
from rrfp.testing.transport_checks import ALL_CHECKS, Check, NotOfferedError, Pair, PairOptions, run_transport_checks
from rrfp.transports import Channel, Codec, LocalRendezvous, Message, MessageKind, TransportContext

RUN_ID = "checks"

# torch warns about complex32, which the checks send.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def contexts(options: PairOptions | None = None, **changes: Any) -> list[TransportContext]:
    """The contexts of ranks that are each other's peers."""
    options = options or PairOptions()
    fields: dict[str, Any] = {
        "run_id": RUN_ID,
        "rendezvous": LocalRendezvous(),
        "queue_bytes": options.queue_bytes,
        "max_message_bytes": options.max_message_bytes,
        "connect_timeout_s": 10.0,
    }
    ranks = range(options.ranks)
    return [
        TransportContext(rank=rank, peers=tuple(peer for peer in ranks if peer != rank), **(fields | changes))
        for rank in ranks
    ]


@asynccontextmanager
async def make_pair(options: PairOptions) -> AsyncIterator[Pair]:
    """A started pair, with all that the checks can use."""
    async with AsyncExitStack() as stack:
        rendezvous = RelayingRendezvous(stack)
        transports = [
            UdsTransport(context)
            for context in contexts(options, rendezvous=rendezvous, heartbeat_s=0.3, patience_s=1.0)
        ]
        for transport in transports:
            stack.callback(transport.abort)
        await asyncio.gather(*(transport.start() for transport in transports))
        left, right, *others = transports

        async def inject(channel: Channel, header: bytes, frames: Sequence[bytes]) -> None:
            record = Record(header, [memoryview(frame) for frame in frames])
            left._peers[1]._connections[channel].post(record)

        third = others[0] if others else None
        yield Pair(left, right, RUN_ID, inject=inject, silence=rendezvous.silence, third=third)


@asynccontextmanager
async def make_direct_pair(options: PairOptions) -> AsyncIterator[Pair]:
    """A started pair without a relay, as in training."""
    transports = [UdsTransport(context) for context in contexts(options)]
    try:
        await asyncio.gather(*(transport.start() for transport in transports))
        left, right, *others = transports
        yield Pair(left, right, RUN_ID, third=others[0] if others else None)
    finally:
        for transport in transports:
            transport.abort()


@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_contract(check: Check) -> None:
    with suppress(NotOfferedError):  # options such as `deliver_to`
        await check(make_pair)


def test_contract_on_uvloop_without_a_relay() -> None:
    skipped = uvloop.run(run_transport_checks(make_direct_pair))
    assert set(skipped) == {"check_silent_peer", "check_bad_frames"}  # they need the relay's pair, as above


async def test_nothing_is_left_behind() -> None:
    def unix_sockets() -> int:
        gc.collect()
        targets = (os.path.realpath(f"/proc/self/fd/{entry}") for entry in os.listdir("/proc/self/fd"))
        return sum("socket:" in target for target in targets)

    before = unix_sockets()
    for how in ("close", "abort"):
        async with make_direct_pair(PairOptions(ranks=3)) as pair:
            assert unix_sockets() == before + 18  # three connections between every two ranks, and no listener any more
            if how == "close":
                for transport in (pair.left, pair.right, pair.third):
                    assert transport is not None
                    await transport.close()
        assert unix_sockets() == before


async def test_ranks_of_several_hosts_are_refused() -> None:
    (context, _) = contexts(single_host=False)
    with pytest.raises(ConfigError, match="joins the ranks of one host: use zmq"):
        await UdsTransport(context).start()


async def test_a_peer_that_does_not_come_is_named() -> None:
    (context, _) = contexts(connect_timeout_s=0.05)
    with pytest.raises(TransportError, match=r"rank 1 did not connect: no rank published .* within 0\.0"):
        await UdsTransport(context).start()


@pytest.mark.parametrize("rank", [0, 1], ids=["connects", "accepts"])
async def test_an_aborted_start_raises(rank: int) -> None:
    transport = UdsTransport(contexts(connect_timeout_s=0.3)[rank])
    starting = asyncio.create_task(transport.start())
    await asyncio.sleep(0)
    transport.abort()
    with pytest.raises(TransportClosedError):
        await starting


class Published(LocalRendezvous):
    """Keeps the first address."""

    def __init__(self) -> None:
        super().__init__()
        self.address: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def publish(self, key: str, value: bytes) -> None:
        if not self.address.done():
            self.address.set_result(value)
        await super().publish(key, value)


@pytest.mark.parametrize("greeting", ["another run", "no hello", "no greeting at all"])
async def test_a_connection_that_is_no_peers_is_refused_and_the_start_goes_on(greeting: str) -> None:
    rendezvous = Published()
    first, second = contexts(rendezvous=rendezvous)
    late, early = UdsTransport(first), UdsTransport(second)
    async with AsyncExitStack() as stack:
        stack.callback(late.abort)
        stack.callback(early.abort)
        starting = asyncio.create_task(early.start())
        intruder = stack.enter_context(connect(await rendezvous.address))
        if greeting != "no greeting at all":
            (foreign, _) = contexts(run_id="another" if greeting == "another run" else RUN_ID)
            kind = HELLO if greeting == "another run" else MessageKind.PROBE.value
            _write(intruder, Record(Codec(foreign).seal(kind, Channel.CONTROL.value)))
        await asyncio.gather(late.start(), starting)
        if greeting != "no greeting at all":
            with pytest.raises(FrameError, match="run_id" if greeting == "another run" else "kind"):
                await early.receive()
        await late.send(1, Message(Channel.CONTROL, MessageKind.PROBE))
        assert (await early.receive()).sender == 0
        assert _is_ended(intruder)


def _write(connection: socket.socket, record: Record) -> None:
    connection.sendmsg(record.next_buffers)


def _is_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
