"""Zmq beside strangers: nothing that they send is believed, ends a job, names a rank or fills memory or the log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

import msgpack
import pytest
import torch
import transports.makers as makers
import zmq
from transports.strangers import stranger

from rrfp.errors import FrameError
from rrfp.testing.transport_checks import Pair, PairOptions
from rrfp.testing.transport_checks.pair import data, index_of, note, pass_on, soon
from rrfp.transports.base import Channel, Message, MessageKind
from rrfp.transports.wire.codec import VERSION, Codec
from rrfp.transports.zmq.transport import ZmqTransport


def header_of(pair: Pair, **changes: object) -> bytes:
    header, _ = Codec(replace(pair.left.context, **changes)).encode(data(torch.ones(1)))  # type: ignore[arg-type]
    return header


def abort_of(pair: Pair) -> bytes:
    """As rank 0 itself would write it."""
    body = {"stage": 0, "task": None, "cause": "invented"}
    header, _ = Codec(pair.left.context).encode(Message(Channel.CONTROL, MessageKind.ABORT, body=body))
    return header


def nested(depth: int) -> bytes:
    """A seal whose version is a list in lists."""
    depths = b"\x91" * depth
    return bytes(b"\x95" + depths + b"\x01" + msgpack.packb("run") + b"\x00\x00" + msgpack.packb("output"))


#: What a stranger may send: a function of the pair that gives the parts.
FORGED: dict[str, Callable[[Pair], list[bytes]]] = {
    "another run": lambda pair: [header_of(pair, run_id="other"), b"\0" * 4],
    "another restart": lambda pair: [header_of(pair, restart=4), b"\0" * 4],
    "an unknown rank": lambda pair: [header_of(pair, rank=5), b"\0" * 4],
    "a tensor of a peer": lambda pair: [header_of(pair), b"\0" * 4],
    "an abort of a peer": lambda pair: [abort_of(pair), b""],
    "another version": lambda pair: [msgpack.packb([VERSION - 1, "another run", 0, 0, "x"]), b""],
    "deep nesting": lambda pair: [nested(1010), b""],
    "a piece": lambda pair: [b"noise"],
    "many parts": lambda pair: [b"x"] * 20_000,
}


@pytest.mark.parametrize("forged", FORGED)
async def test_frames_of_strangers_concern_no_rank(forged: str, caplog: pytest.LogCaptureFixture) -> None:
    for identity in (b"stranger", b"0/sideways", b"7/control"):
        caplog.clear()
        async with makers.MAKERS["zmq-ipc"](PairOptions()) as pair, stranger(pair, identity) as socket:
            socket.send_multipart(FORGED[forged](pair), zmq.NOBLOCK)
            async with asyncio.timeout(10):
                while pair.right.statistics().strangers == 0:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            assert index_of(await pass_on(pair, data(torch.ones(2), index=1))) == 1
            statistics = pair.right.statistics()
            assert (statistics.strangers, statistics.dropped_frames) == (1, 0)
            assert [record.levelno for record in caplog.records] == [logging.WARNING]
            assert "rank" not in caplog.text


async def test_a_strangers_flood_is_counted_and_logged_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    count, started_s = 2000, time.monotonic()
    async with makers.MAKERS["zmq-ipc"](PairOptions()) as pair, stranger(pair, b"flood") as socket:
        socket.setsockopt(zmq.SNDHWM, 0)
        for _ in range(count):
            socket.send(b"noise", zmq.NOBLOCK)
        async with asyncio.timeout(20):
            while pair.right.statistics().strangers < count:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert 1 <= len(caplog.messages) <= 1 + (time.monotonic() - started_s)
        assert index_of(await pass_on(pair, data(index=1))) == 1


@pytest.mark.parametrize(
    ("changes", "field"), [({"run_id": "other"}, "run_id"), ({"restart": 4}, "restart")], ids=["run", "restart"]
)
async def test_a_peers_frame_of_another_run_names_no_rank(changes: dict[str, object], field: str) -> None:
    async with makers.MAKERS["zmq-ipc"](PairOptions()) as pair:
        assert pair.inject is not None
        await pair.inject(Channel.FORWARD, header_of(pair, **changes), [b"\0" * 4])
        with pytest.raises(FrameError) as caught:
            await soon(pair.right.receive(), "the frame is reported")
        assert (caught.value.peer, caught.value.field) == (None, field)


@pytest.mark.parametrize(
    ("parts", "field"),
    [([nested(1010), b""], "version"), ([b"\xc1", b""], "header"), ([b"x"] * 20_000, "frames")],
    ids=["deep nesting", "no msgpack", "many parts"],
)
async def test_a_peers_bad_frame_names_that_peer(parts: list[bytes], field: str) -> None:
    async with makers.MAKERS["zmq-ipc"](PairOptions()) as pair:
        assert pair.inject is not None
        await pair.inject(Channel.FORWARD, parts[0], parts[1:])
        with pytest.raises(FrameError) as caught:
            await soon(pair.right.receive(), "the frame is reported")
        assert (caught.value.peer, caught.value.field) == (0, field)
        assert index_of(await pass_on(pair, data(torch.ones(2), index=1))) == 1


@pytest.mark.allow_blocking(reason="the loop stands still for longer than a silent peer may")
async def test_a_loop_that_stands_still_behind_many_messages_loses_no_peer() -> None:
    """Behind a full queue libzmq reads no heartbeats either."""
    left, right = makers.contexts(heartbeat_s=0.1, patience_s=0.3)
    async with makers.started(ZmqTransport(left, "ipc"), ZmqTransport(right, "ipc")) as pair:
        for index in range(100):
            header, _ = Codec(left).encode(note(index), index)
            pair.left._links[1].outlets[Channel.CONTROL].post(header)  # type: ignore[attr-defined]
        time.sleep(1)  # noqa: ASYNC251
        for index in range(100):
            assert index_of(await soon(pair.right.receive(), "the message arrives")) == index
        await pair.right.send(0, data(index=7))
        assert index_of(await soon(pair.left.receive(), "the answer arrives")) == 7
