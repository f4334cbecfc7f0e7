"""A lane on timers: exact in virtual time, one call at a time, and no thread."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rrfp import Execution
from rrfp.errors import StageError
from rrfp.testing.clock import TimerLane, run_virtual


def started() -> TimerLane:
    lane = TimerLane()
    lane.start()
    return lane


def taking(lane: TimerLane, *seconds: float, result: Any = None, log: list[Any] | None = None) -> Callable[[], Any]:
    """A call that takes so long, and notes when it is made."""

    def call() -> Any:
        if log is not None:
            log.append((result, lane.now()))
        for each in seconds:
            lane.spend(each)
        return result

    return call


def test_calls_run_one_after_the_other_and_end_at_start_plus_duration_to_the_last_bit() -> None:
    durations = [0.1, 0.2, 0.0, 0.7]

    async def main() -> tuple[list[Execution[Any]], list[Any]]:
        lane, log = started(), list[Any]()
        await asyncio.sleep(0.3)
        done = [lane.enqueue(taking(lane, seconds, result=i, log=log)) for i, seconds in enumerate(durations)]
        return [await future for future in done], log

    executions, log = run_virtual(main())
    now, expected = 0.3, []
    for number, seconds in enumerate(durations):
        expected.append(Execution(number, now, now + seconds))
        now += seconds
    assert executions == expected
    assert log == [(execution.result, execution.started) for execution in expected], "made when the lane got there"


def test_a_call_is_made_after_enqueue_returned_and_completes_when_its_time_has_passed() -> None:
    async def main() -> list[Any]:
        lane, log = started(), list[Any]()
        done = lane.enqueue(taking(lane, 2.0, result="ran", log=log))
        done.add_done_callback(lambda _: log.append(("done", lane.now())))
        log.append(("enqueued", lane.now()))
        await asyncio.sleep(1.5)
        log.append(("waiting", done.done()))
        await done
        return log

    assert run_virtual(main()) == [("enqueued", 0), ("ran", 0), ("waiting", False), ("done", 2)]


def test_what_a_call_spends_adds_up_and_a_lane_that_was_idle_begins_now() -> None:
    async def main() -> tuple[float, float]:
        lane = started()
        first = await lane.enqueue(taking(lane, 1.0, 0.25))
        await asyncio.sleep(5)
        second = await lane.enqueue(taking(lane))
        return first.ended, second.ended

    assert run_virtual(main()) == (1.25, 6.25)


def test_a_failure_comes_when_the_time_is_over_and_the_next_call_runs() -> None:
    async def main() -> tuple[float, Any]:
        lane = started()

        def fail() -> None:
            lane.spend(3)
            raise OSError("broken")

        failing, next_one = lane.enqueue(fail), lane.enqueue(taking(lane, 1, result="next"))
        with pytest.raises(OSError, match="broken"):
            await failing
        return lane.now(), (await next_one).result

    assert run_virtual(main()) == (3, "next")


@pytest.mark.parametrize("error", [StopIteration(), asyncio.CancelledError(), GeneratorExit()])
def test_what_a_future_cannot_carry_becomes_a_stage_error(error: BaseException) -> None:
    async def main() -> None:
        def fail() -> None:
            raise error

        with pytest.raises(StageError, match=type(error).__name__) as caught:
            await started().enqueue(fail)
        assert caught.value.__cause__ is error

    run_virtual(main())


def test_ctrl_c_in_a_call_ends_the_loop() -> None:
    async def main() -> None:
        def interrupt() -> None:
            raise KeyboardInterrupt

        await started().enqueue(interrupt)

    with pytest.raises(KeyboardInterrupt):
        run_virtual(main())


def test_a_cancelled_future_does_not_stop_its_call_nor_the_next() -> None:
    async def main() -> Execution[Any]:
        lane = started()
        lane.enqueue(taking(lane, 2)).cancel()
        return await lane.enqueue(taking(lane, 1))

    assert run_virtual(main()) == Execution(None, 2, 3)


def test_a_closed_lane_begins_nothing_and_refuses() -> None:
    async def main() -> tuple[bool, bool, list[Any]]:
        lane, log = started(), list[Any]()
        running, waiting = lane.enqueue(taking(lane, 1)), lane.enqueue(taking(lane, 1, result="late", log=log))
        await asyncio.sleep(0.5)
        lane.close()
        lane.close()
        with pytest.raises(RuntimeError, match="the lane is closed"):
            lane.enqueue(taking(lane))
        await asyncio.sleep(10)
        return running.done(), waiting.done(), log

    assert run_virtual(main()) == (True, False, [])


def test_time_is_spent_inside_calls_only_and_forwards() -> None:
    async def main() -> None:
        lane = started()
        with pytest.raises(RuntimeError, match="outside a call"):
            lane.spend(1)
        for wrong in (-1.0, math.nan):
            with pytest.raises(ValueError, match="must be a number >= 0"):
                await lane.enqueue(taking(lane, wrong))
        with pytest.raises(RuntimeError, match="outside a call"):
            lane.spend(1)

    run_virtual(main())


def test_a_lane_starts_once_and_serves_nothing_before() -> None:
    async def main() -> None:
        lane = TimerLane()
        assert lane.now() == 0
        with pytest.raises(RuntimeError, match="not started"):
            lane.enqueue(taking(lane))
        lane.start()
        with pytest.raises(RuntimeError, match="started before"):
            lane.start()

    run_virtual(main())


async def test_on_an_ordinary_loop_it_takes_real_time_and_no_thread() -> None:
    threads, lane = threading.active_count(), started()
    execution = await lane.enqueue(taking(lane, 0.02))
    assert execution.ended - execution.started + 1e-3 >= 0.02
    assert threading.active_count() == threads
