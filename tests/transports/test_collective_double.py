"""The transport's logic over a double for NCCL: right in eager and lazy mode; what is wrong ends with a name."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import transports.makers as makers
from batches import long
from transports.collective_double import DoubleBackend, DoubleGroup, DoubleNetwork
from transports.collective_pair import announce, link_of, post

from rrfp.errors import FrameError, PeerLostError, RrfpError
from rrfp.testing.transport_checks import ALL_CHECKS, Check, MakePair, Pair, PairOptions, SkippedError
from rrfp.testing.transport_checks.pair import data, receive, soon
from rrfp.transports.base import Channel
from rrfp.transports.collective.channel import GroupChannel, RankPair
from rrfp.transports.collective.transport import CollectiveTransport


def over(network: DoubleNetwork, backend: type[DoubleBackend] = DoubleBackend) -> MakePair:
    """Pairs on one network, announced over shm."""

    @asynccontextmanager
    async def make_pair(options: PairOptions) -> AsyncIterator[Pair]:
        contexts = makers.contexts(options, rendezvous=makers.Store())
        transports = [CollectiveTransport(context, backend(network, context.rank)) for context in contexts]
        async with makers.started(*transports) as pair:
            yield pair

    return make_pair


#: Those that every test run tries.
FEW = {"fifo_per_channel", "every_dtype", "cancelled_send", "peer_that_dies", "three_ranks"}
NAMED = {check.__name__.removeprefix("check_"): check for check in ALL_CHECKS}
assert NAMED.keys() >= FEW


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize(
    "check", [check if name in FEW else long(check) for name, check in NAMED.items()], ids=[*NAMED]
)
async def test_contract(check: Check, lazy: bool) -> None:
    """With a slot for each group of a rank; also where each post blocks its thread until the other end posts."""
    network = DoubleNetwork(slots=4, lazy=lazy)
    try:
        await check(over(network))
    except SkippedError:
        assert check.__name__.startswith(("check_bad_frames", "check_silent_peer"))
    assert network.failure is None


async def exchange(pair: Pair, count: int = 8) -> None:
    """Messages of different sizes, both ways and on both channels at once."""

    async def send(sender: int, channel: Channel) -> None:
        transport = (pair.left, pair.right)[sender]
        for index in range(count):
            size = 2 * index + (channel is Channel.BACKWARD) + 1
            await transport.send(1 - sender, data(torch.ones(size), index=index, channel=channel))

    async def take(receiver: int) -> None:
        for _ in range(2 * count):
            await receive((pair.left, pair.right)[receiver])

    channels = (Channel.FORWARD, Channel.BACKWARD)
    sends = [send(sender, channel) for sender in (0, 1) for channel in channels]
    await soon(asyncio.gather(*sends, take(0), take(1)), "all messages arrive")


async def ends_with(network: DoubleNetwork, make_pair: MakePair) -> str:
    """The failure that the network names."""
    async with make_pair(PairOptions()) as pair:
        with pytest.raises(RrfpError, match="its tensors failed to arrive") as raised:
            await exchange(pair)
    assert isinstance(raised.value, PeerLostError)
    assert network.failure is not None
    return f"{type(network.failure).__name__}: {network.failure}"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed group is reported soon."""
    monkeypatch.setattr("rrfp.timeouts.FAREWELL_TIMEOUT_S", 0.05)


class Reversed(GroupChannel):
    """Waits for two announcements, and posts their receives the other way round."""

    def _add(self, number: int, announced: Any) -> None:
        self._early[number] = announced
        if len(self._early) < 2:
            return
        first = self._incoming.number
        for each in sorted(self._early, reverse=True):
            self._incoming.number = each
            self._post(self._early.pop(each))
        self._incoming.number = first + 2


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
async def test_receives_in_another_order_than_announced_are_a_named_deadlock(
    monkeypatch: pytest.MonkeyPatch, lazy: bool
) -> None:
    """A kernel waits for bytes that the one at the other end does not have."""
    monkeypatch.setattr("rrfp.transports.collective.transport.GroupChannel", Reversed)
    network = DoubleNetwork(slots=4, lazy=lazy)
    failure = await ends_with(network, over(network))
    assert failure.startswith("CollectiveDeadlockError: nothing can go on: rank ")
    assert "receive of" in failure
    assert "send of" in failure


