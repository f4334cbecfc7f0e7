"""Who may call a pipeline, and when: one call at a time, in the process and on the loop that entered it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal
from weakref import WeakSet

from rrfp.errors import ConfigError, RrfpError
from rrfp.runtime.lane_executor import running_here
from rrfp.runtime.stage_runner import StageRunner

State = Literal[
    "new", "open", "in a step", "clipping gradients", "comparing overflows", "saving a trace", "leaving", "closed"
]

#: Those of the pipelines of this process that were started: `Turns.check_outside` names the one that computes.
_started: WeakSet[Turns] = WeakSet()


class Turns:
    """Those of one pipeline, which ``ranks`` names in errors. On the caller's thread."""

    def __init__(self, ranks: object) -> None:
        self._ranks = ranks
        #: What the pipeline does for its caller. May be read on any thread.
        self.state: State = "new"
        #: Calls whose arguments were refused. Ranks compare the number, since each may have dropped a batch.
        self.refused = 0
        #: Held while the state changes: a second caller on another thread must not begin a step as well.
        self._lock = threading.Lock()
        #: The process that entered the pipeline, and with loop "caller" the loop that did.
        self._pid: int | None = None
        self._home: asyncio.AbstractEventLoop | None = None
        self._runners: Sequence[StageRunner] = ()

    @property
    def is_entered(self) -> bool:
        """Whether the pipeline was entered and not left."""
        return self.state not in ("new", "closed")

    @property
    def is_foreign(self) -> bool:
        """Whether this is a child, forked from the process that entered the pipeline: the loop's thread is not here."""
        return self._pid is not None and self._pid != os.getpid()

    def enter(self, *, on_this_loop: bool) -> None:
        """Open the pipeline; an RrfpError the second time."""
        self.check_outside()
        with self._lock:
            if self.state != "new":
                raise RrfpError("this pipeline was entered before; build a new one")
            self.state = "open"
        self._pid = os.getpid()
        self._home = asyncio.get_running_loop() if on_this_loop else None

    def start(self, runners: Sequence[StageRunner]) -> None:
        """The ranks of this process run from now on."""
        self._runners = runners
        _started.add(self)

    @contextmanager
    def begin(self, state: State, *, counts: bool = True) -> Iterator[None]:
        """Enter ``state``, back to open if the block raises; an RrfpError if this caller cannot call now.

        ``counts`` says whether a refused call may have dropped a batch.
        """
        self._check_process()
        if state != "leaving":  # the garbage collector may leave a pipeline that nothing uses any more on any thread
            self.check_outside()
        self._check_loop()
        with self._lock:
            self._check_entered()
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

    def close(self) -> None:
        with self._lock:
            self.state = "closed"

    def has_to_leave(self) -> bool:
        """Whether it was not left before; an RrfpError on another loop, or inside a task, that says where to leave."""
        if self.is_foreign or self.state == "closed":
            return False
        self._check_entered()
        self._check_loop()
        if self._computes_here():
            raise RrfpError(
                "the pipeline cannot be left from inside a task of its own step, such as loss_fn or a module: leave it "
                "where step() was called"
            )
        return True

    def check_outside(self) -> None:
        """Raise an RrfpError if the calling thread computes a task, of this or another pipeline of the process."""
        if (running := running_here()) is None:
            return
        # The task could not go on before the call returns, and torch's one random generator is the task's until then.
        _, task = running
        other = next((turns for turns in list(_started) if turns._computes_here()), None)
        whose = "its own" if other is self else "another pipeline"
        if other not in (self, None):
            whose += f" ({other._ranks})"
        raise RrfpError(
            f"this pipeline ({self._ranks}) was called inside task {task} of {whose}: modules, loss_fn and hooks "
            "cannot call a pipeline of their process; call it before the step, and pass its result as a target or an "
            "input"
        )

    def _computes_here(self) -> bool:
        """Whether a task of one of the ranks is being computed on this thread. May be called on any thread."""
        return any(runner.computes_here() for runner in self._runners)

    def _check_process(self) -> None:
        if self.is_foreign:
            raise RrfpError(
                f"this pipeline belongs to process {self._pid}, of which this one ({os.getpid()}) was forked: build a "
                "pipeline in the process that uses it"
            )

    def _check_entered(self) -> None:
        if self.state == "new":
            raise RrfpError("this pipeline is new; enter it first (with pipeline as pipe, or async with)")

    def _check_loop(self) -> None:
        """Raise an RrfpError on another loop than the caller's own, if the pipeline runs there."""
        if self._home is not None and asyncio.get_running_loop() is not self._home:
            raise RrfpError("this pipeline runs on the loop that entered it (loop is 'caller'): await it there")
