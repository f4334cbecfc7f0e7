"""The blocking API of a pipeline, for ordinary training loops."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, TypeVar, Unpack

from torch.optim import Optimizer

from rrfp import timeouts
from rrfp.errors import PipelineAborted, RrfpError
from rrfp.model.tasks import Mode
from rrfp.pipeline.session import Call, Scaler, Session
from rrfp.runtime.plan import EvaluateArguments, Inputs, StepArguments, Targets
from rrfp.runtime.result import StepResult
from rrfp.runtime.statistics import RankStatistics

T = TypeVar("T")

#: The error of pickle and deepcopy.
NO_COPY = "a pipeline can be neither pickled nor copied, as it holds threads and connections: build one there"


class BlockingPipeline:
    """A pipeline whose calls block: ``pipe`` of ``with pipeline as pipe``, and ``blocking()`` of `rrfp.Pipeline`.

    An exception that leaves the ``with`` block, or that ends a step early, Ctrl-C included, aborts the pipeline on
    every rank.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._session}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(NO_COPY)

    def __enter__(self) -> Self:
        session = self._session
        session.enter()
        try:
            session.submit(session.start()).result()
        except BaseException:
            session.leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        session = self._session
        if session.is_foreign:
            return
        session.check_leaving()
        try:
            if error is None and session.is_open:
                self._run(session.settle())
        except BaseException as unsettled:
            error = unsettled
            raise
        finally:
            try:
                if not session.has_given_up:
                    _wait(session.submit(session.close(error)), timeouts.LEAVE_S)
            finally:
                session.leave()

    def _run(self, call: Call[T]) -> T:
        """Wait for ``call``; an error that ends the wait, such as Ctrl-C, ends the pipeline."""
        session = self._session
        aborted: PipelineAborted | None = None
        try:
            outcome = session.submit(call.rest).result()
        except PipelineAborted as error:
            aborted = error
        except BaseException as error:  # Ctrl-C ended the wait; after a failure of the step itself this has no effect
            session.fail_soon(error)
            raise
        finally:
            session.end()
        if aborted is not None:
            raise aborted.with_traceback(None)  # the runtime's frames would bury the caller's
        return call.finish(outcome)

    def step(
        self,
        inputs: Inputs | None = None,
        targets: Targets | None = None,
        **arguments: Unpack[StepArguments],
    ) -> StepResult:
        """As `rrfp.Pipeline.step`."""
        return self._run(self._session.step(Mode.TRAIN, inputs, targets, arguments))

    def evaluate(
        self,
        inputs: Inputs | None = None,
        targets: Targets | None = None,
        **arguments: Unpack[EvaluateArguments],
    ) -> StepResult:
        """As `rrfp.Pipeline.evaluate`."""
        return self._run(self._session.step(Mode.FORWARD, inputs, targets, arguments))

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> float:
        """As `rrfp.Pipeline.clip_grad_norm_`."""
        return self._run(self._session.clip(max_norm, norm_type, error_if_nonfinite, foreach))

    def scale(self, scaler: Scaler) -> Scaler:
        """As `rrfp.Pipeline.scale`."""
        return self._session.scale(scaler, self.share_overflow)

    def share_overflow(self, own: bool) -> bool:
        """Whether gradients have overflowed on any rank, given whether they have in this process."""
        if self._session.thread_name is None:
            raise RrfpError(
                "the other ranks' gradients cannot be compared while this thread, whose loop serves the pipeline (loop "
                "is 'caller'), is blocked: await pipe.unscale_(optimizer) before scaler.step(optimizer)"
            )
        return self._run(self._session.share_overflow(own))

    def unscale_(self, *optimizers: Optimizer) -> None:
        """As `rrfp.Pipeline.unscale_`."""
        scaling = self._session.scaling()
        scaling.overflow(*optimizers)
        for optimizer in optimizers:
            scaling.scaler.unscale_(optimizer)

    def save_trace(
        self, path: str | os.PathLike[str], *, steps: int | None = None, replica: int | Literal["all"] = 0
    ) -> None:
        """As `rrfp.Pipeline.save_trace`."""
        self._run(self._session.save_trace(path, steps, replica))

    def check(self) -> None:
        """Raise `PipelineAborted` if a rank has failed: for waits between steps. May be called on any thread."""
        self._session.check()

    def state_dict(self) -> dict[str, Any]:
        """As `rrfp.Pipeline.state_dict`."""
        return self._session.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `rrfp.Pipeline.load_state_dict`."""
        self._session.load_state_dict(state)

    def statistics(self) -> tuple[RankStatistics, ...]:
        """As `rrfp.Pipeline.statistics`. While a step blocks this thread, another one may call it."""
        return self._session.statistics()


def _wait(leaving: Future[None], timeout_s: float) -> None:
    """Wait until all resources are freed; a Ctrl-C meanwhile is raised afterwards."""
    deadline = time.monotonic() + timeout_s
    interrupt = None
    while True:
        try:
            with suppress(TimeoutError):
                leaving.result(max(0.0, deadline - time.monotonic()))
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
