"""Modules whose tasks write state, and steps in which gradients are added in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from compute.stage_driver import rows, total
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rrfp import Batch
from rrfp.compute.torch_stage import TorchStage
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Mode, StepId, Task

#: Out of microbatch order, and every kind of neighbour.
ORDER = "F1 F0 B0 F2 B1 B2"
IN_ORDER = "F0 F1 B0 F2 B1 B2"
SPLIT = "F1 F0 B0 F2 B1 W0 B2 W1 W2"


def run(
    module: nn.Module,
    order: str = ORDER,
    *,
    steps: int = 1,
    loss_fn: Any = total,
    mode: Mode = Mode.TRAIN,
    deterministic: bool = True,
) -> None:
    """Steps of one virtual stage, in which gradients are added in order, and forwards where they have to be."""
    split = "W" in order
    tasks = [Task(Kind(name[0]), int(name[1:]), 0) for name in order.split()]
    count = 1 + max(task.microbatch for task in tasks)
    in_order = {(Kind.W if split else Kind.B, 0)} | ({(Kind.F, 0)} if _is_ordered(module) else set())
    program = TorchStage(
        {0: module}, TaskGraph.chain(1, split=split), loss_fn=loss_fn, in_order=in_order if deterministic else ()
    )
    for number in range(steps):
        program.open(StepId(number, mode, count), Batch(rows(count), rows(count), None, (1.0,) * count))
        for task in tasks:
            if task.kind is Kind.W:
                program.weight(task)
            else:
                (program.forward if task.kind is Kind.F else program.backward)(task, ())


def _is_ordered(module: nn.Module) -> bool:
    return any(isinstance(part, nn.BatchNorm1d) and part.track_running_stats for part in module.modules())


class Stage(nn.Module):
    """A layer, a buffer, and something done in forward.

    Args:
        act: is given the module and the input.
        buffer: the buffer at the start.
    """

    state: Tensor

    def __init__(self, act: Callable[[Any, Tensor], object], buffer: Tensor | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("state", torch.zeros(4) if buffer is None else buffer)
        self._act = act

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        with torch.no_grad():
            self._act(self, output)
        return output


def assign(module: Any, x: Tensor) -> None:
    module.state = 0.9 * module.state + 0.1 * x.mean(0)


def write(module: Any, x: Tensor) -> None:
    module.state.lerp_(x.mean(0), 0.1)


def write_data(module: Any, x: Tensor) -> None:
    module.state.data.lerp_(x.mean(0), 0.1)


def normalise(module: Any, x: Tensor) -> None:
    """torch does not count this operator's writes."""
    nn.functional.batch_norm(x, module.state, torch.ones(4), training=True)


def drop(module: Any, x: Tensor) -> None:
    del module.state


def grow(module: Any, x: Tensor) -> None:
    module.state = torch.ones(len(module.state) + 1)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, *, reentrant: bool = False) -> None:
        super().__init__()
        self.first, self.inner, self._reentrant = nn.Linear(4, 4), inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.inner, self.first(x), use_reentrant=self._reentrant)
        return output
