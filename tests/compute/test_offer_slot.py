"""Offers to a `ThreadLane` with real threads: it takes one when its call has returned, and never against the rules."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from functools import partial

import pytest

from rrfp import OfferSlot
from rrfp.compute.lanes.thread import ThreadLane


class Offered:
    """A lane whose running call the test ends.

    Attributes:
        running: the future of the running call.
        ran: calls that ran after it, by name.
    """

    def __init__(self, name: str = "rrfp-lane") -> None:
        self.lane = ThreadLane(name)
        self.lane.start()
        assert self.lane.offers is not None
        self.slot = self.lane.offers
        self.ran: list[str] = []
        self._gate = threading.Event()

    async def begin(self, error: BaseException | None = None) -> None:
        """The lane runs a call, which returns when `end` is called, or raises ``error``."""
        begun, loop = asyncio.Event(), asyncio.get_running_loop()

        def call() -> None:
            loop.call_soon_threadsafe(begun.set)
            self._gate.wait()
            if error is not None:
                raise error

        self.running = self.lane.enqueue(call)
        await begun.wait()

    def end(self) -> None:
        """Let the running call return. What follows on the lane needs no turn of this loop."""
        self._gate.set()

    def call(self, name: str) -> None:
        self.ran.append(name)


@pytest.fixture
async def offered() -> AsyncIterator[Offered]:
    offered = Offered()
    yield offered
    offered.end()
    offered.lane.close()


@pytest.mark.allow_blocking("the loop stands still while the lane goes on")
async def test_the_lane_begins_an_offered_call_without_the_loop(offered: Offered) -> None:
    await offered.begin()
    has_run = threading.Event()
    future = offered.slot.offer(has_run.set)
    offered.end()
    assert has_run.wait(20)  # this thread is the loop's: it has had no turn
    assert not offered.slot.withdraw()
    assert not offered.running.done()
    before, after = await offered.running, await future
    assert before.ended <= after.started


async def test_the_lane_has_taken_the_offer_when_the_loop_hears_that_the_call_before_has_ended() -> None:
    for _ in range(50):
        lane = Offered()
        await lane.begin()
        future = lane.slot.offer(int)
        lane.end()
        await lane.running
        assert not lane.slot.withdraw()
        await future
        lane.lane.close()


async def test_a_withdrawn_call_never_runs(offered: Offered) -> None:
    await offered.begin()
    future = offered.slot.offer(partial(offered.call, "withdrawn"))
    assert offered.slot.withdraw()
    assert not offered.slot.withdraw()
    offered.end()
    await offered.running
    await offered.lane.enqueue(partial(offered.call, "next"))
    assert (offered.ran, future.done()) == (["next"], False)


async def test_calls_in_the_queue_come_before_an_offered_one(offered: Offered) -> None:
    await offered.begin()
    future = offered.slot.offer(partial(offered.call, "offered"))
    offered.lane.enqueue(partial(offered.call, "first"))
    offered.lane.enqueue(partial(offered.call, "second"))
    offered.end()
    await future
    assert offered.ran == ["first", "second", "offered"]


@pytest.mark.parametrize("error", [ValueError("of the test"), SystemExit(3), asyncio.CancelledError()])
async def test_a_call_that_raises_takes_no_offer(offered: Offered, error: BaseException) -> None:
    await offered.begin(error)
    future = offered.slot.offer(partial(offered.call, "offered"))
    offered.end()
    await asyncio.wait([offered.running])
    assert offered.running.exception() is not None
    assert offered.slot.withdraw()
    await offered.lane.enqueue(partial(offered.call, "next"))
    assert (offered.ran, future.done()) == (["next"], False)


async def test_a_closed_lane_takes_no_offer() -> None:
    offered = Offered("of this test")
    await offered.begin()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "of this test"]
    future = offered.slot.offer(partial(offered.call, "offered"))
    offered.lane.close()
    offered.end()
    await offered.running
    await asyncio.to_thread(thread.join)
    assert (offered.ran, future.done()) == ([], False)


async def test_an_idle_lane_leaves_an_offer_where_it_is(offered: Offered) -> None:
    future = offered.slot.offer(partial(offered.call, "offered"))
    await offered.lane.enqueue(partial(offered.call, "first"))
    await future  # it comes after the next call that returns
    assert offered.ran == ["first", "offered"]


async def test_a_failed_offered_call_fails_its_own_future(offered: Offered) -> None:
    await offered.begin()
    future = offered.slot.offer(lambda: 1 // 0)
    offered.end()
    with pytest.raises(ZeroDivisionError):
        await future
    assert (await offered.running).result is None


async def test_one_call_is_offered_at_a_time() -> None:
    slot = OfferSlot()
    slot.offer(int)
    with pytest.raises(RuntimeError, match="a call is offered already"):
        slot.offer(int)
    assert slot.withdraw()
    slot.offer(int)


class Thing:
    """Something that can be weakly referenced."""


@pytest.mark.parametrize("how", ["withdrawn", "closed", "made"])
async def test_nothing_of_an_offered_call_is_left(offered: Offered, how: str) -> None:
    thing = Thing()
    ref = weakref.ref(thing)
    gc.disable()
    try:
        await offered.begin()
        future = offered.slot.offer(partial(id, thing))
        del thing
        if how == "withdrawn":
            offered.slot.withdraw()
        elif how == "closed":
            offered.lane.close()
        offered.end()
        await offered.running
        if how == "made":
            await future
        del future
        for _ in range(400):
            if ref() is None:
                break
            await asyncio.sleep(0.005)  # the thread may be a moment behind
        assert ref() is None
    finally:
        gc.enable()
