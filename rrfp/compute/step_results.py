"""The losses and outputs that last virtual stages keep until the end of a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from rrfp.compute.activations import tensors_in
from rrfp.compute.async_tensors import wait_async
from rrfp.compute.calling import detached
from rrfp.compute.program import Batch
from rrfp.core.tasks import Mode


class StepResults:
    """By part and microbatch, without history; in the order of microbatches.

    Args:
        parts: the parts whose last modules lie on this rank and nothing reads; "" for the last virtual stage of a
            model whose loss is that of one part.
    """

    def __init__(self, parts: Iterable[str] = ("",)) -> None:
        self._losses: dict[str, dict[int, Tensor]] = {part: {} for part in parts}
        self._outputs: dict[str, dict[int, Any]] = {part: {} for part in self._losses}

    def keep(self, microbatch: int, output: Any, loss: Tensor | None, batch: Batch, mode: Mode, part: str = "") -> None:
        """Keep the loss, if there is one, and in an evaluation the output, if ``batch`` wants it."""
        returns = batch.return_outputs
        if mode is not Mode.TRAIN and (loss is None if returns is None else returns):
            self.keep_output(microbatch, output, part)
        if loss is not None:
            self.keep_loss(microbatch, loss, part)

    def keep_loss(self, microbatch: int, loss: Tensor, part: str = "") -> None:
        """Keep a loss; it is not read, since that would wait for the device."""
        self._losses[part][microbatch] = wait_async(loss.detach())

    def keep_output(self, microbatch: int, output: Any, part: str = "") -> None:
        """Keep an output of any nesting."""
        self._outputs[part][microbatch] = kept = detached(output)
        for tensor in tensors_in(kept):
            wait_async(tensor)

    def losses(self) -> dict[int, float]:
        """The losses kept, added over the parts; waits for the device."""
        total: dict[int, float] = {}
        for own in self.losses_by_part().values():
            for m, loss in own.items():
                total[m] = total[m] + loss if m in total else loss
        return dict(sorted(total.items()))

    def losses_by_part(self) -> dict[str, dict[int, float]]:
        """The losses kept; waits for the device."""
        return {part: {m: float(losses[m]) for m in sorted(losses)} for part, losses in self._losses.items()}

    def outputs(self) -> dict[int, Any]:
        """The outputs kept; of each microbatch a dict by part, where losses are by part."""
        if "" in self._outputs:
            return dict(sorted(self._outputs[""].items()))
        microbatches = sorted({m for own in self._outputs.values() for m in own})
        return {m: {part: own[m] for part, own in self._outputs.items() if m in own} for m in microbatches}
