"""The blocking API of a pipeline, for ordinary training loops."""

from __future__ import annotations

import os
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, TypeVar, Unpack

from rrfp.core import timeouts
from rrfp.core.tasks import Mode
from rrfp.errors import ConfigError, PipelineAborted
from rrfp.pipeline.session import Session
from rrfp.runtime.batching import EvaluateArguments, StepArguments
from rrfp.runtime.result import StepResult
from rrfp.runtime.statistics import RankStatistics

T = TypeVar("T")

#: The error of pickle and deepcopy.
NO_COPY = "a pipeline can be neither pickled nor copied, as it holds threads and connections: build one there"


class BlockingPipeline:
    """A pipeline whose calls block; made by ``blocking()`` of `rrfp.Pipeline` and `rrfp.local`.

    An exception that leaves the ``with`` block, or that ends a step early, Ctrl-C included, aborts the pipeline on
    every rank.

    Args:
        session: of the pipeline; not entered.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

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
        if self._session.is_foreign:
            return
        self._session.check_leaving()
        try:
            if error is None and self._session.is_open:
                self._run(self._session.settle())
        except BaseException as unsettled:
            error = unsettled
            raise
        finally:
            self._close(error)

    def _close(self, error: BaseException | None) -> None:
        try:
            if not self._session.has_given_up:
                _wait(self._session.submit(self._session.close(error)), timeouts.LEAVE_S)
        finally:
            self._session.leave()

    def step(
        self,
        inputs: Sequence[Any] | None = None,
        targets: Sequence[Any] | None = None,
        **arguments: Unpack[StepArguments],
    ) -> StepResult:
        """As `rrfp.Pipeline.step`."""
        return self._session.handed_over(self._run(self._session.step(Mode.TRAIN, inputs, targets, arguments)))

    def evaluate(
        self,
        inputs: Sequence[Any] | None = None,
        targets: Sequence[Any] | None = None,
        **arguments: Unpack[EvaluateArguments],
    ) -> StepResult:
        """As `rrfp.Pipeline.evaluate`."""
        return self._session.handed_over(self._run(self._session.step(Mode.FORWARD, inputs, targets, arguments)))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> float:
        """As `rrfp.Pipeline.clip_grad_norm_`."""
        clipping = self._session.clip(max_norm, norm_type)
        return clipping.clip(self._run(self._session.ranks.share(clipping)))

    def save_trace(
        self, path: str | os.PathLike[str], *, steps: int | None = None, replica: int | Literal["all"] = 0
    ) -> None:
        """As `rrfp.Pipeline.save_trace`."""
        if reason := self._run(self._session.save_trace(path, steps, replica)):
            raise ConfigError(reason)

    def statistics(self) -> tuple[RankStatistics, ...]:
        """As `rrfp.Pipeline.statistics`. While a step blocks this thread, another one may call it."""
        return self._session.ranks.statistics()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        session = self._session
        try:
            return session.submit(coroutine).result()
        except PipelineAborted as error:
            aborted = error
        except BaseException as error:  # Ctrl-C ended the wait; after a failure of the step itself this has no effect
            session.fail_soon(error)
            raise
        finally:
            session.end()
        raise aborted.with_traceback(None)  # the runtime's frames would bury the caller's


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
