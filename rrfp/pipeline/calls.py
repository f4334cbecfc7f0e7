"""The caller's calls: one at a time, in the process and on the loop that entered the pipeline."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from rrfp.errors import ConfigError, RrfpError

T = TypeVar("T")

State = Literal[
    "new", "open", "in a step", "clipping gradients", "comparing overflows", "saving a trace", "leaving", "closed"
]


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A call that has begun: its arguments are checked, and no other call begins before it ends.

    Attributes:
        name: for messages.
        rest: to run on the runtime's loop.
        finish: makes the caller's result of the outcome, on the caller's thread, once the call has ended.
    """

    name: str
    rest: Coroutine[Any, Any, Any]
    finish: Callable[[Any], T]


class CallGate:
    """Admits the calls. Methods are called on the caller's thread.

    Attributes:
        state: what the pipeline does for its caller. May be read on any thread.
        refused: calls whose arguments were refused. Ranks compare the number, since each may have dropped a batch.
    """

    def __init__(self) -> None:
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
        self.check_loop()
        with self._lock:
            if self.state == "new":
                raise RrfpError("this pipeline is new; enter it first (async with, or with .blocking())")
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
