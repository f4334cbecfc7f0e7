"""The stage that both runtimes run: a module whose forward and backward sleep a table's time and emit large tensors.

The time is an accelerator's: the CPU is free meanwhile. What is emitted is one and the same memory each time, so that
producing it costs nothing.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from rrfp.compute.lanes.precise_sleep import sleep_until
from rrfp.core.tasks import Kind, Task
from rrfp.costs.table import CostTable


class SleepingStage(nn.Module):
    """One stage of a pipeline.

    Call it with what the stage before put out, and ``microbatch``, a tensor of one number. The last stage puts out a
    tensor of one element, which serves as the loss.

    Args:
        stage: 0..stages-1.
        stages: N.
        num_bytes: of the tensors between stages.

    Attributes:
        order: the tasks of the step in the order in which they began.
        peak_held: the most microbatches between the start of their forward and the end of their backward.
    """

    def __init__(self, stage: int, stages: int, num_bytes: int) -> None:
        super().__init__()
        # A parameter, so that the first stage has something to differentiate for.
        self.weight = nn.Parameter(torch.zeros(1))
        self.stage = stage
        self.emitted = torch.zeros(num_bytes // 4) if stage < stages - 1 else torch.zeros(1)
        self.input_gradient = torch.zeros(num_bytes // 4) if stage else torch.zeros(1)
        self.weight_gradient = torch.zeros(1)
        self.order: list[Task] = []
        self.peak_held = 0
        self._held = 0
        self._seconds: dict[Kind, list[float]] = {}

    def open_step(self, costs: CostTable) -> None:
        """Take the durations of the next step, and forget the last one."""
        self._seconds = {Kind.F: costs.forward[self.stage].tolist(), Kind.B: costs.backward[self.stage].tolist()}
        self.order = []
        self._held = self.peak_held = 0

    def forward(self, received: Tensor, microbatch: Tensor) -> Tensor:
        """Sleep."""
        output: Tensor = _Sleep.apply(received, self.weight, self, int(microbatch))  # type: ignore[no-untyped-call]
        return output

    def start(self, microbatch: int) -> Tensor:
        """The forward of ``microbatch``."""
        self._held += 1
        self.peak_held = max(self.peak_held, self._held)
        self._sleep(Kind.F, microbatch)
        return self.emitted.detach()

    def finish(self, microbatch: int) -> Tensor:
        """The backward of ``microbatch``."""
        self._sleep(Kind.B, microbatch)
        self._held -= 1
        return self.input_gradient.detach()

    def _sleep(self, kind: Kind, microbatch: int) -> None:
        started = time.monotonic()
        self.order.append(Task(kind, microbatch, self.stage))
        sleep_until(started + self._seconds[kind][microbatch])


class _Sleep(torch.autograd.Function):
    """Differentiable sleep."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, weight: Tensor, stage: SleepingStage, microbatch: int) -> Tensor:
        ctx.stage, ctx.microbatch, ctx.needs_input = stage, microbatch, received.requires_grad
        return stage.start(microbatch)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = ctx.stage.finish(ctx.microbatch)
        return gradient if ctx.needs_input else None, ctx.stage.weight_gradient.detach(), None, None


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """What the last stage put out, whatever the target."""
    return output.sum()
