"""The blocking API of a pipeline, for ordinary training loops."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, Unpack

from torch.optim import Optimizer

from rrfp.model.tasks import Mode
from rrfp.pipeline.between_steps import Scaler
from rrfp.pipeline.callers import BlockingCaller
from rrfp.pipeline.session import Session
from rrfp.runtime.batching import EvaluateArguments, Inputs, StepArguments, Targets
from rrfp.runtime.result import StepResult
from rrfp.runtime.statistics import RankStatistics

#: The error of pickle and deepcopy.
NO_COPY = "a pipeline can be neither pickled nor copied, as it holds threads and connections: build one there"


class BlockingPipeline:
    """A pipeline whose calls block: ``pipe`` of ``with pipeline as pipe``, and ``blocking()`` of `rrfp.Pipeline`.

    An exception that leaves the ``with`` block, or that ends a step early, Ctrl-C included, aborts the pipeline on
    every rank.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._caller = BlockingCaller(session)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._session}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(NO_COPY)

    def __enter__(self) -> Self:
        self._caller.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._caller.leave(error)

    def step(
        self,
        inputs: Inputs | None = None,
        targets: Targets | None = None,
        **arguments: Unpack[StepArguments],
    ) -> StepResult:
        """As `rrfp.Pipeline.step`."""
        return self._caller.run(self._session.step(Mode.TRAIN, inputs, targets, arguments))

    def evaluate(
        self,
        inputs: Inputs | None = None,
        targets: Targets | None = None,
        **arguments: Unpack[EvaluateArguments],
    ) -> StepResult:
        """As `rrfp.Pipeline.evaluate`."""
        return self._caller.run(self._session.step(Mode.FORWARD, inputs, targets, arguments))

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> float:
        """As `rrfp.Pipeline.clip_grad_norm_`."""
        return self._caller.run(self._session.between_steps.clip(max_norm, norm_type, error_if_nonfinite, foreach))

    def scale(self, scaler: Scaler) -> Scaler:
        """As `rrfp.Pipeline.scale`."""
        return self._session.between_steps.scale(scaler, self._caller.share_overflow)

    def unscale_(self, *optimizers: Optimizer) -> None:
        """As `rrfp.Pipeline.unscale_`."""
        scaling = self._session.between_steps.scaling()
        scaling.overflow(*optimizers)
        for optimizer in optimizers:
            scaling.scaler.unscale_(optimizer)

    def save_trace(
        self, path: str | os.PathLike[str], *, steps: int | None = None, replica: int | Literal["all"] = 0
    ) -> None:
        """As `rrfp.Pipeline.save_trace`."""
        self._caller.run(self._session.between_steps.save_trace(path, steps, replica))

    def check(self) -> None:
        """Raise `PipelineAborted` if a rank has failed: for waits between steps. May be called on any thread."""
        self._session.ranks.check()

    def state_dict(self) -> dict[str, Any]:
        """As `rrfp.Pipeline.state_dict`."""
        return self._session.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `rrfp.Pipeline.load_state_dict`."""
        self._session.load_state_dict(state)

    def statistics(self) -> tuple[RankStatistics, ...]:
        """As `rrfp.Pipeline.statistics`. While a step blocks this thread, another one may call it."""
        return self._session.ranks.statistics()
