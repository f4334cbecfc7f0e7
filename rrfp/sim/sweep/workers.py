"""Runs many independent calculations over forked processes, and gives the answers in order.

It knows nothing of simulations. Processes are forked, so that what they calculate with (a hint's class from a notebook,
say) need not be picklable; only places in the list and answers travel. However it ends, no process is left behind: the
workers do not listen to Ctrl-C, which a terminal sends to them as well, and die with the process that started them.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Generic, TypeVar

from rrfp.errors import LocalError, RrfpError

Answer = TypeVar("Answer")

_GONE = 1


class WorkerLostError(RrfpError):
    """A worker process ended by itself."""


def usable_cores() -> int:
    """How many processes can compute at a time."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(work: Callable[[int], Answer], count: int, *, jobs: int) -> Generator[Answer, None, None]:
    """Yield work(0), work(1), ..., work(count - 1), calculated by several processes.

    Closing the iterator (see `contextlib.closing`) ends the processes at once.

    Args:
        work: what to calculate; its answers must be picklable.
        count: how many.
        jobs: processes, at least 1; with 1 everything happens in this process.

    Raises:
        WorkerLostError: if a process ended by itself, such as for want of memory.
        Exception: what ``work`` raises, with the worker's traceback as a note; what cannot be pickled as `LocalError`.
    """
    jobs = min(jobs, count)
    if jobs <= 1:
        yield from map(work, range(count))
        return
    workers: list[_Worker[Answer]] = []
    try:
        workers.extend(_Worker(work) for _ in range(jobs))
        yield from _collect(workers, count)
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.close()


def _collect(workers: list[_Worker[Answer]], count: int) -> Iterator[Answer]:
    todo = iter(range(count))
    by_pipe = {worker.pipe: worker for worker in workers}
    for worker in workers:
        worker.pipe.send(next(todo))
    done: dict[int, _Outcome[Answer]] = {}
    due = 0
    while due < count:
        for pipe in wait(list(by_pipe)):
            worker = by_pipe[pipe]  # type: ignore[index]
            outcome = worker.receive()
            done[outcome.place] = outcome
            following = next(todo, None)
            if following is None:
                del by_pipe[worker.pipe]
            else:
                worker.pipe.send(following)
        while due in done:
            yield done.pop(due).get()  # errors too come in order: the same one whatever was faster
            due += 1


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[Answer]):
    """What a worker sends back: an answer or an error."""

    place: int
    answer: Answer | None
    error: Exception | None

    def get(self) -> Answer:
        if self.error is not None:
            raise self.error
        return self.answer  # type: ignore[return-value]


class _Worker(Generic[Answer]):
    """One process and this end of its pipe."""

    def __init__(self, work: Callable[[int], Answer]) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, work), daemon=True)
        with no_interrupt():
            self._process.start()
        theirs.close()  # only the worker holds that end now, so its death is the end of the pipe

    def receive(self) -> _Outcome[Answer]:
        """What came of the place that was sent last.

        Raises:
            WorkerLostError: if the process is gone.
        """
        try:
            outcome: _Outcome[Answer] = self.pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode
            raise WorkerLostError(
                f"a worker process ended by itself (exit code {code}): is there enough memory?"
            ) from None
        return outcome

    def kill(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()

    def close(self) -> None:
        """Wait until the process is gone."""
        self._process.join()
        self._process.close()
        self.pipe.close()


@contextmanager
def no_interrupt() -> Iterator[None]:
    """Hold Ctrl-C back until the block is left; a process forked in it starts with Ctrl-C held back."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Connection, work: Callable[[int], object]) -> None:
    """A worker's life: calculate what is asked for until it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        place = pipe.recv()
        try:
            outcome = _Outcome(place, work(place), None)
        except Exception as error:  # what is calculated may be the user's code
            outcome = _Outcome(place, None, _portable(error))
        pipe.send(outcome)


def _portable(error: Exception) -> Exception:
    """An exception that can be sent; one that nobody raises on purpose takes its traceback with it."""
    if isinstance(error, RrfpError):
        return error
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # it cannot be pickled, and says so in many ways
        error = LocalError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
    error.add_note("".join(traceback.format_exception(error)))
    return error


def _end_with_parent() -> None:
    """The parent was killed: nobody waits for what this process calculates."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    parent.join()
    os._exit(_GONE)