@pytest.mark.usefixtures("impatient")
async def test_receives_of_equal_size_in_another_order_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits, and the data would be wrong."""
    monkeypatch.setattr("rrfp.transports.collective.transport.GroupChannel", Reversed)
    network = DoubleNetwork(slots=4)
    async with over(network)(PairOptions()) as pair:
        sends = [pair.left.send(1, data(torch.full((3,), float(index)), index=index)) for index in range(2)]
        with pytest.raises(PeerLostError):
            await soon(asyncio.gather(*sends), "the sends end")
    assert "transfer 1 of 0->1, runs gets the data of: rank 0's send of 12 bytes, transfer 0" in str(network.failure)


class OnOneThread(DoubleBackend):
    """Posts for all groups of a rank on one thread, as a loop that posts itself would."""

    def __init__(self, network: DoubleNetwork, rank: int) -> None:
        super().__init__(network, rank)
        self._turn = threading.Lock()

    def connect(self, pair: RankPair, store: object, timeout_s: float) -> Any:
        group = super().connect(pair, store, timeout_s)
        group.host = self._rank
        move = group.move

        def in_turn(number: int, tensors: Any) -> None:
            with self._turn:
                move(number, tensors)

        group.move = in_turn  # type: ignore[method-assign]
        return group


@pytest.mark.usefixtures("impatient")
async def test_posts_that_block_on_one_thread_are_a_named_deadlock() -> None:
    network = DoubleNetwork(slots=4, lazy=True)
    failure = await ends_with(network, over(network, OnOneThread))
    assert failure.startswith("CollectiveDeadlockError: ")
    # Whichever each host posts first: both send, or both receive.
    sends = ["the host is blocked in a send of rank 0 on 0->1", "the host is blocked in a send of rank 1 on 1->0"]
    receives = [
        "the host is blocked in a receive of rank 0 on 1->0",
        "the host is blocked in a receive of rank 1 on 0->1",
    ]
    assert any(all(text in failure for text in both) for both in (sends, receives)), failure


async def test_posts_that_return_may_be_made_on_one_thread() -> None:
    network = DoubleNetwork(slots=4)
    async with over(network, OnOneThread)(PairOptions()) as pair:
        await exchange(pair)
    assert network.failure is None


async def test_kernels_of_more_groups_than_a_device_has_room_for_are_a_named_deadlock() -> None:
    """Two sends at once, each of which takes the slot that the other's receive needs: so kernels must be small."""
    for slots in (1, 2):
        network = DoubleNetwork(slots)
        pipes = [
            DoubleGroup(network, pair, is_source, host=(pair, is_source))
            for is_source in (True, False)
            for pair in (RankPair(0, 1), RankPair(1, 0))
        ]
        await asyncio.gather(*(asyncio.to_thread(network.join, pipe, 10.0) for pipe in pipes))
        for pipe in pipes:
            assert network.failure is None
            pipe.move(0, [torch.ones(3)])
        if slots == 2:
            assert all(pipe.completed == 1 for pipe in pipes)
            assert network.failure is None
        else:
            assert str(network.failure) == (
                "nothing can go on: rank 0's receive of 12 bytes, transfer 0 of 1->0, is queued; rank 0's send of 12 "
                "bytes, transfer 0 of 0->1, runs; rank 1's receive of 12 bytes, transfer 0 of 0->1, is queued; rank "
                "1's send of 12 bytes, transfer 0 of 1->0, runs"
            )


async def test_an_announcement_that_is_refused_ends_a_group_without_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors may have been posted, so all later ones would be another's."""
    monkeypatch.setattr("rrfp.timeouts.FAREWELL_TIMEOUT_S", 0.05)
    network = DoubleNetwork(slots=4)
    async with over(network)(PairOptions(max_message_bytes=1 << 10)) as pair:
        base = link_of(cast(Any, pair.left)).base
        base.context = replace(base.context, max_message_bytes=1 << 20)
        sending = asyncio.create_task(pair.left.send(1, data(torch.zeros(1 << 12, dtype=torch.uint8))))
        with pytest.raises(RrfpError, match="max_message_bytes"):
            await soon(pair.right.receive(), "the announcement is refused")
        with pytest.raises(PeerLostError, match="an announcement was refused"):
            await soon(pair.right.receive(), "the loss is reported")
        pair.right.abort()
        with pytest.raises(PeerLostError):
            await soon(sending, "the send ends")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("why", ["it is refused", "there is no memory"])
async def test_a_transfer_behind_one_that_was_left_out_takes_none_of_its_data(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have one size, so that nothing but the order tells them apart."""
    network = DoubleNetwork(slots=4)
    async with over(network)(PairOptions()) as pair:
        left, right = cast(Any, pair.left), pair.right
        first, second = (data(torch.full((4,), value, dtype=torch.uint8)) for value in (1, 2))
        if why == "it is refused":
            sending: list[asyncio.Future[None]] = [post(left, *cast(Any, first.tensors))]
            await announce(left, ["uint8", [4], True])
            link_of(left)._number = 1
            with pytest.raises(FrameError, match="requires_grad"):
                await soon(right.receive(), "the announcement is refused")
        else:
            monkeypatch.setattr(DoubleBackend, "empty", full_at_first(DoubleBackend.empty))
            sending = [asyncio.create_task(left.send(1, first))]
        sending.append(asyncio.create_task(left.send(1, second)))
        with pytest.raises(PeerLostError, match="its tensors failed to arrive"):
            await soon(right.receive(), "the loss is reported")
        assert network.failure is None
        right.abort()
        await soon(asyncio.wait(sending), "the sends end")
        assert all(isinstance(sent.exception(), PeerLostError) for sent in sending)


def full_at_first(empty: Any) -> Any:
    """``empty`` of a backend that has memory from the second call on."""
    calls = itertools.count()

    def allocate(self: DoubleBackend, spec: object) -> torch.Tensor:
        if next(calls) == 0:
            raise RuntimeError("not enough memory")
        made: torch.Tensor = empty(self, spec)
        return made

    return allocate
