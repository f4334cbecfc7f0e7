"""Frames that were captured come again: in another run, after a restart, at another rank, or a second time.

None becomes a message, and everything that the real peer sends arrives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch
import zmq
from transports.makers import MAKERS, RUN_ID

from rrfp.errors import FrameError
from rrfp.testing.transport_checks import Pair, PairOptions
from rrfp.testing.transport_checks.pair import data, index_of, note, pass_on, soon
from rrfp.transports.base import Channel, Message, TransportContext
from rrfp.transports.rendezvous import LocalRendezvous
from rrfp.transports.shm.link import LINK_KINDS as SHM_KINDS
from rrfp.transports.wire.codec import Codec
from rrfp.transports.zmq.inlet import LINK_KINDS as ZMQ_KINDS

Frame = tuple[bytes, Sequence[bytes]]

#: Messages that each run sends first.
SENT = [data(torch.ones(3), None, torch.arange(4), index=sequence) for sequence in range(3)]


def codec(run_id: str = RUN_ID, restart: int = 0, rank: int = 0) -> Codec:
    """Of rank ``rank`` of a run; it writes what that rank sent."""
    peers = tuple(peer for peer in (0, 1, 5) if peer != rank)
    return Codec(TransportContext(rank, peers, run_id, LocalRendezvous(), restart=restart))


def messages(sender: Codec) -> list[Frame]:
    """The first messages of the forward channel."""
    encoded = [sender.encode(message, sequence) for sequence, message in enumerate(SENT)]
    return [(header, [bytes(each) for each in tensors]) for header, tensors in encoded]


def everything(sender: Codec) -> list[Frame]:
    """Messages, and every kind of frame that links exchange, with the fields that one of them has."""
    kinds = dict.fromkeys((*SHM_KINDS, *ZMQ_KINDS))
    fields = ((), ("forward",), ("forward", 1 << 20, 1), (1,))
    return messages(sender) + [(sender.seal(kind, *each), [b""]) for kind in kinds for each in fields]


#: By whom the frames were sent; they come on the connection of rank 0 of this run.
ELSEWHERE = {
    "another run": codec("another run"),
    "a run whose name begins alike": codec(f"{RUN_ID}/1"),
    "before a restart": codec(restart=1),
    "another rank": codec(rank=5),
    "the receiver": codec(rank=1),
}


async def replay(pair: Pair, channel: Channel, frames: Sequence[Frame]) -> None:
    for header, tensors in frames:
        while not await _inject(pair, channel, header, tensors):  # noqa: ASYNC110 - no event says when it has room
            await asyncio.sleep(0.001)


async def _inject(pair: Pair, channel: Channel, header: bytes, tensors: Sequence[bytes]) -> bool:
    assert pair.inject is not None
    try:
        await pair.inject(channel, header, tensors)
    except zmq.Again:
        return False
    return True


async def next_messages(pair: Pair) -> list[Message]:
    """Send a message on each channel; returns what arrives up to the last of them, without the errors between."""
    for channel in Channel:
        await pair.left.send(1, note(70) if channel is Channel.CONTROL else data(index=70, channel=channel))
    arrived: list[Message] = []
    while sum(index_of(message) == 70 for message in arrived) < len(Channel):
        try:
            arrived.append(await soon(pair.right.receive(), "a message or an error comes"))
        except FrameError:
            continue
    return arrived


@pytest.mark.parametrize("maker", ["shm", "zmq-ipc"])
@pytest.mark.parametrize("sender", ELSEWHERE)
async def test_no_frame_from_elsewhere_is_taken(sender: str, maker: str) -> None:
    async with MAKERS[maker](PairOptions()) as pair:
        for channel in Channel:
            await replay(pair, channel, everything(ELSEWHERE[sender]))
        assert [index_of(message) for message in await next_messages(pair)] == [70] * len(Channel)
        assert pair.right.statistics().dropped_frames > 0
        await pass_on(pair, data(torch.ones(2), index=8))


@pytest.mark.parametrize("maker", ["shm", "zmq-ipc"])
async def test_no_message_is_taken_twice_or_on_another_channel(maker: str) -> None:
    async with MAKERS[maker](PairOptions()) as pair:
        for index, message in enumerate(SENT):
            assert index_of(await pass_on(pair, message)) == index
        for channel in Channel:
            await replay(pair, channel, messages(codec()))
        assert [index_of(message) for message in await next_messages(pair)] == [70] * len(Channel)
        assert pair.right.statistics().dropped_frames == len(SENT) * len(Channel)


@pytest.mark.parametrize("sender", ["another run", "before a restart"])
def test_another_run_opens_no_frame(sender: str) -> None:
    for header, _ in everything(ELSEWHERE[sender]):
        with pytest.raises(FrameError):
            codec(rank=1).open(header)
    for header, _ in everything(codec()):
        codec(rank=1).open(header)
