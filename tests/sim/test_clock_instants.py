"""One instant of virtual time: who runs before whom, how it settles, and asyncio's own machinery on top."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from sim.virtual_loop import here

from rrfp.arbiter.loop import LoopTime
from rrfp.testing.clock import VirtualClockLoop, run_virtual


def test_settled_waits_for_everything_that_is_runnable_and_for_timers_that_are_due() -> None:
    async def main() -> list[str]:
        log = []

        async def chain() -> None:
            for number in range(5):
                await asyncio.sleep(0)
                log.append(f"turn {number}")
            here().call_at(here().time(), log.append, "due now")
            here().call_later(1, log.append, "later")

        running = asyncio.create_task(chain())
        await here().settled()
        log.append("settled")
        await running
        await asyncio.sleep(2)
        return log

    assert run_virtual(main()) == ["turn 0", "turn 1", "turn 2", "turn 3", "turn 4", "due now", "settled", "later"]


def test_all_timers_of_an_instant_fire_before_what_the_first_of_them_makes_runnable() -> None:
    async def main() -> list[str]:
        log: list[str] = []
        here().call_at(1, lambda: here().call_soon(log.append, "made by the first"))
        here().call_at(1, log.append, "second")
        await asyncio.sleep(2)
        return log

    assert run_virtual(main()) == ["second", "made by the first"]


def test_all_who_wait_at_one_instant_are_let_go_together_in_the_order_of_asking() -> None:
    async def main() -> list[str]:
        log: list[str] = []

        async def wait(name: str) -> None:
            await here().settled()
            log.append(name)
            here().call_soon(log.append, f"made by {name}")

        await asyncio.gather(*(wait(name) for name in "abc"))
        await asyncio.sleep(0)
        return log

    assert run_virtual(main()) == ["a", "b", "c", "made by a", "made by b", "made by c"]


def test_settling_again_at_the_same_instant_waits_for_what_the_first_round_began() -> None:
    async def main() -> list[Any]:
        log: list[Any] = []
        await here().settled()
        here().call_soon(lambda: here().call_at(here().time(), log.append, "begun by the first round"))
        await here().settled()
        log.append(here().time())
        return log

    assert run_virtual(main()) == ["begun by the first round", 0.0]


def test_a_waiter_that_was_cancelled_holds_nobody_up() -> None:
    async def main() -> float:
        async def wait() -> None:
            await here().settled()

        waiting = [asyncio.create_task(wait()) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.wait(waiting)
        assert [task.cancelled() for task in waiting] == [True, False]
        waiter = here().settled()
        waiter.cancel()
        await asyncio.sleep(1)
        return here().time()

    assert run_virtual(main()) == 1


def test_only_a_loop_that_settles_is_taken_for_one() -> None:
    async def main() -> bool:
        return LoopTime.of_running_loop().is_virtual

    assert run_virtual(main()) is True
    assert asyncio.run(main()) is False


# asyncio's own machinery.


def test_timeouts_are_virtual() -> None:
    async def main() -> list[float]:
        times = []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await here().create_future()
        times.append(here().time())
        async with asyncio.timeout(10):
            await asyncio.sleep(9.5)
        times.append(here().time())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(2), 1.5)
        times.append(here().time())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(-1):
                await here().create_future()
        await asyncio.wait([asyncio.create_task(asyncio.sleep(3))], timeout=1)
        return [*times, here().time()]

    assert run_virtual(main()) == [10, 19.5, 21, 22]


async def together(*coroutines: Coroutine[Any, Any, None]) -> None:
    async with asyncio.TaskGroup() as group:
        for coroutine in coroutines:
            group.create_task(coroutine)


def test_task_groups_queues_and_exceptions_work() -> None:
    async def produce(queue: asyncio.Queue[int]) -> None:
        for number in range(3):
            await asyncio.sleep(1)
            await queue.put(number)
        raise OSError("done")

    async def main() -> list[int]:
        queue: asyncio.Queue[int] = asyncio.Queue()
        with pytest.raises(ExceptionGroup):
            await together(produce(queue), asyncio.sleep(100))
        assert here().time() == 3
        return [queue.get_nowait() for _ in range(queue.qsize())]

    assert run_virtual(main()) == [0, 1, 2]


def test_debug_mode_works() -> None:
    async def main() -> float:
        here().call_later(1, lambda: None)
        async with asyncio.timeout(5):
            await asyncio.sleep(2)
        return here().time()

    with asyncio.Runner(debug=True, loop_factory=VirtualClockLoop) as runner:
        assert runner.run(main()) == 2
