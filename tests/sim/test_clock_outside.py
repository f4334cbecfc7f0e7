"""A loop in virtual time waits for nothing outside: it names a deadlock, and refuses threads and files."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import threading
import time

import pytest
from sim.virtual_loop import here

from rrfp.errors import DeadlockError
from rrfp.testing.clock import VirtualClockLoop, run_virtual

# Nothing will ever happen again.


def test_waiting_for_nothing_is_a_deadlock_that_names_the_tasks() -> None:
    async def starve() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.sleep(2.5)
        hungry = asyncio.create_task(starve(), name="hungry")
        await hungry

    with pytest.raises(DeadlockError) as caught:
        run_virtual(main())
    head, *tasks = str(caught.value).splitlines()
    assert head.startswith("deadlock at 2.5 s of virtual time: nothing is runnable and no timer is set")
    assert [line.split(" (")[0].strip() for line in tasks][1] == "hungry"
    assert len(tasks) == 2
    assert "starve" in tasks[1]
    assert "test_clock_outside.py:" in tasks[1]


def test_after_a_deadlock_everything_is_cancelled_and_the_cleanup_runs() -> None:
    log = []

    async def main() -> None:
        try:
            await here().create_future()
        finally:
            await asyncio.sleep(1)
            log.append("cleaned up")

    with pytest.raises(DeadlockError):
        run_virtual(main())
    assert log == ["cleaned up"]


def test_a_sleep_for_ever_is_a_deadlock() -> None:
    with pytest.raises(DeadlockError):
        run_virtual(asyncio.sleep(math.inf))


def test_ctrl_c_ends_a_coroutine_that_would_go_on_for_ever() -> None:
    async def main() -> None:
        here().call_later(1000, os.kill, os.getpid(), signal.SIGINT)
        tick()
        await here().create_future()

    def tick() -> None:
        asyncio.get_running_loop().call_later(1, tick)

    with pytest.raises(KeyboardInterrupt):
        run_virtual(main())


# Nothing comes from outside.


def test_calls_of_another_thread_are_refused_and_its_own_are_not() -> None:
    log: list[str] = []
    loop = VirtualClockLoop()
    loop.call_soon_threadsafe(log.append, "own thread")

    def elsewhere() -> None:
        try:
            loop.call_soon_threadsafe(log.append, "other thread")
        except RuntimeError as error:
            log.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    loop.run_until_complete(asyncio.sleep(1))
    loop.close()
    refused, accepted = log
    assert refused.startswith("call_soon_threadsafe from another thread has no place in virtual time")
    assert accepted == "own thread"


def test_executors_files_and_signal_handlers_are_refused() -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="run_in_executor has no place in virtual time"):
            await asyncio.to_thread(time.monotonic)
        with pytest.raises(RuntimeError, match="add_signal_handler has no place in virtual time"):
            here().add_signal_handler(signal.SIGUSR1, lambda: None)
        left, right = socket.socketpair()
        with left, right, pytest.raises(RuntimeError, match="waiting for a file descriptor has no place"):
            here().add_reader(left, lambda: None)

    run_virtual(main())


def test_a_closed_loop_sets_no_timers() -> None:
    loop = VirtualClockLoop()
    loop.call_later(1, lambda: None)
    loop.close()
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_later(1, lambda: None)


def test_a_loop_can_run_more_than_once() -> None:
    loop = VirtualClockLoop()
    try:
        loop.run_until_complete(asyncio.sleep(1))
        loop.run_until_complete(asyncio.sleep(1.5))
        assert loop.time() == 2.5
    finally:
        loop.close()
