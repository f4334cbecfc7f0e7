"""Checks of how a transport ends, of refused calls, of three ranks that are peers, and of a peer that falls silent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import torch

from rrfp.errors import ConfigError, PeerLostError, RrfpError, TransportClosedError
from rrfp.testing.checks import SkippedError
from rrfp.testing.transport_checks.pair import (
    MakePair,
    Pair,
    PairOptions,
    data,
    index_of,
    note,
    pass_on,
    receive,
    running,
    soon,
    stays_pending,
)
from rrfp.transports.base import Channel, Plain, Transport, TransportStatistics

_MIB = 1 << 20
_PATIENCE_S = 5.0


_Error = TypeVar("_Error", bound=RrfpError)


async def raises(awaitable: Awaitable[object], error: type[_Error], call: str) -> _Error:
    """Wait for the error that must be raised, and return it."""
    try:
        await soon(awaitable, f"{call} raises {error.__name__}")
    except error as raised:
        return raised
    except RrfpError as raised:
        raise AssertionError(f"{call} raised {raised!r}, must raise {error.__name__}") from raised
    raise AssertionError(f"{call} raised nothing, must raise {error.__name__}")


def _on_a_thread(statistics: Callable[[], TransportStatistics]) -> TransportStatistics:
    results: list[TransportStatistics] = []
    thread = threading.Thread(target=lambda: results.append(statistics()), daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)  # blocks the loop: a call that needs the loop would not return
    assert results, "statistics on another thread waits for the loop, must not"
    return results[0]


async def check_refused_calls(make_pair: MakePair) -> None:
    """An unknown peer, a message over max_message_bytes, and a body that no receiver takes raise ConfigError."""
    async with make_pair(PairOptions(max_message_bytes=_MIB)) as pair:
        await raises(pair.left.send(7, note()), ConfigError, "send to an unknown peer")
        too_large = data(torch.empty(_MIB + 1, dtype=torch.uint8))
        await raises(pair.left.send(1, too_large), ConfigError, "send of more than max_message_bytes")
        sparse = data(torch.eye(3).to_sparse())
        await raises(pair.left.send(1, sparse), ConfigError, "send of a sparse tensor")
        unnamed: dict[Any, Plain] = {1: 2}
        await raises(pair.left.send(1, note(map=unnamed)), ConfigError, "send of a body with a key that is no string")
        fits = data(torch.empty(_MIB, dtype=torch.uint8), index=5)
        assert index_of(await pass_on(pair, fits)) == 5, "a refused message was sent"


async def check_statistics(make_pair: MakePair) -> None:
    """Messages and tensor bytes are counted on both sides, and nothing is queued in the end."""
    async with make_pair(PairOptions()) as pair:
        for index in range(5):
            await pass_on(pair, data(torch.zeros(1000, dtype=torch.uint8), None, index=index))
        left, right = (_on_a_thread(transport.statistics) for transport in (pair.left, pair.right))
        sent, received = (left.messages_sent, left.bytes_sent), (right.messages_received, right.bytes_received)
        assert sent == (5, 5000), f"messages and bytes sent: {sent}, must be (5, 5000)"
        assert received == (5, 5000), f"messages and bytes received: {received}, must be (5, 5000)"
        assert right.dropped_frames == 0, f"{right.dropped_frames} frames were dropped"
        await soon(_until_nothing_is_queued(pair.left), "queued_bytes goes to 0 once everything was received")


async def _until_nothing_is_queued(transport: Transport) -> None:
    while transport.statistics().queued_bytes:  # noqa: ASYNC110 - the contract has no event for it
        await asyncio.sleep(0.001)


async def check_close_delivers(make_pair: MakePair) -> None:
    """Messages accepted before close arrive; a peer that closed is an error for send, not for receive."""
    count = 12
    async with make_pair(PairOptions()) as pair:
        for index in range(count):
            await soon(
                pair.left.send(1, data(torch.full((_MIB,), index % 100, dtype=torch.uint8), index=index)), "sent"
            )
        await soon(pair.left.send(1, note(count)), "sent")
        await soon(pair.left.close(), "close returns although the peer does not receive")
        seen = sorted([index_of(await receive(pair.right)) for _ in range(count + 1)])
        assert seen == list(range(count + 1)), f"received {seen}"
        async with running(pair.right.receive()) as receiving:
            await stays_pending(receiving, "receive ended because a peer closed in order")
            lost = await raises(pair.right.send(0, note()), PeerLostError, "send to a peer that closed")
            assert lost.peer == 0, f"the error names another peer: {lost}"
        await soon(pair.right.close(), "the other end closes")


async def check_close_of_both_at_once(make_pair: MakePair) -> None:
    """Two ends that close at the same time do not wait for each other, nor when they close again."""
    async with make_pair(PairOptions()) as pair:
        await soon(asyncio.gather(pair.left.close(), pair.right.close()), "both ends close")
        await soon(asyncio.gather(pair.left.close(), pair.right.close()), "both ends close again")
        pair.left.abort()


async def check_close_ends_waiting_calls(make_pair: MakePair) -> None:
    """close and abort end the waiting calls of this end, and later calls raise."""
    for how in ("close", "abort"):
        async with make_pair(PairOptions(queue_bytes=_MIB)) as pair:
            message = data(torch.zeros(_MIB, dtype=torch.uint8))
            await soon(pair.left.send(1, message), "one message fits")
            async with running(pair.left.send(1, message)) as sending, running(pair.left.receive()) as receiving:
                await stays_pending(sending, "a second message fitted into a full queue")
                await _end(pair.left, how)
                await raises(sending, TransportClosedError, f"a send that waits during {how}")
                await raises(receiving, TransportClosedError, f"a receive that waits during {how}")
            await raises(pair.left.send(1, note()), TransportClosedError, f"send after {how}")
            await raises(pair.left.receive(), TransportClosedError, f"receive after {how}")
            await _end(pair.left, how)


async def _end(transport: Transport, how: str) -> None:
    if how == "abort":
        transport.abort()
    else:
        await soon(transport.close(), "close returns")


async def check_peer_that_dies(make_pair: MakePair) -> None:
    """receive raises once for a dead peer, after its delivered messages; every send to it raises."""
    async with make_pair(PairOptions(queue_bytes=_MIB)) as pair:
        for index in range(3):
            await pass_on(pair, data(torch.ones(4), index=index))
        message = data(torch.zeros(_MIB, dtype=torch.uint8))
        await soon(pair.right.send(0, message), "one message fits")
        async with running(pair.right.send(0, message)) as sending:
            await stays_pending(sending, "a second message fitted into a full queue")
            pair.left.abort()
            await _expect_loss(pair, sending)


async def _expect_loss(pair: Pair, sending: asyncio.Task[None]) -> None:
    lost = await raises(pair.right.receive(), PeerLostError, "receive from a peer that died")
    assert lost.peer == 0, f"the error names another peer: {lost}"
    assert lost.reason, "the error names no reason"
    await raises(sending, PeerLostError, "a send that waits while its peer dies")
    for channel in Channel:
        await raises(pair.right.send(0, data(channel=channel)), PeerLostError, f"send to a dead peer on {channel}")
    async with running(pair.right.receive()) as receiving:
        await stays_pending(receiving, "a lost peer was reported twice")
    await soon(pair.right.close(), "close returns although the peer is dead")


async def check_death_comes_after_messages(make_pair: MakePair) -> None:
    """Messages that a peer had delivered before it died are received before its death."""
    async with make_pair(PairOptions()) as pair:
        for index in range(20):
            channel = tuple(Channel)[index % 3]
            await soon(pair.left.send(1, data(torch.full((50_000,), 1.0), index=index, channel=channel)), "sent")
        # The first message shows that the receiving loop runs; then the sender dies.
        first = await receive(pair.right)
        pair.left.abort()
        seen = {channel: [index_of(first)] if channel is first.channel else [] for channel in Channel}
        while True:
            try:
                message = await soon(pair.right.receive(), "the peer's death is reported")
            except PeerLostError:
                break
            seen[message.channel].append(index_of(message))
        for number, channel in enumerate(Channel):
            want = list(range(number, 20, 3))[: len(seen[channel])]
            assert seen[channel] == want, f"{channel}: received {seen[channel]} before the death"


#: Messages of each channel from each rank to each other.
_COUNT = 5


async def check_three_ranks(make_pair: MakePair) -> None:
    """Each of three ranks receives from both others, in order by peer and channel, with the right sender."""
    async with make_pair(PairOptions(ranks=3)) as pair:
        ranks = _three(pair)
        async with AsyncExitStack() as stack:
            for rank, transport in enumerate(ranks):
                await stack.enter_async_context(running(_send_to_others(rank, transport)))
            for rank, transport in enumerate(ranks):
                await _receive_from_others(rank, transport)


async def check_one_of_three_dies(make_pair: MakePair) -> None:
    """Of three ranks one dies: receive raises once on both others and names it, and these two continue."""
    async with make_pair(PairOptions(ranks=3)) as pair:
        left, right, third = _three(pair)
        left.abort()
        for rank, transport in ((1, right), (2, third)):
            lost = await raises(transport.receive(), PeerLostError, f"receive of rank {rank} after rank 0 died")
            assert lost.peer == 0, f"rank {rank} names another peer: {lost}"
        for index in range(_COUNT):
            await soon(right.send(2, data(torch.ones(3), index=index)), "send between the two that live")
            assert index_of(await receive(third)) == index, "a message between the two that live is another one"
        async with running(right.receive()) as receiving:
            await stays_pending(receiving, "a lost peer was reported twice")


async def check_silent_peer(make_pair: MakePair) -> None:
    """A peer that stops answering without ending is reported by receive, once, within the transport's patience."""
    async with make_pair(PairOptions()) as pair:
        if pair.silence is None:
            raise SkippedError("the pair has no `silence` to stop a peer from answering")
        await soon(pair.left.send(1, note(1)), "a message before the silence is sent")
        assert index_of(await receive(pair.right)) == 1, "the message before the silence is another one"
        await pair.silence()
        lost = await raises(pair.right.receive(), PeerLostError, "receive from a peer that fell silent")
        assert lost.peer == 0, f"the error names another peer: {lost}"
        assert lost.reason, "the error names no reason"
        async with running(pair.right.receive()) as receiving:
            await stays_pending(receiving, "a silent peer was reported twice")


def _three(pair: Pair) -> tuple[Transport, Transport, Transport]:
    if pair.third is None:
        raise SkippedError("the maker of pairs makes no third rank: it does not read PairOptions.ranks")
    return pair.left, pair.right, pair.third


async def _send_to_others(rank: int, transport: Transport) -> None:
    for index in range(_COUNT):
        for peer in {0, 1, 2} - {rank}:
            for channel in Channel:
                await transport.send(peer, data(torch.full((7,), rank), index=index, channel=channel))


async def _receive_from_others(rank: int, transport: Transport) -> None:
    received: dict[tuple[int, Channel], list[int]] = {}
    for _ in range(2 * len(Channel) * _COUNT):
        message = await receive(transport, f"rank {rank} receives from both others")
        tensor = message.tensors[0]
        assert tensor is not None, "a tensor was lost"
        assert tensor.tolist() == [message.sender] * 7, f"a message of rank {tensor[0]} has sender {message.sender}"
        received.setdefault((message.sender, message.channel), []).append(index_of(message))
    for (sender, channel), indices in received.items():
        assert indices == list(range(_COUNT)), f"rank {rank} received {indices} from rank {sender} on {channel}"
