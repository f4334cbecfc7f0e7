"""Checks of peers: three ranks that are each other's peers, one of which ends, and a peer that falls silent."""

from contextlib import AsyncExitStack

import torch

from rrfp.errors import PeerLostError
from rrfp.testing.checks import SkippedError
from rrfp.testing.transport_checks.ends import raises
from rrfp.testing.transport_checks.pair import (
    MakePair,
    Pair,
    PairOptions,
    data,
    index_of,
    note,
    receive,
    running,
    soon,
    stays_pending,
)
from rrfp.transports.base import Channel, Transport

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
