"""The losses and outputs that the last virtual stage keeps until the end of a step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rrfp.compute.activations import tensors_in
from rrfp.compute.async_tensors import wait_async
from rrfp.compute.calling import detached
from rrfp.compute.program import Batch
from rrfp.core.tasks import Mode


class StepResults:
    """By microbatch, without history; in the order of microbatches."""

    def __init__(self) -> None:
        self._losses: dict[int, Tensor] = {}
        self._outputs: dict[int, Any] = {}

    def keep(self, microbatch: int, output: Any, loss: Tensor | None, batch: Batch, mode: Mode) -> None:
        """Keep the loss, if there is one, and in an evaluation the output, if ``batch`` wants it."""
        returns = batch.return_outputs
        if mode is not Mode.TRAIN and (loss is None if returns is None else returns):
            self.keep_output(microbatch, output)
        if loss is not None:
            self.keep_loss(microbatch, loss)

    def keep_loss(self, microbatch: int, loss: Tensor) -> None:
        """Keep a loss; it is not read, since that would wait for the device."""
        self._losses[microbatch] = wait_async(loss.detach())

    def keep_output(self, microbatch: int, output: Any) -> None:
        """Keep an output of any nesting."""
        self._outputs[microbatch] = kept = detached(output)
        for tensor in tensors_in(kept):
            wait_async(tensor)

    def losses(self) -> dict[int, float]:
        """The losses kept; waits for the device."""
        return {m: float(self._losses[m]) for m in sorted(self._losses)}

    def outputs(self) -> dict[int, Any]:
        """The outputs kept."""
        return {m: self._outputs[m] for m in sorted(self._outputs)}
