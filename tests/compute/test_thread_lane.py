"""`ThreadLane` with real threads."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from rrfp.compute.lanes.thread import ThreadLane
from rrfp.errors import ConfigError, StageError


@pytest.fixture
async def lane() -> AsyncIterator[ThreadLane]:
    lane = ThreadLane()
    lane.start()
    yield lane
    lane.close()


class Result:
    """Something that can be weakly referenced."""


async def test_calls_run_in_order_on_one_daemon_thread(lane: ThreadLane) -> None:
    threads: list[threading.Thread] = []
    executions = await asyncio.gather(
        *[lane.enqueue(lambda: threads.append(threading.current_thread())) for _ in range(50)]
    )
    assert len(set(threads)) == 1
    assert threads[0].daemon
    assert threads[0] is not threading.current_thread()
    times = [moment for execution in executions for moment in (execution.started, execution.ended)]
    assert times == sorted(times)


async def test_execution_carries_result_and_times(lane: ThreadLane) -> None:
    before = lane.now()
    execution = await lane.enqueue(lambda: 42)
    assert execution.result == 42
    assert before <= execution.started <= execution.ended <= lane.now()


async def test_an_error_fails_its_future_and_the_lane_goes_on(lane: ThreadLane) -> None:
    with pytest.raises(ZeroDivisionError):
        await lane.enqueue(lambda: 1 // 0)
    assert (await lane.enqueue(lambda: "next")).result == "next"


async def test_a_closed_lane_is_over_when_its_running_call_has_returned(lane: ThreadLane) -> None:
    begun, ends = threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        ends.wait()

    lane.enqueue(call)
    lane.enqueue(call)
    await asyncio.to_thread(begun.wait)
    assert not lane.is_over
    lane.close()
    assert not lane.is_over
    ends.set()
    async with asyncio.timeout(10):
        while not lane.is_over:  # noqa: ASYNC110 - the end of a thread is no event
            await asyncio.sleep(0.001)


async def test_an_open_lane_is_not_over_and_one_that_was_never_started_is(lane: ThreadLane) -> None:
    await lane.enqueue(int)
    assert not lane.is_over
    unused = ThreadLane()
    unused.close()
    assert unused.is_over


@pytest.mark.parametrize("fails", [False, True])
async def test_a_closed_lane_makes_its_last_call_behind_the_running_one_and_no_other(
    lane: ThreadLane, fails: bool
) -> None:
    calls, running, gate, ended = list[str](), threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        running.set()
        gate.wait(10)
        calls.append("first")

    def last() -> None:
        calls.append("last")
        ended.set()
        if fails:
            raise ValueError("nobody hears of it")

    lane.enqueue(first)
    assert await asyncio.to_thread(running.wait, 10)
    lane.enqueue(lambda: calls.append("second"))
    lane.close(last)
    lane.close(lambda: calls.append("another last"))
    gate.set()
    assert await asyncio.to_thread(ended.wait, 10)
    assert lane._thread is not None
    await asyncio.to_thread(lane._thread.join)
    assert calls == ["first", "last"]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), StopIteration()])
async def test_errors_that_would_harm_the_loop_are_wrapped(lane: ThreadLane, error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(StageError, match=f"raised {type(error).__name__}") as raised:
        await lane.enqueue(fail)
    assert raised.value.__cause__ is error
    assert (await lane.enqueue(lambda: "next")).result == "next"


async def test_a_cancelled_future_does_not_stop_its_call(lane: ThreadLane) -> None:
    release, calls = threading.Event(), []

    def slow() -> None:
        release.wait()
        calls.append("slow")

    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    future = lane.enqueue(slow)
    future.cancel()
    release.set()
    await lane.enqueue(lambda: calls.append("next"))
    assert calls == ["slow", "next"]
    assert problems == []


async def test_close_does_not_wait_and_drops_what_has_not_begun() -> None:
    lane = ThreadLane()
    lane.start()
    begun, release, calls = asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()

    def slow() -> None:
        loop.call_soon_threadsafe(begun.set)
        release.wait()

    running = lane.enqueue(slow)
    pending = lane.enqueue(lambda: calls.append("never"))
    await begun.wait()
    lane.close()
    lane.close()
    release.set()
    await running
    await asyncio.sleep(0.01)
    assert not pending.done()
    assert calls == []
    with pytest.raises(RuntimeError, match="the lane is closed"):
        lane.enqueue(lambda: None)


def test_a_loop_closed_meanwhile_is_no_error_in_the_thread() -> None:
    release = threading.Event()
    lane = ThreadLane(name="orphan")

    async def leave() -> None:
        lane.start()
        lane.enqueue(lambda: release.wait())

    asyncio.run(leave())
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "orphan"]
    lane.close()
    release.set()
    thread.join(timeout=5)  # an exception in the thread would fail this test as an unhandled-thread warning
    assert not thread.is_alive()


async def collected(ref: weakref.ref[Any]) -> bool:
    """Whether reference counting alone frees `ref` (the thread may be a moment behind)."""
    for _ in range(200):
        if ref() is None:
            return True
        await asyncio.sleep(0.005)
    return False


@pytest.mark.parametrize("fails", [False, True])
async def test_nothing_of_a_call_outlives_its_completion(lane: ThreadLane, fails: bool) -> None:
    captured = Result()
    ref = weakref.ref(captured)

    def use(it: Result) -> Callable[[], Result]:
        def call() -> Result:
            if fails:
                raise ValueError(it)
            return it

        return call

    gc.collect()
    gc.disable()
    try:
        future = lane.enqueue(use(captured))
        del captured
        await asyncio.wait([future])
        assert (future.exception() is not None) is fails
        del future
        assert await collected(ref)
    finally:
        gc.enable()


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
async def test_nice_lowers_only_the_lanes_thread() -> None:
    lane = ThreadLane(nice=7)
    lane.start()
    own = os.getpriority(os.PRIO_PROCESS, 0)
    execution = await lane.enqueue(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    lane.close()
    assert execution.result == min(19, own + 7)
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


@pytest.mark.parametrize("nice", [-1, 20, 2.0, True])
def test_nice_that_is_no_whole_number_in_range_is_refused(nice: Any) -> None:
    """The thread would otherwise end before its first call, which would never be completed."""
    with pytest.raises(ConfigError, match=r"must be a whole number 0\.\.19"):
        ThreadLane(nice=nice)


async def test_misuse_is_named() -> None:
    lane = ThreadLane()
    with pytest.raises(RuntimeError, match="not started"):
        lane.enqueue(lambda: None)
    lane.start()
    with pytest.raises(RuntimeError, match="started before"):
        lane.start()
    lane.close()


async def test_the_loop_stays_free_while_the_lane_is_busy(lane: ThreadLane) -> None:
    future = lane.enqueue(lambda: time.sleep(0.05))
    turns = 0
    while not future.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns >= 5


LEFT_BEHIND = """
import asyncio, sys, time
from rrfp.compute.lanes.thread import ThreadLane

def call(seconds):
    time.sleep(seconds)
    print("returned", flush=True)

async def main():
    lane = ThreadLane()
    lane.start()
    lane.enqueue(lambda: call(float(sys.argv[1])))
    await asyncio.sleep(0.1)
    lane.close()

asyncio.run(main())
"""


@pytest.mark.parametrize(("seconds", "printed"), [(0.5, "returned\n"), (600.0, "")])
def test_the_end_of_the_process_waits_for_a_call_left_behind_but_not_for_ever(seconds: float, printed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEFT_BEHIND, str(seconds)], capture_output=True, text=True, timeout=30, check=True
    )
    assert (done.stdout, done.stderr) == (printed, "")
