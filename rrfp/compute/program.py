"""The contracts of compute: what runs (`StageProgram`) and where it runs (`Lane`).

A lane runs one task at a time, in the order in which tasks were enqueued. Being enqueued and being complete are two
moments: on a CPU lane a task is complete when its call returns; on a CUDA lane the call only puts kernels on a stream,
and the task is complete when the stream has got there. Whatever depends on a task *on the same lane* may therefore be
enqueued behind it at once, while anything that leaves the rank waits for completion.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rrfp.compute.payload import Payload
from rrfp.core.tasks import StepId, Task
from rrfp.errors import StageError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Batch:
    """What the caller handed to one step on this rank; lists by microbatch, None where this rank has no use for them.

    Attributes:
        inputs: arguments of the first virtual stage: a tensor or a named tuple, a tuple (positional) or a dict
            (keywords).
        targets: second argument of ``loss_fn`` on the last virtual stage.
        kwargs: further keyword arguments for every module of this rank.
        gradient_weights: for each microbatch the factor that its loss is differentiated with (weight over normaliser,
            times ``grad_scale``); known before the first backward.
        return_outputs: whether `StageProgram.outputs` holds the outputs of an evaluation; None: where it has no loss.
        training_step: the number of the training step, from the pipeline's ``first_step`` on; of an evaluation, that of
            the training step after it. Random numbers depend on this number.
    """

    inputs: Sequence[Any] | None = None
    targets: Sequence[Any] | None = None
    kwargs: Sequence[Mapping[str, Any]] | None = None
    gradient_weights: Sequence[float] = field(default=())
    return_outputs: bool | None = None
    training_step: int = 0


class StageProgram(ABC):
    """What a rank computes. Called on the lane's thread only, one call at a time, except where said otherwise.

    Implement this to embed another trainer. Errors that a method raises abort the pipeline and name the task.
    """

    @abstractmethod
    def open(self, step: StepId, batch: Batch) -> None:
        """Begin a step: forget what an earlier one left, take the caller's data. Called on the caller's thread.

        Raises:
            ConfigError: if the batch lacks what this rank needs; raised to the caller before anything is sent.
        """

    @abstractmethod
    def forward(self, task: Task, inputs: tuple[Payload, ...]) -> Payload:
        """Run F.

        Args:
            task: the task.
            inputs: one payload for each predecessor of the virtual stage, in graph order; empty on the first.

        Returns:
            The outputs, the same for every successor; on the last virtual stage the payload is not sent.
        """

    @abstractmethod
    def backward(self, task: Task, grads: tuple[Payload, ...]) -> tuple[Payload, ...]:
        """Run B: the input gradient only if the virtual stage is split.

        Args:
            task: the task.
            grads: gradients of the outputs, one payload for each successor, in graph order; empty on the last.

        Returns:
            Input gradients, one payload for each predecessor; None inside a payload where there is no gradient.
        """

    def weight(self, task: Task) -> None:
        """Run W: the weight gradient of a split virtual stage."""
        raise NotImplementedError(f"{type(self).__name__} has no split backward, so it cannot run {task}")

    def finish(self, virtual_stage: int) -> None:  # noqa: B027 - optional
        """All tasks of ``virtual_stage`` are done: make its gradients final."""

    def held_bytes(self, microbatch: int, virtual_stage: int) -> int:
        """Bytes kept for ``microbatch`` on ``virtual_stage`` between its tasks. May be called on any thread."""
        return 0

    def held_output_bytes(self, microbatch: int, virtual_stage: int) -> int:
        """Bytes of the forward's output that `held_bytes` counts already, because they are kept for the backward.

        May be called on any thread.
        """
        return 0

    def losses(self) -> Mapping[int, float]:
        """The losses computed on this rank in the current step, by microbatch. Called after the last task."""
        return {}

    def outputs(self) -> Mapping[int, Any]:
        """Outputs of the last virtual stage by microbatch, detached, where the batch of a forward-only step wants them.

        Called after the last task.
        """
        return {}


@dataclass(frozen=True, slots=True)
class Execution(Generic[T]):
    """A finished task on a lane.

    Attributes:
        result: what the call returned.
        started: when the lane began it, seconds of the lane's clock.
        ended: when it was complete, on the same clock.
    """

    result: T
    started: float
    ended: float


class Lane(ABC):
    """Where a rank's compute runs, one task at a time, in the order enqueued.

    Calls are made one after the other on one thread: a call begins when the one before it *returned*, not when that was
    complete. So a call may use what an earlier call left in memory of the rank (a saved graph, an output for the next
    chunk), but it has to look it up when it runs, since a future's result comes only with completion.

    Attributes:
        depth: how many tasks may be enqueued and not complete. 1 where completion is what frees the lane.
    """

    depth: int = 1

    @abstractmethod
    def start(self) -> None:
        """Begin to serve. Called on the loop that futures will belong to."""

    @abstractmethod
    def enqueue(self, call: Callable[[], T]) -> asyncio.Future[Execution[T]]:
        """Run ``call`` after everything enqueued before it.

        The future fails with whatever the call raised. It is never cancelled by the lane; cancelling it does not stop
        the call. Called on the loop of ``start``.
        """

    @abstractmethod
    def now(self) -> float:
        """The lane's clock, seconds; comparable between the ranks of one host."""

    def stack(self) -> str:
        """Where the call that is being made is, as a Python stack; empty where there is none. On any thread."""
        return ""

    @abstractmethod
    def close(self) -> None:
        """Serve nothing more. Never waits for a running call; futures of calls not yet begun stay pending."""


def as_exception(error: BaseException) -> Exception:
    """What the future of a call that raised ``error`` fails with.

    Returns:
        ``error`` itself, or a :class:`StageError` caused by it where a future could not carry it without harm to the
        loop: ``StopIteration``, and whatever is not an ``Exception``.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = StageError(f"the stage program raised {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
