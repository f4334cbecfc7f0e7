"""Checks of what every lane promises about calls, and of offered ones where it takes offers."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from rrfp.compute.lanes.base import OfferSlot
from rrfp.errors import StageError
from rrfp.testing.checks import PATIENCE_S, SkippedError, soon
from rrfp.testing.lane_checks.subject import QUIET_S, LaneGate, MakeLane, Subject, completed, failure

#: Seconds after which nothing of a completed call may be left: less than any of the lane's own timeouts.
FREED_S = 0.5
LOOKS = 200


async def check_order(make_lane: MakeLane) -> None:
    """Calls run one at a time on one thread, in the order in which they were enqueued."""
    seen: list[tuple[str, int, int]] = []

    def call(index: int) -> int:
        seen.append(("begins", index, threading.get_ident()))
        seen.append(("returns", index, threading.get_ident()))
        return index

    async with make_lane() as subject:
        futures = [subject.lane.enqueue(partial(call, index)) for index in range(50)]
        results = [(await completed(future)).result for future in futures]
    expected = [(verb, index) for index in range(50) for verb in ("begins", "returns")]
    assert [(verb, index) for verb, index, _ in seen] == expected, "calls ran in another order, or side by side"
    assert results == list(range(50)), "a future got the result of another call"
    assert len({thread for _, _, thread in seen}) == 1, "calls ran on several threads"


async def check_begins_after_return(make_lane: MakeLane) -> None:
    """A call begins when the one before it has returned, and the loop goes on meanwhile."""
    begun: list[int] = []
    async with make_lane() as subject:
        subject.needs_blocking()
        gate = LaneGate()
        first = subject.lane.enqueue(gate.wait_here)
        second = subject.lane.enqueue(lambda: begun.append(1))
        await soon(gate.is_reached.wait(), "a call begins")
        await asyncio.sleep(QUIET_S)
        assert not begun, "a call began before the one before it had returned"
        gate.open()
        await completed(first)
        await completed(second)
        assert not gate.has_given_up, "the loop did not run while a call ran"


async def check_errors_stay_with_their_call(make_lane: MakeLane) -> None:
    """A call that raises fails its own future, with its exception, and later calls run."""
    error = ValueError("of the check")

    def fail() -> None:
        raise error

    async with make_lane() as subject:
        failing, following = subject.lane.enqueue(fail), subject.lane.enqueue(lambda: "next")
        raised = await failure(failing, "a call that raises fails its future")
        assert raised is error, f"the future failed with {raised!r} in place of the call's own exception"
        assert (await completed(following, "a call after a failed one completes")).result == "next"


async def check_foreign_exceptions(make_lane: MakeLane) -> None:
    """Exceptions that a future must not carry, or that would end the loop, become a StageError caused by them."""

    def fail(error: BaseException) -> None:
        raise error

    async with make_lane() as subject:
        errors = [StopIteration(), asyncio.CancelledError()]
        if subject.may_block:  # on the loop's thread these two must end the loop
            errors += [SystemExit(3), KeyboardInterrupt()]
        for error in errors:
            name = type(error).__name__
            raised = await failure(subject.lane.enqueue(partial(fail, error)), f"a call that raises {name} fails")
            assert isinstance(raised, StageError), f"{name} became {raised!r}, must become a StageError"
            assert raised.__cause__ is error, f"the StageError for {name} is not caused by it"
            assert name in str(raised), f"the StageError for {name} does not name it"
        await completed(subject.lane.enqueue(int), "a call after such exceptions completes")


async def check_cancelled_future(make_lane: MakeLane) -> None:
    """Cancelling a future stops neither its call nor later ones, and is no error."""
    ran: list[str] = []
    problems: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: problems.append(context))
    try:
        async with make_lane() as subject:
            subject.lane.enqueue(lambda: ran.append("cancelled")).cancel()
            await completed(subject.lane.enqueue(lambda: ran.append("next")))
    finally:
        loop.set_exception_handler(None)
    assert ran == ["cancelled", "next"], f"these calls ran: {ran}"
    assert not problems, f"the loop had to handle: {problems[0]['message']}"


class _Thing:
    """Something that can be weakly referenced."""


async def check_nothing_outlives_completion(make_lane: MakeLane) -> None:
    """When a future is done, the lane holds neither the call nor its result or exception, without a collector's run."""
    async with make_lane() as subject:
        for fails in (False, True):
            refs = await _weakly(subject, fails=fails)
            for _ in range(LOOKS):
                if all(ref() is None for ref in refs):
                    break
                await asyncio.sleep(FREED_S / LOOKS)
            names = [name for name, ref in zip(("closure", "outcome"), refs, strict=True) if ref() is not None]
            how = "a call that failed" if fails else "a call that returned"
            assert not names, f"{FREED_S:g} s after {how} was complete, its {' and its '.join(names)} still lived"


