"""The processes of a sweep: outcomes in order, whatever happens to a worker."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from contextlib import closing
from multiprocessing import active_children

import pytest

from rrfp.errors import LocalError
from rrfp.lab.sweep.pool import WorkerLostError, no_interrupt, run_all


def broken(item: int) -> int:
    raise KeyError(f"no such thing as {item}")


def fails_later(item: int) -> int:
    """Item 0 takes much longer than the others, which fail."""
    return broken(item) if item else 0 * sum(range(3_000_000))


class OddError(Exception):
    """It pickles, and cannot be read back."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def odd(item: int) -> int:
    raise OddError("item ", str(item))


def kills_itself(item: int) -> int:
    if item == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def slow_at_first(item: int) -> int:
    return item + 0 * sum(range((12 - item) * 20_000))


def sleeps_after_the_first(item: int) -> int:
    if item:
        threading.Event().wait()  # forever
    return item


class Nowhere:
    """It pickles, and only this process can load it."""

    def __reduce__(self) -> tuple[object, ...]:
        return _only_here, (os.getpid(),)


def _only_here(pid: int) -> Nowhere:
    if pid != os.getpid():
        raise ImportError("no module named notebook")
    return Nowhere()


def test_the_first_error_in_order_is_raised_after_everything_before_it() -> None:
    """Whichever worker is faster; the error shows where in the worker it was raised."""
    outcomes = run_all(fails_later, range(3), jobs=3)
    assert next(outcomes) == 0
    with pytest.raises(KeyError, match="no such thing as 1") as caught:
        next(outcomes)
    assert "in broken" in "".join(traceback.format_exception(caught.value))


def test_an_error_that_cannot_travel_comes_as_a_local_error() -> None:
    with pytest.raises(LocalError, match="OddError: item 0") as caught:
        list(run_all(odd, range(2), jobs=2))
    assert "in odd" in "".join(traceback.format_exception(caught.value))


def test_what_a_worker_cannot_load_is_one_clear_error() -> None:
    with pytest.raises(LocalError, match=r"cannot load what it is to run \(ImportError: no module named notebook\)"):
        list(run_all(str, [Nowhere(), Nowhere()], jobs=2))


def test_a_killed_worker_is_an_error_not_a_hang() -> None:
    with pytest.raises(WorkerLostError, match="a worker process ended by itself: is there enough memory"):
        list(run_all(kills_itself, range(3), jobs=2))


def test_outcomes_come_in_order_however_long_each_takes() -> None:
    assert list(run_all(slow_at_first, range(12), jobs=3)) == list(range(12))


def test_closing_early_ends_workers_that_would_never_end() -> None:
    with closing(run_all(sleeps_after_the_first, range(3), jobs=3)) as outcomes:
        assert next(outcomes) == 0
    assert active_children() == []


def test_a_lock_that_another_thread_holds_is_not_held_in_the_workers() -> None:
    """A forked worker would find `lock` locked by a thread that it does not have."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        assert list(run_all(takes_the_lock, range(2), jobs=2)) == [True, True]
    finally:
        done.set()
        thread.join()


lock = threading.Lock()


def takes_the_lock(item: int) -> bool:
    if taken := lock.acquire(timeout=5):
        lock.release()  # one worker may run both items
    return taken


@pytest.mark.parametrize("to", ["this thread", "another one"])
def test_ctrl_c_is_held_back_whichever_thread_the_system_gives_it(to: str) -> None:
    """Python raises KeyboardInterrupt in the main thread in either case, as soon as it can."""
    ends, steps = threading.Event(), list[str]()
    other = threading.Thread(target=ends.wait)
    other.start()

    def interrupted() -> None:
        with no_interrupt():
            thread = other.ident if to == "another one" else threading.get_ident()
            assert thread is not None
            signal.pthread_kill(thread, signal.SIGINT)
            ends.set()
            other.join()  # it has taken the signal
            steps.append("went on")
        steps.append("went on after it")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert steps == ["went on"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.signal(signal.SIGINT, before)
