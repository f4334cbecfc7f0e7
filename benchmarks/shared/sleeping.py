"""The stage that both runtimes run: a module whose tasks sleep a table's time and emit large tensors.

The time is an accelerator's: the CPU is free meanwhile. What is emitted is one and the same memory each time, so that
producing it costs nothing.

How a split backward sleeps in both runtimes, though each splits in its own way: the module is one autograd function.
Its first backward for a microbatch is B. torch computes weight gradients by running the function again, from its output
on: its second backward is W. RRFP keeps the gradient that B has formed, as it cannot defer the product of an unknown
function, and adds it to ``.grad`` in W: the sleep is then in front of this addition. The same place serves where torch
leaves all of backward to W, on the first stage. Where backward is whole, the first backward sleeps for all of it.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from benchmarks.shared.tables import Form
from rrfp.costs.table import CostTable
from rrfp.lab.emulated import sleep_until
from rrfp.model.placement import Layout, Placement
from rrfp.model.tasks import Kind, Task
from rrfp.trace.spans import TaskSpan


class TaskLog:
    """The tasks of a rank's chunks in one step.

    Attributes:
        spans: in the order in which they began; seconds of `time.monotonic`.
    """

    def __init__(self) -> None:
        self.spans: list[TaskSpan] = []

    def open_step(self) -> None:
        """Forget the last step."""
        self.spans = []


class SleepingStage(nn.Module):
    """One virtual stage.

    Call it with the output of the virtual stage before, and ``microbatch``, a tensor of one number. The last one puts
    out a tensor of one element, which serves as the loss. The weight's gradient of microbatch m is m + 1.

    Args:
        virtual_stage: 0..virtual_stages-1.
        virtual_stages: of the whole pipeline.
        stage: the rank's.
        num_bytes: of the tensors between virtual stages.
        log: of the rank.
    """

    def __init__(self, virtual_stage: int, virtual_stages: int, stage: int, num_bytes: int, log: TaskLog) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.emitted = torch.zeros(num_bytes // 4 if virtual_stage < virtual_stages - 1 else 1)
        self.input_gradient = torch.zeros(num_bytes // 4 if virtual_stage else 1)
        self._virtual_stage, self._stage, self._log = virtual_stage, stage, log
        self._seconds: dict[Kind, list[float]] = {}
        self._differentiated: set[int] = set()
        # Held, because its hooks would go with it.
        self._accumulate: Any = get_gradient_edge(self.weight).node
        self._accumulate.register_prehook(self._before_adding)

    def open_step(self, costs: CostTable) -> None:
        """Take the durations of the next step."""
        v = self._virtual_stage
        self._seconds = {Kind.F: costs.forward[v].tolist(), Kind.B: costs.backward[v].tolist()}
        if costs.weight is not None:
            self._seconds[Kind.W] = costs.weight[v].tolist()
        self._differentiated.clear()

    def forward(self, received: Tensor, microbatch: Tensor) -> Tensor:
        """Sleep for F."""
        output: Tensor = _Sleep.apply(received, self.weight, self, int(microbatch))  # type: ignore[no-untyped-call]
        return output

    def differentiate(self, microbatch: int) -> Tensor:
        """Sleep for B, or at the second call of a split backward for W; returns the weight's gradient."""
        is_weight = Kind.W in self._seconds and microbatch in self._differentiated
        self._differentiated.add(microbatch)
        self.sleep(Kind.W if is_weight else Kind.B, microbatch)
        return torch.full((1,), float(microbatch + 1))

    def sleep(self, kind: Kind, microbatch: int) -> None:
        """Take a task's time."""
        started = time.monotonic()
        sleep_until(started + self._seconds[kind][microbatch])
        task = Task(kind, microbatch, self._virtual_stage)
        self._log.spans.append(TaskSpan(self._stage, task, started, time.monotonic()))

    def _before_adding(self, gradients: tuple[Tensor | None, ...]) -> None:
        (gradient,) = gradients
        if Kind.W in self._seconds and gradient is not None:
            self.sleep(Kind.W, int(gradient) - 1)


class Stages:
    """The modules of one rank, by form; all methods whose virtual stages lie alike share them.

    Args:
        rank: 0..stages-1.
        stages: N.
        num_bytes: of the tensors between virtual stages.
    """

    def __init__(self, rank: int, stages: int, num_bytes: int) -> None:
        self.log = TaskLog()
        self._rank, self._stages, self._num_bytes = rank, stages, num_bytes
        self._modules: dict[tuple[int, Layout], list[SleepingStage]] = {}

    def of(self, form: Form) -> list[SleepingStage]:
        """The rank's chunks."""
        key = form.chunks, form.layout
        if key not in self._modules:
            placement = self.placement(form)
            count = placement.num_virtual_stages
            self._modules[key] = [
                SleepingStage(v, count, self._rank, self._num_bytes, self.log)
                for v in placement.virtual_stages(self._rank)
            ]
        return self._modules[key]

    def placement(self, form: Form) -> Placement:
        """Of all ranks' chunks."""
        return Placement(self._stages, form.chunks, form.layout)


class _Sleep(torch.autograd.Function):
    """Differentiable sleep."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, weight: Tensor, stage: SleepingStage, microbatch: int) -> Tensor:
        ctx.stage, ctx.microbatch, ctx.needs_input = stage, microbatch, received.requires_grad
        stage.sleep(Kind.F, microbatch)
        return stage.emitted.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        weight_gradient = ctx.stage.differentiate(ctx.microbatch)
        return ctx.stage.input_gradient.detach() if ctx.needs_input else None, weight_gradient, None, None


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """What the last stage put out, whatever the target."""
    return output.sum()
