"""Many independent calculations over the standard library's process pool, with the outcomes in order.

Workers are spawned, never forked: a fork copies every lock as it is, and one that another thread holds (a running
pipeline's, torch's, a notebook's) stays locked forever in the copy. The price is half a second to a second until the
first outcome, in which a worker imports what it runs; forked it takes 20 ms. A script that uses more than one process
needs ``if __name__ == "__main__"``, as for every spawned process.

However a run ends, no process is left behind: workers do not receive Ctrl-C, which a terminal sends to them as well,
and end with the pipe that the process which started them keeps open.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from rrfp.errors import LocalError, RrfpError

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")

_GIVEN_UP = 1


class WorkerLostError(RrfpError):
    """A worker process ended by itself."""


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_all(
    # What to calculate; its outcomes must be picklable.
    run: Callable[[Item], Outcome],
    # Of what. One that cannot be pickled (a class defined in a function, say) runs in this process.
    items: Sequence[Item],
    *,
    # Processes, at least 1; with 1 everything happens in this process.
    jobs: int,
) -> Generator[Outcome, None, None]:
    """Yield run(items[0]), run(items[1]), ..., calculated by several processes.

    Closing the iterator (see `contextlib.closing`) ends the processes at once, whatever they calculate.
    """
    jobs = min(jobs, len(items))
    if jobs <= 1:
        yield from map(run, items)
        return
    theirs, ours = get_context("spawn").Pipe(duplex=False)
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), _end_with, (theirs,))
    try:
        with no_interrupt():  # processes start here, and inherit that Ctrl-C is held back
            futures = [_submit(pool, run, item) for item in items]
        for item, future in zip(items, futures, strict=True):
            yield run(item) if future is None else _outcome(future)
    except BaseException:
        ours.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        ours.close()
        theirs.close()


@contextmanager
def no_interrupt() -> Iterator[None]:
    """Hold Ctrl-C back; a process started meanwhile does so forever."""
    handler, mask = signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    # Python's handlers run in the main thread, also for a signal that reached another one, such as a progress bar's.
    has_handler = threading.current_thread() is threading.main_thread() and handler is not None
    held: list[int] = []
    try:
        if has_handler:
            signal.signal(signal.SIGINT, lambda number, _: held.append(number))
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if has_handler:
            signal.signal(signal.SIGINT, handler)
        for number in held[:1]:
            signal.raise_signal(number)


def _submit(pool: ProcessPoolExecutor, run: Callable[[Item], Outcome], item: Item) -> Future[Outcome] | None:
    """None where the item cannot travel."""
    try:
        call = pickle.dumps((run, item))
    except Exception:  # it cannot be pickled, and says so in many ways
        return None
    return pool.submit(_call, call)


def _outcome(future: Future[Outcome]) -> Outcome:
    try:
        return future.result()
    except BrokenProcessPool:
        raise WorkerLostError(
            "a worker process ended by itself: is there enough memory, and in a script if __name__ == '__main__'?"
        ) from None


def _call(call: bytes) -> Any:
    """In a worker: calculate one item."""
    try:
        run, item = pickle.loads(call)
    except Exception as error:  # the pool would lose the process
        raise LocalError(
            f"a worker process cannot load what it is to run ({type(error).__name__}: {error}): "
            "define it in a module, or take one process (jobs=1)"
        ) from None
    try:
        return run(item)
    except Exception as error:  # what is calculated may be the user's code
        if _is_portable(error):
            raise
        raise LocalError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__) from None


def _is_portable(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True


def _end_with(pipe: Connection) -> None:
    """In a worker: end once the other end of ``pipe`` is closed."""

    def watch() -> None:
        try:
            pipe.recv_bytes()
        finally:
            os._exit(_GIVEN_UP)

    threading.Thread(target=watch, daemon=True).start()
