"""Authentication over tcp: with a secret, and as far as it goes without; each attack leaves the job as it was."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import transports.makers as makers
import transports.shm_children as children
import zmq
from fork_server import fork_server
from transports.children import in_child
from zmq.utils import z85

from rrfp.errors import ConfigError, FrameError
from rrfp.testing.transport_checks import Pair, PairOptions
from rrfp.testing.transport_checks.pair import data, index_of, pass_on, soon
from rrfp.transports.auto import AutoTransport
from rrfp.transports.base import Channel, Message, MessageKind, TransportContext
from rrfp.transports.secret import split_voucher
from rrfp.transports.wire.codec import Codec
from rrfp.transports.zmq.security import Published, Security
from rrfp.transports.zmq.transport import ZmqTransport, endpoint_key

__all__ = ["fork_server"]

SECRET = makers.SECRET
MIB = 1 << 20

#: How tcp may be protected.
WAYS: dict[str, dict[str, Any]] = {
    "secret": {"secret": SECRET},
    "plain data": {"secret": SECRET, "plain_data": True},
    "insecure": {"allow_insecure": True},
}


def over_tcp(contexts: Sequence[TransportContext]) -> list[ZmqTransport]:
    return [ZmqTransport(context, "127.0.0.1") for context in contexts]


def forged(context: TransportContext) -> list[list[bytes]]:
    """A greeting and an abort, as the rank of ``context`` itself would write them."""
    codec = Codec(context)
    abort = Message(Channel.CONTROL, MessageKind.ABORT, body={"stage": 0, "task": None, "cause": "invented"})
    return [[codec.seal("hello", "control"), b""], [codec.encode(abort)[0], b""]]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def mechanisms(transport: ZmqTransport) -> dict[Channel, int]:
    """libzmq's numbers: 1 plain, 2 CURVE."""
    outlets = next(iter(transport._links.values())).outlets
    return {channel: int(outlet._socket.getsockopt(zmq.MECHANISM)) for channel, outlet in outlets.items()}


@pytest.mark.parametrize(
    ("way", "expected"), [("secret", (2, 2, 2)), ("plain data", (2, 1, 1)), ("insecure", (1, 1, 1))]
)
async def test_what_is_encrypted(way: str, expected: tuple[int, int, int]) -> None:
    async with makers.started(*over_tcp(makers.contexts(**WAYS[way]))) as pair:
        for end in (pair.left, pair.right):
            assert tuple(mechanisms(end)[channel] for channel in Channel) == expected  # type: ignore[arg-type]
        assert index_of(await pass_on(pair, data(torch.ones(300_000), index=2))) == 2


@pytest.mark.parametrize(("plain_data", "expected"), [(False, (2, 2, 2)), (True, (2, 1, 1))])
async def test_auto_moves_tensors_between_hosts_in_plain_text_on_request_only(
    plain_data: bool, expected: tuple[int, int, int]
) -> None:
    left, right = makers.contexts(rendezvous=makers.Store(), secret=SECRET, plain_data=plain_data)
    async with makers.started(AutoTransport(left), makers.Abroad(right)) as pair:
        (chosen,) = pair.left._parts  # type: ignore[attr-defined]
        assert isinstance(chosen, ZmqTransport)
        assert tuple(mechanisms(chosen)[channel] for channel in Channel) == expected
        assert index_of(await pass_on(pair, data(torch.ones(300_000), index=2))) == 2


async def published_by(rank: int, context: TransportContext) -> Published:
    """What a rank has published, read without the check of its voucher."""
    return Published.unpack(split_voucher(await context.rendezvous.lookup(endpoint_key(context, rank), 5))[1])


