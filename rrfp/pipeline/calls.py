"""The caller's calls: one at a time, in the process and on the loop that entered the pipeline."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from rrfp.errors import ConfigError, RrfpError

T = TypeVar("T")

State = Literal[
    "new", "open", "in a step", "clipping gradients", "comparing overflows", "saving a trace", "leaving", "closed"
]


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A call that has begun: its arguments are checked, and no other call begins before it ends."""

    name: str
    #: To run on the runtime's loop.
    rest: Coroutine[Any, Any, Any]
    #: Makes the caller's result of the outcome, on the caller's thread, once the call has ended.
    finish: Callable[[Any], T]


class CallGate:
    """Admits the calls. Methods are called on the caller's thread.

    Args:
        check_outside: raises an error inside a task of any pipeline of this process.

    Attributes:
        state: what the pipeline does for its caller. May be read on any thread.
        refused: calls whose arguments were refused. Ranks compare the number, since each may have dropped a batch.
    """

    def __init__(self, check_outside: Callable[[], None]) -> None:
        self._check_outside = check_outside
        self.state: State = "new"
        self.refused = 0
        #: Held while the state changes: a second caller on another thread must not begin a step as well.
        self._lock = threading.Lock()
        #: The process that entered the pipeline, and with loop "caller" the loop that did.
        self._pid: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_entered(self) -> bool:
        """Whether the pipeline was entered and not left."""
        return self.state not in ("new", "closed")

    @property
    def is_foreign(self) -> bool:
        """Whether this is a child, forked from the process that entered the pipeline: the loop's thread is not here."""
        return self._pid is not None and self._pid != os.getpid()

    def open(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """The pipeline is entered, on the caller's ``loop`` if it runs there; an RrfpError the second time."""
        self._check_outside()
        with self._lock:
            if self.state != "new":
                raise RrfpError("this pipeline was entered before; build a new one")
            self.state = "open"
        self._pid, self._loop = os.getpid(), loop

    def close(self) -> None:
        """The pipeline was left."""
        with self._lock:
            self.state = "closed"

    @contextmanager
    def beginning(self, state: State, *, counts: bool = True) -> Iterator[None]:
        """Enter ``state``, back to open if the block raises; an RrfpError if this caller cannot call now.

        ``counts`` says whether a refused call may have dropped a batch.
        """
        self._check_process()
        if state != "leaving":  # the garbage collector may leave a pipeline that nothing uses any more on any thread
            self._check_outside()
        self.check_loop()
        with self._lock:
            if self.state == "new":
                raise RrfpError("this pipeline is new; enter it first (with pipeline as pipe, or async with)")
            if self.state != "open":
                then = "" if self.state == "closed" else "; await that first: it takes one call at a time"
                raise RrfpError(f"this pipeline is {self.state}{then}")
            self.state = state
        try:
            yield
        except BaseException as error:
            self.refused += counts and isinstance(error, ConfigError)
            self.end()
            raise

    def end(self) -> None:
        """The call that runs has ended, with or without an error."""
        with self._lock:
            if self.is_entered:  # and not left meanwhile
                self.state = "open"

    @contextmanager
    def between(self, call: str, *, closed: str | None = None) -> Iterator[None]:
        """Keep calls from beginning during the block; an RrfpError if one runs, which names ``call``.

        ``closed`` is advice for the caller, if the call does not go after the pipeline was left either.
        """
        self._check_process()
        with self._lock:
            if self.state not in ("new", "open", "closed"):
                raise RrfpError(f"{call} goes between steps: this pipeline is {self.state}")
            if closed is not None and self.state == "closed":
                raise RrfpError(f"this pipeline is closed: {closed}")
            yield

    def check_loop(self) -> None:
        """Raise an RrfpError on another loop than the caller's own, if the pipeline runs there."""
        if self._loop is not None and asyncio.get_running_loop() is not self._loop:
            raise RrfpError("this pipeline runs on the loop that entered it (loop is 'caller'): await it there")

    def _check_process(self) -> None:
        if self.is_foreign:
            raise RrfpError(
                f"this pipeline belongs to process {self._pid}, of which this one ({os.getpid()}) was forked: build a "
                "pipeline in the process that uses it"
            )


class AwaitedFutures:
    """Those that are not complete. All methods may be called on any thread.

    Each future refers to this object, and a result that a caller keeps to its future: so nothing here may refer to the
    pipeline.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: set[Future[Any]] = set()
        self._error: BaseException | None = None

    def add(self, future: Future[Any]) -> None:
        """Fail ``future`` should the loop run no more, or if it does not already."""
        with self._lock:
            error = self._error
            if error is None:
                self._pending.add(future)
        if error is not None:
            _fail(future, error)
        future.add_done_callback(self._forget)

    def fail(self, error: BaseException) -> None:
        """The loop does not run any more: all of them fail with ``error``. Later ones too, with the first error."""
        with self._lock:
            self._error = self._error or error
            pending = list(self._pending)
        for future in pending:
            _fail(future, error)

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._pending.discard(future)


def _fail(future: Future[Any], error: BaseException) -> None:
    with suppress(InvalidStateError):  # it completed meanwhile
        future.set_exception(error)
