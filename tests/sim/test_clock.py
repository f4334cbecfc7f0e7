"""Virtual time: floats that are exact, timers in order, and handles that can be cancelled."""

from __future__ import annotations

import asyncio
import contextvars
import math
import time
from typing import Any

import pytest
from batches import examples
from hypothesis import given
from hypothesis import strategies as st
from sim.virtual_loop import here

from rrfp.errors import DeadlockError
from rrfp.testing.clock import VirtualClockLoop, run_virtual


def test_a_day_takes_no_time() -> None:
    async def main() -> float:
        await asyncio.sleep(86_400)
        return here().time()

    began = time.monotonic()
    assert run_virtual(main()) == 86_400
    assert time.monotonic() - began < 5


def test_time_begins_where_it_is_told_and_stands_still_while_anything_runs() -> None:
    async def main() -> list[float]:
        times = [here().time()]
        for _ in range(100):
            await asyncio.sleep(0)
        times.append(here().time())
        await asyncio.sleep(0.25)
        return [*times, here().time()]

    with asyncio.Runner(loop_factory=lambda: VirtualClockLoop(start=5.0)) as runner:
        assert runner.run(main()) == [5.0, 5.0, 5.25]


def note(fired: list[tuple[float, int]], number: int) -> None:
    fired.append((here().time(), number))


moments = (
    st.floats(0, 1e6)
    | st.integers(0, 600).map(lambda number: number / 100)
    | st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.1 + 0.2, math.nextafter(0.3, 1), 1e-300])
)


@examples(150)
@given(st.lists(moments, max_size=12))
def test_timers_fire_at_their_very_float_in_order_and_ties_first_come_first_served(whens: list[float]) -> None:
    async def main() -> list[tuple[float, int]]:
        fired: list[tuple[float, int]] = []
        for number, when in enumerate(whens):
            here().call_at(when, note, fired, number)
        await asyncio.sleep(2e6)
        return fired

    assert run_virtual(main()) == sorted((when, number) for number, when in enumerate(whens))


def test_times_one_float_apart_are_two_instants() -> None:
    first = 1.0
    second = math.nextafter(first, 2)

    async def main() -> list[str]:
        log = []
        here().call_at(second, lambda: log.append(f"second at {here().time() == second}"))
        here().call_at(first, lambda: here().call_soon(log.append, f"after first at {here().time() == first}"))
        await asyncio.sleep(2)
        return log

    assert run_virtual(main()) == ["after first at True", "second at True"]


def test_a_timer_set_for_a_sum_fires_at_that_sum() -> None:
    async def main() -> list[float]:
        times = []
        for delay in (0.1, 0.2, 0.3, 1e9, 1e-9, 0.7):
            await asyncio.sleep(delay)
            times.append(here().time())
        return times

    expected, now = [], 0.0
    for delay in (0.1, 0.2, 0.3, 1e9, 1e-9, 0.7):
        now += delay
        expected.append(now)
    assert run_virtual(main()) == expected


def test_time_is_set_and_not_advanced() -> None:
    assert 0.03 + (0.29 - 0.03) != 0.29

    async def main() -> list[float]:
        times: list[float] = []
        for when in (0.03, 0.29):
            here().call_at(when, lambda: times.append(here().time()))
        await asyncio.sleep(1)
        return times

    assert run_virtual(main()) == [0.03, 0.29]


def test_a_timer_that_is_overdue_fires_now_and_time_does_not_go_back() -> None:
    async def main() -> list[float]:
        await asyncio.sleep(3)
        times: list[float] = []
        here().call_at(1, lambda: times.append(here().time()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return times

    assert run_virtual(main()) == [3]


def test_a_whole_number_makes_a_float() -> None:
    async def main() -> Any:
        handle = here().call_at(2, lambda: None)
        await asyncio.sleep(3)
        return handle.when(), here().time()

    assert [type(value) for value in run_virtual(main())] == [float, float]


def test_infinity_never_comes_and_nan_is_refused() -> None:
    async def main() -> float:
        here().call_at(math.inf, lambda: pytest.fail("infinity came"))
        with pytest.raises(ValueError, match="not a number"):
            here().call_at(math.nan, lambda: None)
        await asyncio.sleep(1e300)
        return here().time()

    assert run_virtual(main()) == 1e300


# Handles.


def test_a_cancelled_timer_neither_fires_nor_moves_time() -> None:
    async def main() -> None:
        handle = here().call_at(7, lambda: pytest.fail("it was cancelled"))
        assert (handle.when(), handle.cancelled()) == (7.0, False)
        handle.cancel()
        handle.cancel()
        assert handle.cancelled()
        await asyncio.sleep(1)
        await here().create_future()

    with pytest.raises(DeadlockError, match=r"deadlock at 1 s"):  # and not at 7
        run_virtual(main())


def test_a_callback_may_cancel_a_timer_of_its_own_instant() -> None:
    async def main() -> list[str]:
        log: list[str] = []
        handles: list[asyncio.TimerHandle] = []
        here().call_at(1, lambda: handles[0].cancel())
        handles.append(here().call_at(1, log.append, "second"))
        here().call_at(1, log.append, "third")
        await asyncio.sleep(2)
        return log

    assert run_virtual(main()) == ["third"]


def test_many_cancelled_timers_are_forgotten() -> None:
    async def main() -> int:
        kept = [here().call_at(1e9 + number, lambda: None) for number in range(100)]
        most = 0
        for _ in range(10_000):
            here().call_at(1e9, lambda: None).cancel()
            most = max(most, len(here()._timers))
        for handle in kept:
            handle.cancel()
        return most

    assert run_virtual(main()) <= 2 * 100 + 1


def test_a_timer_runs_in_the_context_in_which_it_was_set() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")

    async def main() -> list[str]:
        seen: list[str] = []
        variable.set("when set")
        here().call_later(1, lambda: seen.append(variable.get()))
        variable.set("later")
        here().call_later(2, lambda: seen.append(variable.get()), context=contextvars.Context())
        await asyncio.sleep(3)
        return seen

    assert run_virtual(main()) == ["when set", "none"]
