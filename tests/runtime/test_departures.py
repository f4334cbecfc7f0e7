"""A rank whose program left is found where others go on: at a step's begin, and inside a step."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import nullcontext
from typing import Any

import pytest
from runtime.ranks import virtual_ranks

from rrfp.errors import PeerLostError, PipelineAborted, ProtocolError
from rrfp.model.mesh import Mesh
from rrfp.model.tasks import Mode, StepId
from rrfp.runtime.context import ClosedPeers, RankActivity
from rrfp.testing.clock import run_virtual
from rrfp.transports.base import Channel, Message, MessageKind

#: When the second step begins on stage 0, and when the program of stage 1 leaves, in virtual seconds.
LEAVES_S = 50.0


def both(first: Coroutine[Any, Any, None], second: Coroutine[Any, Any, None]) -> tuple[list[Any], float]:
    async def main() -> tuple[list[Any], float]:
        ends = await asyncio.gather(first, second, return_exceptions=True)
        return list(ends), asyncio.get_running_loop().time()

    return run_virtual(main())


@pytest.mark.parametrize("goes_on_s", [0.0, LEAVES_S - 10, LEAVES_S, LEAVES_S + 10])
def test_a_program_that_leaves_is_named_at_once_whenever_the_other_goes_on(goes_on_s: float) -> None:
    """Before ``LEAVES_S`` the other rank is inside its second step when the word comes, after it at its begin."""
    first, second = virtual_ranks(Mesh((("pp", 2),)), lambda _: 1.0, stall_after=1000.0)
    told_at = 0.0

    async def goes_on() -> None:
        nonlocal told_at
        async with first as pipe:
            await pipe.step(microbatches=2)
            began = asyncio.get_running_loop().time()
            await asyncio.sleep(max(goes_on_s - began, 0.0))
            try:
                await pipe.step(microbatches=2)
            finally:
                told_at = asyncio.get_running_loop().time()

    async def leaves() -> None:
        async with second as pipe:
            await pipe.step(microbatches=2)
            await asyncio.sleep(LEAVES_S - asyncio.get_running_loop().time())

    (error, left), _ = both(goes_on(), leaves())
    assert left is None
    assert isinstance(error, PipelineAborted)
    assert error.origin.stage == 1
    assert "its program left after 1 step(s), but step 1 was begun elsewhere" in error.origin.cause
    assert told_at == max(goes_on_s, LEAVES_S)


def closed(body: Any, sender: int = 4) -> Message:
    return Message(Channel.CONTROL, MessageKind.CLOSED, body=body, sender=sender)


def test_a_peer_that_left_later_is_no_loss() -> None:
    activity = RankActivity(lambda: 0.0)
    closed_peers = ClosedPeers(activity)
    closed_peers.on_message(closed({"steps": 3, "gatherings": 1}))
    assert 4 in closed_peers
    assert 5 not in closed_peers
    for number in range(3):
        activity.begin_step(StepId(number, Mode.TRAIN, 2))
        closed_peers.check()
        activity.end_step()
    with activity.gather("clip_grad_norm_"):
        closed_peers.check()
    activity.begin_step(StepId(3, Mode.TRAIN, 2))
    with pytest.raises(PeerLostError, match=r"its program left after 3 step\(s\), but step 3 was begun elsewhere"):
        closed_peers.check()
    activity.end_step()
    with (
        activity.gather("clip_grad_norm_"),
        pytest.raises(PeerLostError, match="its program left, but clip_grad_norm_ was called elsewhere"),
    ):
        closed_peers.check()


@pytest.mark.parametrize("gathers", [False, True])
def test_a_peer_that_leaves_before_the_call_that_runs_here_is_lost_when_it_says_so(gathers: bool) -> None:
    activity = RankActivity(lambda: 0.0)
    closed_peers = ClosedPeers(activity)
    if not gathers:
        activity.begin_step(StepId(0, Mode.TRAIN, 2))
    with activity.gather("clip_grad_norm_") if gathers else nullcontext():
        closed_peers.on_message(closed({"steps": 1, "gatherings": 1}, sender=2))
        with pytest.raises(PeerLostError, match="its program left") as caught:
            closed_peers.on_message(closed({"steps": 0, "gatherings": 0}))
    assert caught.value.peer == 4


@pytest.mark.parametrize("body", [{}, {"steps": 1}, {"gatherings": 1}, {"steps": "1", "gatherings": 0}])
def test_a_closed_message_has_the_calls_that_its_rank_took_part_in(body: Any) -> None:
    activity = RankActivity(lambda: 0.0)
    closed_peers = ClosedPeers(activity)
    with pytest.raises(ProtocolError, match="rank 2 closed without saying after how many steps and gatherings"):
        closed_peers.on_message(closed(body, sender=2))
    for number in range(3):
        activity.begin_step(StepId(number, Mode.TRAIN, 2))
        activity.end_step()
    with activity.gather("clip_grad_norm_"):
        pass
    assert dict(closed_peers.own_message().body) == {"steps": 3, "gatherings": 1}