def with_unknown_key(socket: zmq.Socket[bytes], published: Published) -> None:
    """It knows the public key out of the store, and has one of its own that no rank has."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(published.key))
    public, private = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, private)


def with_wrong_password(socket: zmq.Socket[bytes], published: Published) -> None:
    socket.setsockopt(zmq.PLAIN_USERNAME, b"0")
    socket.setsockopt(zmq.PLAIN_PASSWORD, published.key[::-1].hex().encode())


@pytest.mark.parametrize(
    ("way", "disguise"),
    [
        ("secret", None),
        ("secret", with_unknown_key),
        ("secret", with_wrong_password),
        ("insecure", None),
        ("insecure", with_wrong_password),
    ],
)
@pytest.mark.parametrize("identity", [b"0/control", b"stranger"])
async def test_a_sender_without_a_key_gets_nothing_in_and_no_ranks_place(
    way: str, disguise: Callable[[zmq.Socket[bytes], Published], None] | None, identity: bytes
) -> None:
    """It comes before the rank whose identity it takes."""
    left, right = over_tcp(makers.contexts(**WAYS[way]))
    starting = asyncio.create_task(right.start())
    published = await published_by(1, left.context)
    sockets = zmq.Context()
    socket = sockets.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    if disguise is not None:
        disguise(socket, published)
    socket.connect(published.endpoint)
    for parts in forged(left.context):
        socket.send_multipart(parts, zmq.NOBLOCK)
    try:
        if disguise is not with_unknown_key:  # which waits for as long as a peer's key is still to come
            await until(lambda: right.statistics().strangers > 0)
        await soon(left.start(), "the real rank connects")
        await soon(starting, "its peer does")
        pair = Pair(left, right, makers.RUN_ID)
        assert index_of(await pass_on(pair, data(torch.ones(2), index=1))) == 1
        await until(lambda: right.statistics().strangers > 0)
        assert right.statistics().dropped_frames == 0
    finally:
        sockets.destroy(linger=0)
        left.abort()
        right.abort()
        await asyncio.gather(starting, return_exceptions=True)


async def test_a_peer_that_connects_before_its_key_is_known_waits_for_it() -> None:
    """Rank 1 waits for what rank 2 publishes, and rank 0 has connected already."""
    contexts = makers.contexts(PairOptions(ranks=3), secret=SECRET, connect_timeout_s=30.0)
    zero, one = over_tcp([replace(contexts[0], peers=(1,)), contexts[1]])
    two = ZmqTransport(replace(contexts[2], peers=(1,)), "127.0.0.1")
    starting = [asyncio.create_task(one.start())]
    store = Delayed(contexts[0].rendezvous)
    zero.context = replace(zero.context, rendezvous=store)
    starting.append(asyncio.create_task(zero.start()))
    try:
        await until(lambda: one._gate is not None and len(one._gate._waiting) == 3)
        store.pass_on.set()
        starting.append(asyncio.create_task(two.start()))
        await soon(asyncio.gather(*starting), "all start")
        assert one.statistics().strangers == 0
    finally:
        for end in (zero, one, two):
            end.abort()


class Delayed:
    """A store in which what this rank publishes appears late."""

    def __init__(self, inner: Any) -> None:
        self.lookup = inner.lookup
        self.pass_on = asyncio.Event()
        self._inner = inner
        self._publishing: asyncio.Task[None] | None = None

    async def publish(self, key: str, value: bytes) -> None:
        self._publishing = asyncio.create_task(self._publish(key, value))

    async def _publish(self, key: str, value: bytes) -> None:
        await self.pass_on.wait()
        await self._inner.publish(key, value)


@pytest.mark.parametrize("identity", [b"0/control", b"nobody"])
async def test_a_rank_cannot_speak_as_another(identity: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 has a key of its own that is admitted, and writes as rank 0."""
    keys = dict[int, Security]()

    class Kept(Security):
        def __init__(self, context: TransportContext) -> None:
            super().__init__(context)
            keys[context.rank] = self

    monkeypatch.setattr("rrfp.transports.zmq.transport.Security", Kept)
    ends = zero, one, two = over_tcp(makers.contexts(PairOptions(ranks=3), secret=SECRET))
    starting = [asyncio.create_task(end.start()) for end in (one, two)]
    sockets = zmq.Context()
    try:
        published = await published_by(1, one.context)
        await until(lambda: two.context.rank in keys)
        socket = sockets.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, identity)
        socket.connect(keys[2].protect_outlet(socket, 1, published, Channel.CONTROL))
        for parts in forged(zero.context):
            socket.send_multipart(parts, zmq.NOBLOCK)
        await until(lambda: one.statistics().dropped_frames == 2)
        socket.close(linger=0)
        await soon(asyncio.gather(zero.start(), *starting), "the real rank connects")
        for _ in range(2):
            with pytest.raises(FrameError) as raised:
                await soon(one.receive(), "what was refused")
            assert (raised.value.peer, raised.value.field) == (2, "sender")
        assert index_of(await pass_on(Pair(zero, one, makers.RUN_ID), data(torch.ones(2), index=1))) == 1
    finally:
        sockets.destroy(linger=0)
        for end in ends:
            end.abort()
        await asyncio.gather(*starting, return_exceptions=True)


