"""The contract of a rank's computation: `StageProgram`, and the `Batch` that a step passes to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rrfp.compute.payload import Payload
from rrfp.model.tasks import StepId, Task


@dataclass(frozen=True, slots=True)
class Batch:
    """The caller's data for one step on this rank: lists by microbatch, or None if this rank does not use them.

    Attributes:
        inputs: arguments of the first virtual stage: a tensor or a named tuple, a tuple (positional) or a dict
            (keywords). Where the model has parts, lists by part, for the first module of each.
        targets: second argument of ``loss_fn`` on the last virtual stage; lists by part where several have losses.
        kwargs: further keyword arguments for every module of this rank, or lists by part.
        gradient_weights: for each microbatch the factor on its loss in backward (weight over normaliser, times
            ``grad_scale``); known before the first backward.
        return_outputs: whether `StageProgram.outputs` holds the outputs of an evaluation; None: if it has no loss.
        training_step: the number of the training step, from the pipeline's ``first_step`` on; in an evaluation, the
            number of the next training step. Random numbers depend on it.
        homes: by microbatch, the seed of the replica whose caller has it, and its number there: its random numbers
            depend on these. Empty unless replicas run microbatches of one another.
    """

    inputs: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None
    targets: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None
    kwargs: Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Mapping[str, Any]]] | None = None
    gradient_weights: Sequence[float] = field(default=())
    return_outputs: bool | None = None
    training_step: int = 0
    homes: Mapping[int, tuple[int, int]] = field(default_factory=dict)


class StageProgram(ABC):
    """The computation of one rank: F, B and W of its virtual stages.

    Implement it to embed another trainer. Methods are called on the lane's thread, one at a time, unless their
    docstring says otherwise. An exception that a method raises aborts the pipeline; the abort names the task.
    """

    @abstractmethod
    def open(self, step: StepId, batch: Batch) -> None:
        """Begin a step: drop the state of the previous one and keep ``batch``. Called on the caller's thread.

        Args:
            step: the step.
            batch: the caller's data.

        Raises:
            ConfigError: if ``batch`` lacks data that this rank needs. ``step()`` raises it before any message is sent.
        """

    def reopen(self, step: StepId, batch: Batch) -> None:
        """Begin the step anew with another batch: replicas have exchanged microbatches.

        Called on the lane's thread between `open` and the first task, with ``share_replicas`` only. By default calls
        `open`.

        Args:
            step: the step, with as many microbatches as ``batch`` has.
            batch: the data of the microbatches that this rank runs.
        """
        self.open(step, batch)

    @abstractmethod
    def forward(self, task: Task, inputs: tuple[Payload, ...]) -> Payload:
        """Run F.

        Args:
            task: the task.
            inputs: one payload for each predecessor of the virtual stage, in graph order; empty on the first. That of
                a predecessor which the microbatch skips holds None.

        Returns:
            The outputs, the same for every successor. The payload of the last virtual stage is not sent.
        """

    @abstractmethod
    def backward(self, task: Task, grads: tuple[Payload, ...]) -> tuple[Payload, ...]:
        """Run B; on a split virtual stage only the gradients of inputs.

        Args:
            task: the task.
            grads: gradients of the outputs, one payload for each successor, in graph order; empty on the last. That of
                a successor which the microbatch skips has no tensors.

        Returns:
            Gradients of the inputs, one payload for each predecessor; None inside a payload means no gradient.
        """

    def weight(self, task: Task) -> None:
        """Run W: the gradients of weights, on a split virtual stage.

        Args:
            task: the task.

        Raises:
            NotImplementedError: unless overridden.
        """
        raise NotImplementedError(f"{type(self).__name__} has no split backward, so it cannot run {task}")

    def finish(self, virtual_stage: int) -> None:  # noqa: B027 - optional
        """Make gradients final. Called after the last task of a virtual stage in a training step.

        Args:
            virtual_stage: the virtual stage.
        """

    def name_of(self, virtual_stage: int) -> str:
        """What errors call the computation of a virtual stage. Called on the lane's thread.

        Args:
            virtual_stage: one of this rank's.

        Returns:
            By default the class of the program.
        """
        return type(self).__name__

    def held_bytes(self, microbatch: int, virtual_stage: int) -> int:
        """Bytes kept for a microbatch between its tasks. Called on any thread.

        Args:
            microbatch: 0..M-1.
            virtual_stage: one of this rank's.
        """
        return 0

    def signature(self, task: Task, inputs: tuple[Payload, ...]) -> Hashable:
        """What decides how many bytes an F will hold, such as the shapes of its inputs; known before it runs.

        Forwards of one virtual stage with equal signatures hold as many bytes: under a limit on bytes a forward is
        expected to hold what the last ones of its signature did, and a lane that runs ahead starts no forward behind
        one whose signature is new. Called on the event loop, so it must not take long.

        Args:
            task: an F.
            inputs: as for `forward`.

        Returns:
            By default None: all forwards count as equal.
        """
        return None

    def input_bytes(self, task: Task, inputs: tuple[Payload, ...]) -> int | None:
        """Bytes of the inputs of an F, or any number in proportion to the bytes that it will hold.

        Under a limit on bytes, a forward of a new signature is expected to hold as much for each of these bytes as
        those before it on its virtual stage. Called on the event loop, so it must not take long.

        Args:
            task: an F.
            inputs: as for `forward`.

        Returns:
            By default the bytes of ``inputs``; None, not known, where there is none.
        """
        return sum(payload.num_bytes for payload in inputs) or None

    def held_output_bytes(self, microbatch: int, virtual_stage: int) -> int:
        """The part of `held_bytes` that is output of the forward, kept for the backward. Called on any thread.

        Args:
            microbatch: 0..M-1.
            virtual_stage: one of this rank's.
        """
        return 0

    def losses(self) -> Mapping[int, float]:
        """The losses computed on this rank in the current step, by microbatch.

        Called on the lane's thread, on ranks with a last virtual stage, once all forwards of it have completed; where a
        device computes, after the last task.
        """
        return {}

    def losses_by_part(self) -> Mapping[str, Mapping[int, float]]:
        """The losses by part of a graph, where several parts have losses. Called instead of `losses`.

        Returns:
            By default those of `losses`, under ``""``.
        """
        return {"": self.losses()}

    def outputs(self) -> Mapping[int, Any]:
        """Detached outputs of the last virtual stage, by microbatch, in a forward-only step that returns them.

        Where several parts have losses, each is a dict by part. Called after the last task.
        """
        return {}
