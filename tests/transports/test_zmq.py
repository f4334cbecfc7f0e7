"""What is particular to zmq: strangers, addresses, peers that never come, and what is left afterwards."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transports.makers as makers
import zmq

from rrfp.errors import ConfigError, FrameError, TransportClosedError, TransportError
from rrfp.testing.transport_checks import Pair, PairOptions
from rrfp.testing.transport_checks.pair import data, index_of, pass_on, soon
from rrfp.transports.base import Channel
from rrfp.transports.flow import HomeLoop, Window, cost_of
from rrfp.transports.linked import MAX_PENDING_FRAME_ERRORS
from rrfp.transports.wire import Codec
from rrfp.transports.zmq.inlet import identity_of
from rrfp.transports.zmq.pieces import INLINE_BYTES, MAX_PART_BYTES, PIECE_BYTES, cut, split_inline
from rrfp.transports.zmq.transport import ZmqTransport, endpoint_key


@asynccontextmanager
async def stranger(pair: Pair, identity: bytes) -> AsyncIterator[zmq.Socket[bytes]]:
    """A connection of nobody's to the right transport."""
    endpoint = await pair.right.context.rendezvous.lookup(endpoint_key(pair.right.context, 1), 1.0)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    socket.connect(endpoint.decode())
    try:
        yield socket
    finally:
        context.destroy(linger=0)


def abstract_sockets() -> str:
    return Path("/proc/net/unix").read_text()


def header_of(pair: Pair, **changes: object) -> bytes:
    header, _ = Codec(replace(pair.left.context, **changes)).encode(data(torch.ones(1)))  # type: ignore[arg-type]
    return header


@pytest.mark.parametrize(
    ("identity", "changes", "field"),
    [
        (b"stranger", {}, "sender"),
        (b"stranger", {"run_id": "other"}, "run_id"),
        (b"stranger", {"restart": 4}, "restart"),
        (b"stranger", {"rank": 5}, "sender"),
    ],
    ids=["not its connection", "another run", "another restart", "unknown rank"],
)
async def test_strangers_are_refused_and_peers_go_on(identity: bytes, changes: dict[str, object], field: str) -> None:
    async with makers.MAKERS["zmq-ipc"](PairOptions()) as pair, stranger(pair, identity) as socket:
        socket.send_multipart([header_of(pair, **changes), b"\0" * 4], flags=zmq.NOBLOCK)
        with pytest.raises(FrameError) as caught:
            await soon(pair.right.receive(), "the frame is reported")
        assert caught.value.field == field
        socket.close(linger=0)
        assert index_of(await pass_on(pair, data(torch.ones(2), index=1))) == 1


async def test_a_strangers_raw_pieces_and_floods_are_bounded() -> None:
    count = 10 * MAX_PENDING_FRAME_ERRORS
    async with makers.MAKERS["zmq-ipc"](PairOptions()) as pair, stranger(pair, b"flood") as socket:
        for _ in range(count):
            socket.send(b"noise", flags=zmq.NOBLOCK)
        while pair.right.statistics().dropped_frames < count:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for _ in range(MAX_PENDING_FRAME_ERRORS):
            with pytest.raises(FrameError, match="flood"):
                await soon(pair.right.receive(), "a frame is reported")
        assert index_of(await pass_on(pair, data(index=1))) == 1


async def test_a_part_beyond_the_largest_piece_is_not_even_read() -> None:
    """libzmq ends the connection of whoever announces one; the peers' connections stay."""
    async with makers.MAKERS["zmq-ipc"](PairOptions()) as pair, stranger(pair, b"huge") as socket:
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.send(bytes(MAX_PART_BYTES + 1), flags=zmq.NOBLOCK)
        async with asyncio.timeout(10):
            while not monitor.poll(0):  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert index_of(await pass_on(pair, data(torch.ones(2), index=1))) == 1
        assert pair.right.statistics().dropped_frames == 0


async def test_a_message_cut_short_is_reported_and_the_next_one_arrives() -> None:
    """A peer with a bug starts a message in the middle of another, then sends a piece too many."""
    async with makers.MAKERS["zmq-ipc"](PairOptions()) as pair:
        assert pair.inject is not None
        codec = Codec(pair.left.context)
        long, _ = codec.encode(data(torch.zeros(INLINE_BYTES + 1, dtype=torch.uint8), index=1))
        await pair.inject(Channel.FORWARD, long, [b""])
        await pair.inject(Channel.FORWARD, codec.encode(data(index=2))[0], [b""])
        with pytest.raises(FrameError, match="ends before"):
            await soon(pair.right.receive(), "the cut is reported")
        assert index_of(await soon(pair.right.receive(), "the next message arrives")) == 2
        await pair.inject(Channel.FORWARD, b"stray", [])
        with pytest.raises(FrameError, match="piece of no message"):
            await soon(pair.right.receive(), "the stray piece is reported")


async def test_a_lost_message_shows_in_the_sequence() -> None:
    async with makers.MAKERS["zmq-ipc"](PairOptions()) as pair:
        assert pair.inject is not None
        header, _ = Codec(pair.left.context).encode(data(), 3)
        await pair.inject(Channel.FORWARD, header, [b""])
        with pytest.raises(FrameError) as caught:
            await soon(pair.right.receive(), "the gap is reported")
        assert (caught.value.peer, caught.value.field) == (0, "sequence")


async def test_a_peer_that_never_comes_is_named() -> None:
    left, _ = makers.contexts(connect_timeout_s=0.05)
    transport = ZmqTransport(left)
    with pytest.raises(TransportError, match="rank 1 did not connect"):
        await transport.start()
    with pytest.raises(TransportClosedError):
        await transport.receive()
    await transport.close()


