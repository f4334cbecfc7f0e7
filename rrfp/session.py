"""One use of a pipeline: its ranks, the loop they run on, and whose turn it is. Both faces of a pipeline drive one."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Literal, TypeVar

from rrfp.batching import EvaluateArguments, Plan, StepArguments
from rrfp.control.clipping import Clipping
from rrfp.core.tasks import Mode
from rrfp.errors import ConfigError, RrfpError
from rrfp.loop_thread import LoopThread
from rrfp.ranks import Ranks

T = TypeVar("T")

#: What a step takes beside inputs and targets.
_ARGUMENTS: Mapping[Mode, frozenset[str]] = {
    Mode.TRAIN: StepArguments.__required_keys__ | StepArguments.__optional_keys__,
    Mode.FORWARD: EvaluateArguments.__required_keys__ | EvaluateArguments.__optional_keys__,
}


class Session:
    """See the module's docstring. Called on the caller's thread, except where said otherwise.

    Args:
        ranks: the ranks of this process.
        thread_name: of the thread with the loop, or None to run on the caller's loop.
    """

    def __init__(self, ranks: Ranks, thread_name: str | None) -> None:
        self.ranks = ranks
        self.thread: LoopThread | None = None
        self.thread_name = thread_name
        #: Steps begun, evaluations counted, as all ranks count them; and the number of the next training step.
        self._next_step, self._training_step = 0, ranks.first_step
        self._state: Literal["new", "open", "in a step", "clipping gradients", "closed"] = "new"

    def enter(self) -> None:
        """Begin.

        Raises:
            RrfpError: the second time.
        """
        if self._state != "new":
            raise RrfpError("this pipeline was entered before; build a new one")
        self._state = "open"
        self.ranks.announce()
        if self.thread_name is not None:
            self.thread = LoopThread(self.thread_name)

    def plan(
        self,
        mode: Mode,
        inputs: Sequence[Any] | None,
        targets: Sequence[Any] | None,
        arguments: StepArguments | EvaluateArguments,
    ) -> Plan:
        """Begin a step; `end` ends it.

        Raises:
            ConfigError: if the arguments do not fit; nothing has happened then.
            RrfpError: if it is not the time for a step.
        """
        self._check_open()
        for name in arguments:
            if name not in _ARGUMENTS[mode]:
                allowed = ", ".join(["inputs", "targets", *sorted(_ARGUMENTS[mode])])
                raise ConfigError(f"unknown argument {name!r}, must be one of: {allowed}")
        given = {"inputs": inputs, "targets": targets, **arguments}
        plan = self.ranks.plan(self._next_step, self._training_step, mode, **given)
        self._state = "in a step"
        self._next_step += 1
        self._training_step += mode is Mode.TRAIN
        return plan

    def clip(self, max_norm: float, norm_type: float) -> Clipping:
        """Begin to clip gradients; `end` ends it.

        Raises:
            ConfigError: as in `Clipping`.
            RrfpError: if it is not the time for it.
            StageError: as in `Clipping`.
        """
        self._check_open()
        clipping = self.ranks.clipping(max_norm, norm_type)
        self._state = "clipping gradients"
        return clipping

    def end(self) -> None:
        """The step, or clipping, has ended, one way or another."""
        if self._state in ("in a step", "clipping gradients"):  # and not closed meanwhile
            self._state = "open"

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run ``coroutine`` on the runtime's own loop."""
        assert self.thread is not None
        return self.thread.submit(coroutine)

    def fail_soon(self, error: BaseException) -> None:
        """End the pipeline because the caller gave up waiting; before anything that is submitted later."""
        if self.thread is None:
            self.ranks.fail(error)
        else:
            self.thread.loop.call_soon_threadsafe(self.ranks.fail, error)

    def _check_open(self) -> None:
        if self._state == "new":
            raise RrfpError("this pipeline is new; enter it first (async with, or with .blocking())")
        if self._state != "open":
            raise RrfpError(f"this pipeline is {self._state}{'' if self._state == 'closed' else '; await that first'}")

    async def close(self, error: BaseException | None) -> None:
        """Leave, because of ``error`` or in order. On the runtime's loop.

        Raises:
            PipelineAborted: if the pipeline failed, no call has told the caller, and there is no ``error``.
        """
        if error is not None:
            self.ranks.fail(error)
        await self.ranks.close(quiet=error is not None)

    def leave(self) -> None:
        """Stop the thread, if there is one."""
        self._state = "closed"
        if self.thread is not None:
            self.thread.close()
