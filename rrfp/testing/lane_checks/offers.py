"""Checks of lanes that take offers: see `Lane.offers`."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

from rrfp.compute.lanes.base import OfferSlot
from rrfp.testing.checks import SkippedError
from rrfp.testing.lane_checks.subject import (
    PATIENCE_S,
    QUIET_S,
    Check,
    LaneGate,
    MakeLane,
    Subject,
    completed,
    failure,
    soon,
)


def _slot(subject: Subject) -> OfferSlot:
    if subject.lane.offers is None:
        raise SkippedError("room for an offered call")
    return subject.lane.offers


async def check_offered_call_follows_without_the_loop(make_lane: MakeLane) -> None:
    """When a call has returned, the lane makes the offered one, though the loop stands still."""
    async with make_lane() as subject:
        slot = _slot(subject)
        subject.needs_blocking()
        gate, has_run = LaneGate(), threading.Event()
        running = subject.lane.enqueue(gate.wait_here)
        await soon(gate.is_reached.wait(), "a call begins")
        offered = slot.offer(has_run.set)
        gate.open()
        assert has_run.wait(PATIENCE_S), "the lane did not make the offered call while the loop stood still"
        assert not slot.withdraw(), "a call that the lane has made was still offered"
        before, after = await completed(running), await completed(offered, "an offered call completes")
        assert before.ended <= after.started, "an offered call began before the call before it had ended"


async def check_offered_call_is_withdrawn_or_made(make_lane: MakeLane) -> None:
    """An offered call is either withdrawn or made, however close the two are."""
    async with make_lane() as subject:
        slot = _slot(subject)
        for _ in range(50):
            running, offered = subject.lane.enqueue(int), slot.offer(int)
            await completed(running)
            if slot.withdraw():
                await completed(subject.lane.enqueue(int))
                assert not offered.done(), "a withdrawn call was made"
            else:
                await completed(offered, "an offered call that cannot be withdrawn completes")


async def check_enqueued_calls_come_before_an_offered_one(make_lane: MakeLane) -> None:
    """A call in the queue comes before an offered one, whichever was first."""
    ran: list[str] = []
    async with make_lane() as subject:
        slot, gate = _slot(subject), LaneGate()
        subject.lane.enqueue(gate.wait_here if subject.may_block else int)
        offered = slot.offer(partial(ran.append, "offered"))
        for name in ("first", "second"):
            subject.lane.enqueue(partial(ran.append, name))
        gate.open()
        await completed(offered, "an offered call completes")
    assert ran == ["first", "second", "offered"], f"these calls ran: {ran}"


async def check_withdrawn_and_failed(make_lane: MakeLane) -> None:
    """A withdrawn call is never made, and a call that raises takes no offer."""
    ran: list[str] = []

    def fail() -> None:
        raise ValueError("of the check")

    async with make_lane() as subject:
        slot, lane = _slot(subject), subject.lane
        slot.offer(partial(ran.append, "withdrawn"))
        assert slot.withdraw(), "an idle lane took an offer"
        slot.offer(partial(ran.append, "after a failure"))
        await failure(lane.enqueue(fail), "a call that raises fails its future")
        assert slot.withdraw(), "the lane took an offer after a call that had raised"
        await completed(lane.enqueue(partial(ran.append, "next")))
    assert ran == ["next"], f"these calls ran: {ran}"


async def check_closed_lane_takes_no_offer(make_lane: MakeLane) -> None:
    """`close` withdraws what is offered."""
    ran: list[str] = []
    async with make_lane() as subject:
        slot = _slot(subject)
        subject.needs_blocking()
        gate = LaneGate()
        running = subject.lane.enqueue(gate.wait_here)
        await soon(gate.is_reached.wait(), "a call begins")
        offered = slot.offer(partial(ran.append, "after close"))
        subject.lane.close()
        is_left = slot.withdraw()
        gate.open()
        await soon(asyncio.wait([running]), "the call that ran during close ends")
        assert not is_left, "a closed lane still holds the offered call"
        await asyncio.sleep(QUIET_S)
        assert not ran, "an offered call began after close"
        assert not offered.done(), "the future of a call that never began is done"


CHECKS: tuple[Check, ...] = (
    check_offered_call_follows_without_the_loop,
    check_offered_call_is_withdrawn_or_made,
    check_enqueued_calls_come_before_an_offered_one,
    check_withdrawn_and_failed,
    check_closed_lane_takes_no_offer,
)