async def test_a_rank_on_ipc_connects_to_one_on_tcp() -> None:
    for way in ("secret", "plain data"):
        left, right = makers.contexts(**WAYS[way])
        async with makers.started(ZmqTransport(left), ZmqTransport(right, "127.0.0.1")) as pair:
            assert index_of(await pass_on(pair, data(torch.ones(300_000), index=3))) == 3
            await pair.right.send(0, data(index=5))
            assert index_of(await soon(pair.left.receive(), "the answer comes")) == 5


def frame_of(flags: int, size: int) -> bytes:
    return bytes([flags | 2]) + size.to_bytes(8, "big") + bytes(size)


#: ZMTP 3.0 without security: the greeting, then READY of a DEALER, as libzmq writes them.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


async def flood(endpoint: str, frame: bytes, most: int) -> int:
    """Send ``frame`` again and again until the connection ends; returns the bytes that left."""
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    _, writer = await asyncio.open_connection(host, int(port))
    sent = 0
    with suppress(ConnectionError):
        writer.write(GREETING + READY)
        while sent < most:
            writer.write(frame)
            await writer.drain()
            sent += len(frame)
    writer.transport.abort()
    return sent


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("way", ["secret", "insecure"])
@pytest.mark.parametrize("flags", [0, 1], ids=["frames", "one endless message"])
async def test_a_flood_is_refused_in_its_handshake_and_takes_no_memory(way: str, flags: int) -> None:
    async with makers.started(*over_tcp(makers.contexts(**WAYS[way]))) as pair:
        published = await published_by(1, pair.right.context)
        await pass_on(pair, data(torch.ones(MIB)))
        before, frame = resident(), frame_of(flags, MIB)
        for _ in range(3):
            assert await flood(published.endpoint, frame, 64 * MIB) < 16 * MIB
        assert resident() - before < 32 * MIB
        await until(lambda: pair.right.statistics().strangers >= 3)
        assert index_of(await pass_on(pair, data(torch.ones(2), index=1))) == 1


async def test_another_user_gets_nothing_into_a_local_address(fork_server: None) -> None:
    async with makers.MAKERS["zmq-ipc"](PairOptions()) as pair:
        endpoint = (await pair.right.context.rendezvous.lookup(endpoint_key(pair.right.context, 1), 1.0)).decode()
        sent: Callable[..., Awaitable[Any]] = asyncio.to_thread
        assert await sent(in_child, children.write_as, 65534, endpoint, forged(pair.left.context))
        statistics = pair.right.statistics()
        assert (statistics.dropped_frames, statistics.strangers) == (0, 0)
        assert index_of(await pass_on(pair, data(index=1))) == 1


async def test_a_secret_needs_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda feature: False)
    with pytest.raises(ConfigError, match="built without CURVE"):
        await ZmqTransport(makers.contexts(secret=SECRET)[0]).start()