async def test_a_peer_that_published_but_does_not_answer_is_named() -> None:
    left, _ = makers.contexts(connect_timeout_s=0.2)
    await left.rendezvous.publish(endpoint_key(left, 1), b"ipc://@rrfp-nobody-listens-here")
    with pytest.raises(TransportError, match="no connection with rank 1"):
        await ZmqTransport(left).start()


@pytest.mark.parametrize("endpoint", [b"\xff", b"nonsense", b"tcp://127.0.0.1:none"])
async def test_an_endpoint_that_is_none_is_named_with_its_rank(endpoint: bytes) -> None:
    left, _ = makers.contexts()
    await left.rendezvous.publish(endpoint_key(left, 1), endpoint)
    with pytest.raises(TransportError, match=f"{re.escape(repr(endpoint))}, which rank 1 published"):
        await ZmqTransport(left).start()


async def test_a_message_that_memory_cannot_hold_is_reported_and_the_next_one_arrives() -> None:
    async with makers.MAKERS["zmq-ipc"](PairOptions(max_message_bytes=1 << 60)) as pair:
        assert pair.inject is not None
        header = Codec(pair.left.context).seal("output", "forward", 0, None, None, [["uint8", [1 << 55], False]], {})
        await pair.inject(Channel.FORWARD, header, [b""])
        with pytest.raises(FrameError, match=f"rank 0: frames: need {1 << 55} bytes, which cannot be allocated"):
            await soon(pair.right.receive(), "the message is reported")
        assert index_of(await pass_on(pair, data(index=1))) == 1


async def test_start_can_be_cancelled() -> None:
    left, _ = makers.contexts()
    transport = ZmqTransport(left)
    starting = asyncio.create_task(transport.start())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    with pytest.raises(TransportClosedError):
        await transport.start()


async def test_an_address_that_others_reach_needs_allow_insecure() -> None:
    left, right = makers.contexts(connect_timeout_s=1.0)
    for address in ("0.0.0.0", "203.0.113.7"):
        with pytest.raises(ConfigError, match="allow_insecure"):
            await ZmqTransport(left, address).start()
    insecure = [ZmqTransport(replace(context, allow_insecure=True), "0.0.0.0") for context in (left, right)]
    async with makers.started(*insecure) as pair:
        assert index_of(await pass_on(pair, data(index=4))) == 4


async def test_several_hosts_bind_the_interface_towards_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    left, right = makers.contexts(single_host=False)
    async with makers.started(ZmqTransport(left), ZmqTransport(right)):
        assert (await left.rendezvous.lookup(endpoint_key(left, 0), 1.0)).startswith(b"tcp://127.0.0.1:")


async def test_nothing_is_left_afterwards() -> None:
    """Descriptors, threads and addresses of a transport end with it, whether it was closed or aborted while busy."""
    for how in ("close", "abort"):
        descriptors, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
        async with makers.MAKERS["zmq-ipc"](PairOptions()) as pair:
            address = (
                (await pair.right.context.rendezvous.lookup(endpoint_key(pair.right.context, 1), 1.0))
                .decode()
                .removeprefix("ipc://")
            )
            assert address in abstract_sockets()
            await pass_on(pair, data(torch.zeros(1 << 20)))
            sending = asyncio.create_task(pair.left.send(1, data(torch.zeros(40 << 20))))
            await asyncio.sleep(0)
            if how == "close":
                sending.cancel()
                await asyncio.wait({sending})
                await asyncio.gather(pair.left.close(), pair.right.close())
        await asyncio.wait({sending})
        assert sending.cancelled() or isinstance(sending.exception(), TransportClosedError)
        assert set(os.listdir("/proc/self/fd")) == descriptors
        assert set(threading.enumerate()) == threads
        assert address not in abstract_sockets()


async def test_queued_bytes_are_never_negative_whatever_a_peer_returns() -> None:
    window = Window(1 << 20, HomeLoop())
    for _ in range(3):
        await window.acquire(cost_of(10))
    window.release(3 * cost_of(10) - 1, messages=0)
    assert window.tensor_bytes == 0


async def test_a_window_holds_messages_that_fill_it_exactly_and_empty_ones_only_so_many() -> None:
    window = Window(1 << 20, HomeLoop())
    assert [window.try_acquire(cost_of(1 << 19)) for _ in range(3)] == [True, True, False]
    window = Window(1 << 20, HomeLoop())
    assert sum(window.try_acquire(cost_of(0)) for _ in range(5000)) == (1 << 20) // cost_of(0)


def test_routing_ids_differ() -> None:
    assert len({identity_of(stage, channel) for stage in (1, 11) for channel in Channel}) == 6


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0],
        [0, 0],
        [1],
        [INLINE_BYTES],
        [INLINE_BYTES + 1],
        [PIECE_BYTES],
        [PIECE_BYTES + 1, 0, 5],
        [5, 3 * PIECE_BYTES],
    ],
)
def test_pieces_cover_every_byte_in_order(sizes: list[int]) -> None:
    inline, rest = split_inline(sizes)
    pieces = [*inline, *rest]
    assert pieces == list(cut(sizes))
    assert sum(piece.num_bytes for piece in inline) <= INLINE_BYTES
    for index, size in enumerate(sizes):
        covered = [at for piece in pieces if piece.frame == index for at in (piece.start, piece.stop)]
        assert (covered[::2], covered[1::2]) == (
            list(range(0, size, PIECE_BYTES)),
            [min(start + PIECE_BYTES, size) for start in range(0, size, PIECE_BYTES)],
        )
