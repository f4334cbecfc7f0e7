"""A rank's one failure: the first that happens is the one that every caller gets, on every rank."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from rrfp import Topology
from rrfp.errors import Origin, PeerLostError, PipelineAborted, TransportError
from rrfp.runtime.abort import AbortController, Failure, broadcast_abort, origin_of
from rrfp.transports.base import Message, TransportContext
from rrfp.transports.inproc import InprocTransport
from rrfp.transports.rendezvous import LocalRendezvous

ELSEWHERE = Failure(Origin(1, None, "ValueError: second"))


async def controller(stopped: list[Failure]) -> AbortController:
    transport = InprocTransport(TransportContext(0, (), "run", LocalRendezvous()))
    await transport.start()
    return AbortController(Topology(0, 2), transport, stopped.append)


async def test_of_two_failures_the_first_is_raised_although_no_call_has_raised_it_before_the_second() -> None:
    stopped: list[Failure] = []
    abort = await controller(stopped)
    abort.fail(ValueError("first"))
    abort.abort(ELSEWHERE)
    abort.fail(ValueError("third"))
    for check in (abort.check_unraised, abort.check):
        with pytest.raises(PipelineAborted) as caught:
            check()
        assert caught.value.origin == Origin(0, None, "ValueError: first")
    assert [failure.origin.cause for failure in stopped] == ["ValueError: first"]
    await abort.close_transport()


async def waits_for_ever(abort: AbortController) -> None:
    async with abort.during("the step"):
        await asyncio.get_running_loop().create_future()


async def test_a_waiting_caller_gets_the_first_of_two_failures_that_come_before_its_turn() -> None:
    abort = await controller([])

    waiting = asyncio.create_task(waits_for_ever(abort))
    await asyncio.sleep(0)
    assert abort.is_awaited
    abort.fail(ValueError("first"))
    abort.abort(ELSEWHERE)
    with pytest.raises(PipelineAborted, match="stage 0: ValueError: first"):
        await waiting
    await abort.close_transport()


async def test_a_caller_that_is_cancelled_when_a_failure_comes_stays_cancelled() -> None:
    """Otherwise its own timeout or task group would take it for one that goes on."""
    abort = await controller([])

    waiting = asyncio.create_task(waits_for_ever(abort))
    await asyncio.sleep(0)
    abort.fail(ValueError("first"))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert waiting.cancelled()
    await abort.close_transport()


async def test_a_failure_that_a_call_has_raised_is_not_raised_again_by_leaving() -> None:
    abort = await controller([])
    abort.fail(ValueError("first"))
    with pytest.raises(PipelineAborted):
        abort.check()
    abort.check_unraised()
    await abort.close_transport()


async def test_the_peers_hear_of_a_failure_although_a_part_of_this_rank_cannot_be_stopped() -> None:
    def stop(failure: Failure) -> None:
        raise ValueError("a plugged-in lane cannot be closed")

    met = LocalRendezvous()
    transports = [InprocTransport(TransportContext(rank, (1 - rank,), "run", met)) for rank in range(2)]
    await asyncio.gather(*(transport.start() for transport in transports))
    abort = AbortController(Topology(0, 2), transports[0], stop)
    with pytest.raises(ValueError, match="cannot be closed"):
        abort.fail(ValueError("first"))
    assert origin_of((await transports[1].receive()).body) == Origin(0, None, "ValueError: first")
    await abort.close_transport()
    transports[1].abort()


def test_an_abort_is_told_to_every_peer() -> None:
    """Of three ranks the middle one fails; both others hear it from itself, not from the end of its connection."""

    async def main() -> list[Any]:
        met = LocalRendezvous()
        transports = [
            InprocTransport(TransportContext(rank, tuple({0, 1, 2} - {rank}), "run", met)) for rank in range(3)
        ]
        await asyncio.gather(*(transport.start() for transport in transports))
        await broadcast_abort(transports[1], Origin(1, "F0@1", "ValueError: enough"))
        heard = [await transports[rank].receive() for rank in (0, 2)]
        for rank in (0, 2):
            transports[rank].abort()
        return [origin_of(message.body) for message in heard]

    assert asyncio.run(main()) == [Origin(1, "F0@1", "ValueError: enough")] * 2


class Notes(InprocTransport):
    """Notes whether it was closed in order; ``broken`` peers take no message."""

    broken: Mapping[int, Exception] = {}
    closed = False

    async def send(self, peer: int, message: Message) -> None:
        if peer in self.broken:
            raise self.broken[peer]
        await super().send(peer, message)

    async def close(self) -> None:
        self.closed = True
        await super().close()


@pytest.mark.parametrize(
    ("broken", "in_order"),
    [
        ({}, True),
        ({0: PeerLostError(0, "killed")}, True),
        ({0: TransportError("no way")}, False),
        ({0: PeerLostError(0, "killed"), 2: TransportError("no way")}, False),
    ],
)
async def test_a_transport_is_closed_in_order_unless_a_live_peer_did_not_get_the_abort(
    broken: dict[int, Exception], in_order: bool
) -> None:
    """Otherwise such a peer would take the end for an orderly one, and wait."""
    met = LocalRendezvous()
    ends = [Notes(TransportContext(rank, tuple({0, 1, 2} - {rank}), "run", met)) for rank in range(3)]
    await asyncio.gather(*(end.start() for end in ends))
    ends[1].broken = broken
    await broadcast_abort(ends[1], Origin(1, None, "ValueError: enough"))
    assert ends[1].closed is in_order
    for end in ends:
        end.abort()
