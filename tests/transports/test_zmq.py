"""What is particular to zmq: strangers, addresses, peers that never come, and what is left afterwards."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transports.makers as makers
import zmq
from transports.strangers import stranger

from rrfp.errors import ConfigError, FrameError, TransportClosedError, TransportError
from rrfp.testing.transport_checks import PairOptions
from rrfp.testing.transport_checks.pair import data, index_of, pass_on, soon
from rrfp.transports.base import Channel
from rrfp.transports.links.flow import HomeLoop, Window, cost_of
from rrfp.transports.wire.codec import Codec
from rrfp.transports.zmq.inlet import identity_of
from rrfp.transports.zmq.pieces import INLINE_BYTES, MAX_PART_BYTES, PIECE_BYTES, cut, split_inline
from rrfp.transports.zmq.transport import ZmqTransport, endpoint_key


def abstract_sockets() -> str:
    return Path("/proc/net/unix").read_text()


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


@pytest.mark.parametrize(
    "endpoint", [b"\xff", b"nonsense", b"inproc://here", b"tcp://127.0.0.1:none", b"a b c d e", b"ipc://@x - zz"]
)
async def test_an_endpoint_that_is_none_is_named_with_its_rank(endpoint: bytes) -> None:
    left, _ = makers.contexts(allow_insecure=True)
    await left.rendezvous.publish(endpoint_key(left, 1), endpoint)
    with pytest.raises(
        TransportError, match=f"{re.escape(repr(endpoint))}, which rank 1 or another program wrote to the store"
    ):
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


async def test_tcp_needs_a_secret_or_allow_insecure_loopback_included() -> None:
    left, right = makers.contexts(connect_timeout_s=1.0)
    for address in ("127.0.0.1", "0.0.0.0", "203.0.113.7"):
        with pytest.raises(ConfigError, match=f"tcp at {address} without auth.*`rrfp secret`.*allow_insecure"):
            await ZmqTransport(left, address).start()
    insecure = [ZmqTransport(replace(context, allow_insecure=True), "0.0.0.0") for context in (left, right)]
    async with makers.started(*insecure) as pair:
        assert index_of(await pass_on(pair, data(index=4))) == 4


async def test_a_tcp_endpoint_of_a_peer_needs_one_too() -> None:
    left, _ = makers.contexts()
    await left.rendezvous.publish(endpoint_key(left, 1), b"tcp://127.0.0.1:5 - 00")
    with pytest.raises(ConfigError, match=r"tcp at tcp://127\.0\.0\.1:5 without authentication"):
        await ZmqTransport(left).start()


async def test_several_hosts_bind_the_interface_towards_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    left, right = makers.contexts(single_host=False, allow_insecure=True)
    async with makers.started(ZmqTransport(left), ZmqTransport(right)):
        assert (await left.rendezvous.lookup(endpoint_key(left, 0), 1.0)).startswith(b"tcp://127.0.0.1:")


async def test_without_abstract_addresses_ipc_uses_a_file_of_this_user_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrfp.transports.zmq.endpoint._HAS_ABSTRACT_ADDRESSES", False)
    async with makers.MAKERS["zmq-ipc"](PairOptions()) as pair:
        endpoint = await pair.right.context.rendezvous.lookup(endpoint_key(pair.right.context, 1), 1.0)
        folder = Path(endpoint.decode().removeprefix("ipc://")).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        assert index_of(await pass_on(pair, data(index=4))) == 4
    assert not folder.exists()


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
            sending = asyncio.create_task(pair.left.send(1, data(torch.zeros(10 << 20))))
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
