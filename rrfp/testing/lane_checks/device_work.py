"""Checks of lanes in front of a device: completion, order with the caller's work, memory, late errors."""

from __future__ import annotations

import asyncio
import math
import threading
from functools import partial

from torch import Tensor

from rrfp.testing.checks import SkippedError, soon
from rrfp.testing.lane_checks.subject import MakeLane, Subject, completed, failure, full_on, holds, synchronized

#: A check of overlap is repeated so often, since the machine may suspend the lane for as long as the device computes.
ATTEMPTS = 10

#: The completion of a call reaches the loop so much later at most; far less than the device takes.
NOTICED_S = 0.005


async def check_complete_means_complete(make_lane: MakeLane) -> None:
    """When a future is done, the device has run the call's work: the host may read the results."""
    async with make_lane() as subject:
        device = subject.needs_device()
        x = await full_on(device, 0)
        await completed(subject.lane.enqueue(partial(subject.fill, x, 3)))
        assert holds(x, 3), "a future was done before the device had run the call's work"
        _no_problems(subject)


async def check_later_calls_see_earlier_results(make_lane: MakeLane) -> None:
    """A call enqueued behind another one computes with its results, though they are not complete when it is made."""
    async with make_lane() as subject:
        device = subject.needs_device()
        x = await full_on(device, 0)
        subject.lane.enqueue(partial(subject.fill, x, 3))
        y = (await completed(subject.lane.enqueue(partial(_plus_one, x)))).result
        assert holds(y, 4), "a call did not see the result of the call before it"
        _no_problems(subject)


async def check_depth(make_lane: MakeLane) -> None:
    """``depth`` calls are made while the device still works for the first: it need not wait for the host."""
    async with make_lane() as subject:
        device, lane = subject.needs_device(), subject.lane
        if lane.depth < 2:
            raise SkippedError("a depth of 2 or more")
        x = await full_on(device, 0)
        for _ in range(ATTEMPTS):
            is_made = asyncio.Event()
            futures = [lane.enqueue(partial(subject.fill, x, value)) for value in range(lane.depth - 1)]
            loop = asyncio.get_running_loop()
            futures.append(lane.enqueue(partial(_on_loop, loop, is_made)))
            await soon(is_made.wait(), "the last call is made")
            await asyncio.sleep(NOTICED_S)
            is_pending = not any(future.done() for future in futures)
            await soon(asyncio.wait(futures), "calls complete")
            if is_pending:
                return
    raise AssertionError(f"{lane.depth} calls were never pending at once, but that is the lane's depth")


async def check_fence(make_lane: MakeLane) -> None:
    """Calls enqueued after `fence` run behind the work that its caller has issued before."""
    async with make_lane() as subject:
        device = subject.needs_device()
        for value in (3, 5):
            x = await full_on(device, 0)
            with device.current_stream().issuing():
                subject.fill(x, value)
            subject.lane.fence()
            y = (await completed(subject.lane.enqueue(partial(_plus_one, x)))).result
            assert holds(y, value + 1), "a call ran before work that its caller had issued before fence"
            _no_problems(subject)


async def check_adopt(make_lane: MakeLane) -> None:
    """Memory of other streams that a call has adopted may be freed when the call returns."""
    async with make_lane() as subject:
        device, lane = subject.needs_device(), subject.lane
        received, slow = [await full_on(device, 7)], await full_on(device, 0)
        has_returned = threading.Event()

        def call() -> Tensor:
            lane.adopt(received)
            subject.fill(slow, 1)
            result: Tensor = received.pop() + 1
            return result

        future = lane.enqueue(call)
        lane.enqueue(has_returned.set)
        await soon(asyncio.to_thread(has_returned.wait), "a call returns")
        reusing = await full_on(device, math.nan)
        y = (await completed(future)).result
        assert holds(y, 8), "memory that a call had adopted was reused before the call was complete"
        _no_problems(subject)
        del reusing


async def check_hand_over(make_lane: MakeLane) -> None:
    """Memory of the lane that was handed over to a caller may be freed while the caller's work still uses it."""
    async with make_lane() as subject:
        device, lane = subject.needs_device(), subject.lane
        x, slow = await full_on(device, 7), await full_on(device, 0)
        lane.fence()
        y = (await completed(lane.enqueue(partial(_plus_one, x)))).result
        lane.hand_over([y])
        with device.current_stream().issuing():
            subject.fill(slow, 1)
            z = y + 1
        del y
        await completed(lane.enqueue(lambda: x * math.nan))
        await synchronized(device)
        assert holds(z, 9), "memory that was handed over was reused before the caller's work was complete"
        _no_problems(subject)


async def check_close_with_pending_work(make_lane: MakeLane) -> None:
    """`close` does not wait for the device; a call that was made completes all the same."""
    async with make_lane() as subject:
        device = subject.needs_device()
        x = await full_on(device, 0)
        future = subject.lane.enqueue(partial(subject.fill, x, 3))
        has_returned = asyncio.Event()
        subject.lane.enqueue(partial(_on_loop, asyncio.get_running_loop(), has_returned))
        await soon(has_returned.wait(), "a call returns")
        subject.lane.close()
        await completed(future, "a call that was made before close completes")
        assert holds(x, 3), "after close, a future was done before the device had run the call's work"


async def check_errors_wait_for_earlier_work(make_lane: MakeLane) -> None:
    """A call that raises while the device works for earlier ones fails after these have completed."""
    async with make_lane() as subject:
        device = subject.needs_device()
        x = await full_on(device, 0)
        slow = subject.lane.enqueue(partial(subject.fill, x, 3))
        failing = subject.lane.enqueue(lambda: 1 // 0)
        error = await failure(failing, "a call that raises fails")
        assert isinstance(error, ZeroDivisionError), f"the future failed with {error!r}"
        assert slow.done(), "a call failed before an earlier one was complete, which may be at fault"


async def check_late_error(make_lane: MakeLane) -> None:
    """If the device fails, the call at fault fails first, and all later ones with the same error."""
    async with make_lane() as subject:
        device, lane = subject.needs_device(), subject.lane
        if subject.break_next is None:
            raise SkippedError("a way to let the device fail")
        x = await full_on(device, 0)
        order: list[int] = []
        good = lane.enqueue(partial(subject.fill, x, 3))
        await completed(good)
        subject.break_next()
        bad = [lane.enqueue(partial(subject.fill, x, value)) for value in range(3)]
        for index, future in enumerate(bad):
            future.add_done_callback(partial(_note, order, index))
        first = await failure(bad[0], "the call whose work fails on the device fails")
        others = [await failure(future, "calls behind a failed device fail") for future in bad[1:]]
        lane.fence()  # as before the next step
        others.append(await failure(lane.enqueue(int), "a call enqueued on a failed device fails"))
        assert all(other is first for other in others), f"later calls failed with {others}, the first with {first!r}"
        assert order == sorted(order), "a later call failed before the one at fault"


def _on_loop(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    loop.call_soon_threadsafe(event.set)


def _plus_one(tensor: Tensor) -> Tensor:
    return tensor + 1


def _note(order: list[int], index: int, _: object) -> None:
    order.append(index)


def _no_problems(subject: Subject) -> None:
    problems = subject.problems()
    assert not problems, f"the device found a race: {problems[0]}"