async def _weakly(subject: Subject, *, fails: bool) -> list[weakref.ref[Any]]:
    """Run a call; returns references to its closure and outcome."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        closure = _Thing()
        refs: list[weakref.ref[Any]] = [weakref.ref(closure)]

        future = subject.lane.enqueue(partial(_fail if fails else _return, closure, refs))
        del closure
        await soon(asyncio.wait([future]), "a call completes")
        future.exception()
        return refs
    finally:
        if is_collecting:
            gc.enable()


class _Error(Exception):
    """Registers itself: a local variable would stay in its traceback."""

    def __init__(self, refs: list[weakref.ref[Any]]) -> None:
        super().__init__("of the check")
        refs.append(weakref.ref(self))


def _return(closure: _Thing, refs: list[weakref.ref[Any]]) -> _Thing:
    result = _Thing()
    refs.append(weakref.ref(result))
    return result


def _fail(closure: _Thing, refs: list[weakref.ref[Any]]) -> _Thing:
    raise _Error(refs)


async def check_times(make_lane: MakeLane) -> None:
    """Calls begin and end one after the other on the lane's clock; a call ends no earlier than it returned."""
    async with make_lane() as subject:
        lane, moments = subject.lane, [subject.lane.now()]
        for _ in range(3):
            futures = [lane.enqueue(int) for _ in range(lane.depth)]
            for future in futures:
                execution = await completed(future)
                moments += [execution.started, execution.ended]
                launched = execution.launched
                assert launched is None or launched <= execution.ended, (
                    f"a call ended at {execution.ended}, but returned at {launched}"
                )
            assert execution.ended <= lane.now(), f"a call ended at {execution.ended}, later than now, {lane.now()}"
    assert moments == sorted(moments), f"these times do not follow one another: {moments}"


async def check_close_does_not_wait(make_lane: MakeLane) -> None:
    """`close` returns while a call runs, starts no further one, and may be called twice; then `enqueue` raises."""
    ran: list[str] = []
    async with make_lane() as subject:
        subject.needs_blocking()
        gate = LaneGate()
        running = subject.lane.enqueue(gate.wait_here)
        waiting = subject.lane.enqueue(lambda: ran.append("after close"))
        await soon(gate.is_reached.wait(), "a call begins")
        subject.lane.close()
        assert not gate.has_given_up, "close waited for the running call"
        subject.lane.close()
        gate.open()
        await soon(asyncio.wait([running]), "the call that ran during close ends")
        await asyncio.sleep(QUIET_S)
        assert not ran, "a call began after close"
        assert not waiting.done(), "the future of a call that never began is done"
        try:
            subject.lane.enqueue(int)
        except RuntimeError:
            return
        raise AssertionError("a closed lane takes calls")


async def check_stack(make_lane: MakeLane) -> None:
    """`stack` names the function that runs, and nothing once no call runs."""
    async with make_lane() as subject:
        subject.needs_blocking()
        gate = LaneGate()
        running = subject.lane.enqueue(partial(_users_function(), gate.wait_here))
        await soon(gate.is_reached.wait(), "a call begins")
        during = subject.lane.stack()
        gate.open()
        await completed(running)
        if not during:
            raise SkippedError("a stack")
        assert "of_the_check" in during, f"the stack does not name the running call: {during}"
        assert "of_the_check" not in subject.lane.stack(), "the stack names a call that has ended"


def _users_function() -> Callable[[Callable[[], None]], None]:
    """A function in no file of this package, as users' are."""
    names: dict[str, Callable[[Callable[[], None]], None]] = {}
    exec(compile("def of_the_check(wait):\n    wait()", "<the checked call>", "exec"), names)
    return names["of_the_check"]


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
