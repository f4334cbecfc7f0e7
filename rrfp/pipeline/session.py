"""One use of a pipeline: its ranks, their loop, and the state. Both the async and the blocking API drive a session."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeVar

from rrfp.core.tasks import Mode
from rrfp.errors import ConfigError, PipelineAborted, RrfpError
from rrfp.pipeline.local_ranks import LocalRanks
from rrfp.pipeline.loop_thread import LoopThread
from rrfp.runtime.batching import EvaluateArguments, StepArguments
from rrfp.runtime.grad_clipping import Clipping
from rrfp.runtime.result import StepResult

T = TypeVar("T")

State = Literal["new", "open", "in a step", "clipping gradients", "saving a trace", "leaving", "closed"]

#: The arguments of a step beside inputs and targets.
_ARGUMENTS: Mapping[Mode, frozenset[str]] = {
    Mode.TRAIN: StepArguments.__required_keys__ | StepArguments.__optional_keys__,
    Mode.FORWARD: EvaluateArguments.__required_keys__ | EvaluateArguments.__optional_keys__,
}


class Session:
    """See the module's docstring. Methods are called on the caller's thread, unless their docstring names another.

    ``thread_name`` is that of the thread with the loop; None: the ranks run on the caller's loop.
    """

    def __init__(self, ranks: LocalRanks, thread_name: str | None) -> None:
        self.ranks = ranks
        self.thread: LoopThread | None = None
        self.thread_name = thread_name
        #: Steps begun, counting evaluations, the same on all ranks; and the number of the next training step.
        self._next_step, self._training_step = 0, ranks.first_step
        #: Calls whose arguments were refused. Ranks compare the number, since each may have dropped a batch.
        self._refused = 0
        self._state: State = "new"
        #: Held while the state changes: a second caller on another thread must not begin a step as well.
        self._lock = threading.Lock()
        #: The failure that all calls raise once the loop has not run for too long.
        self._given_up: PipelineAborted | None = None
        self._outcomes: set[concurrent.futures.Future[Any]] = set()
        #: The process that entered the pipeline, and with loop "caller" the loop that did.
        self._pid: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def enter(self) -> None:
        """Enter the pipeline; an RrfpError the second time."""
        with self._lock:
            if self._state != "new":
                raise RrfpError("this pipeline was entered before; build a new one")
            self._state = "open"
        self._pid = os.getpid()
        try:
            if self.thread_name is None:
                self._loop = asyncio.get_running_loop()
            self.ranks.announce()
            if self.thread_name is not None:
                self.thread = LoopThread(self.thread_name)
        except BaseException:
            self.leave()
            raise

    def step(
        self,
        mode: Mode,
        inputs: Sequence[Any] | None,
        targets: Sequence[Any] | None,
        arguments: StepArguments | EvaluateArguments,
    ) -> Coroutine[Any, Any, StepResult]:
        """Begin a step; `end` ends it. Returns the rest of the step, to run on the runtime's loop.

        Raises:
            ConfigError: if the arguments do not fit; nothing has changed then.
            RrfpError: if the pipeline is not open for a step.
        """
        with self._beginning("in a step"):
            for name in arguments:
                if name not in _ARGUMENTS[mode]:
                    allowed = ", ".join(["inputs", "targets", *sorted(_ARGUMENTS[mode])])
                    raise ConfigError(f"unknown argument {name!r}, must be one of: {allowed}")
            batch = {"inputs": inputs, "targets": targets, **arguments}
            plan = self.ranks.plan(self._next_step, self._training_step, mode, refused=self._refused, **batch)
            self._next_step += 1
            self._training_step += mode is Mode.TRAIN
            # On the caller's own loop a read of the result must not block: nothing else would run there.
            return self.ranks.whole_step(plan) if self.thread is None else self.ranks.step(plan)

    def handed_over(self, result: StepResult) -> StepResult:
        """``result``, whose tensors the calling thread may use from now on."""
        self.ranks.hand_over(result)
        if (pending := result.pending) is not None:
            self._guard(pending.outcome)
        return result

    @property
    def is_open(self) -> bool:
        """Whether it takes a call now."""
        return self._state == "open" and not self.has_given_up

    def settle(self) -> Coroutine[Any, Any, None]:
        """Begin to leave in order: waits, on the runtime's loop, for the reports of the last step; `end` ends it."""
        with self._beginning("leaving", counts=False):
            return self.ranks.settle()

    def clip(self, max_norm: float, norm_type: float) -> Clipping:
        """Begin to clip gradients; `end` ends it. Errors as in `Clipping` and `step`."""
        with self._beginning("clipping gradients"):
            return self.ranks.clipping(max_norm, norm_type)

    def save_trace(
        self, path: str | os.PathLike[str], steps: int | None, replica: int | Literal["all"]
    ) -> Coroutine[Any, Any, str]:
        """Begin to save a trace; `end` ends it.

        Returns:
            The rest of it, to run on the runtime's loop; it returns why nothing was written, or an empty text.

        Raises:
            ConfigError: if an argument does not fit, or no step is recorded.
            RrfpError: if the pipeline is not open for it.
        """
        with self._beginning("saving a trace", counts=False):
            return self.ranks.save_trace(self.ranks.trace_request(path, steps, replica))

    def end(self) -> None:
        """The call that runs has ended, with or without an error."""
        with self._lock:
            if self._state not in ("new", "closed"):  # and not closed meanwhile
                self._state = "open"

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run ``coroutine`` on the runtime's own loop; cancelling its future cancels it.

        The future fails if the loop does not run any more.
        """
        assert self.thread is not None
        if (given_up := self._given_up) is not None:  # no one would complete it
            coroutine.close()
            outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
            outcome.set_exception(given_up)
            return outcome
        outcome = self.thread.submit(coroutine)
        self._guard(outcome)
        return outcome

    def _guard(self, outcome: concurrent.futures.Future[Any]) -> None:
        """Fail ``outcome`` should the loop run no more."""
        with self._lock:
            given_up = self._given_up
            if given_up is None:
                self._outcomes.add(outcome)
        if given_up is not None:
            _fail(outcome, given_up)
        outcome.add_done_callback(self._forget)

    def _forget(self, outcome: concurrent.futures.Future[Any]) -> None:
        with self._lock:
            self._outcomes.discard(outcome)

    def start(self) -> Coroutine[Any, Any, None]:
        """Start the ranks. On the runtime's loop."""
        return self.ranks.start(None if self.thread is None else self._give_up)

    @property
    def has_given_up(self) -> bool:
        """Whether the loop did not run for too long: to wait for it is in vain."""
        return self._given_up is not None

    def _give_up(self, error: PipelineAborted) -> None:
        """The loop has not run for too long: pass ``error`` to all callers that wait. On the thread that noticed."""
        with self._lock:
            self._given_up = error
            outcomes = list(self._outcomes)
        for outcome in outcomes:
            _fail(outcome, error)
        with suppress(RuntimeError):  # the loop ran again, and was closed meanwhile
            self.fail_soon(error)  # should it ever run again: the other ranks must not end a step that failed here

    def fail_soon(self, error: BaseException) -> None:
        """End the pipeline because the caller gave up waiting. Runs before all that is submitted later."""
        if self.thread is None:
            self.ranks.fail(error)
        else:
            self.thread.loop.call_soon_threadsafe(self.ranks.fail, error)

    @contextmanager
    def _beginning(self, state: State, *, counts: bool = True) -> Iterator[None]:
        """Enter ``state``, back to open if the block raises; an RrfpError if this caller cannot call now.

        ``counts`` says whether a refused call may have dropped a batch.
        """
        if self.is_foreign:
            raise RrfpError(
                f"this pipeline belongs to process {self._pid}, of which this one ({os.getpid()}) was forked: build a "
                "pipeline in the process that uses it"
            )
        self._check_loop()
        with self._lock:
            if self._state == "new":
                raise RrfpError("this pipeline is new; enter it first (async with, or with .blocking())")
            if self._state != "open":
                then = "" if self._state == "closed" else "; await that first: it takes one call at a time"
                raise RrfpError(f"this pipeline is {self._state}{then}")
            self._state = state
        try:
            yield
        except BaseException as error:
            self._refused += counts and isinstance(error, ConfigError)
            self.end()
            raise

    @property
    def is_foreign(self) -> bool:
        """Whether this is a child, forked from the process that entered the pipeline: the loop's thread is not here."""
        return self._pid is not None and self._pid != os.getpid()

    def _check_loop(self) -> None:
        if self._loop is not None and asyncio.get_running_loop() is not self._loop:
            raise RrfpError("this pipeline runs on the loop that entered it (loop is 'caller'): await it there")

    def check_leaving(self) -> None:
        """Raise an RrfpError on another loop, or inside a task, that says where to leave."""
        self._check_loop()
        if self.ranks.computes_here():
            raise RrfpError(
                "the pipeline cannot be left from inside a task of its own step, such as loss_fn or a module: leave it "
                "where step() was called"
            )

    async def close(self, error: BaseException | None) -> None:
        """Leave, because of ``error`` or in order. On the runtime's loop.

        Raises `PipelineAborted` if the pipeline failed, no call has raised it, and there is no ``error``.
        """
        if error is not None:
            self.ranks.fail(error)
        await self.ranks.close(quiet=error is not None)
        if isinstance(error, PipelineAborted):
            await self.ranks.let_culprit_end(error)

    def leave(self) -> None:
        """Stop the loop's thread, if any."""
        with self._lock:
            self._state = "closed"
        if self.thread is not None:
            self.thread.close()
        with self._lock:
            outcomes = list(self._outcomes)
        for outcome in outcomes:  # of a loop that does not end, or that ended with the work undone
            _fail(outcome, RrfpError("the pipeline was left before this was complete"))


def _fail(outcome: concurrent.futures.Future[Any], error: BaseException) -> None:
    with suppress(concurrent.futures.InvalidStateError):  # it completed meanwhile
        outcome.set_exception(error)
