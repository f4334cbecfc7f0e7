"""Work of weights that a stage does itself, by a ``dw_builder``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from integrations.torch_parts import CPU, WIDTH, Reference, WeightsLast, batch, blocks, loss_fn, only
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import rrfp
from rrfp.integrations.torch import ScheduleRRFP


class Deferred(torch.autograd.Function):
    """A linear layer whose gradient of the weight is computed later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, later: list[Callable[[], None]]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.later = later
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients

        def form() -> None:
            formed = gradient.flatten(0, -2).T @ x.flatten(0, -2)
            weight.grad = formed if weight.grad is None else weight.grad + formed

        ctx.later.append(form)
        return gradient @ weight, None, None


class DeferredLayer(nn.Module):
    """Keeps the work of its weight; the runners must be called first in, first out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.later: list[Callable[[], None]] = []
        self.queue: list[list[Callable[[], None]]] = []

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = Deferred.apply(x, self.weight, self.later)  # type: ignore[no-untyped-call]
        return output

    def builder(self) -> Callable[[], None]:
        work = list(self.later)
        self.queue.append(work)
        self.later.clear()

        def run() -> None:
            assert self.queue.pop(0) is work
            for form in work:
                form()

        return run


class LastMicrobatchFirst(WeightsLast):
    @staticmethod
    def key(task: rrfp.Task) -> int:
        return -task.microbatch


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def weight_work_of_the_callers_own() -> None:
    """A ``dw_builder`` with a queue: every W runs the work of the oldest B; with a whole backward too."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    mine = [me, me + ranks]
    for split in (False, True):
        modules: Any = blocks(2 * ranks, DeferredLayer)
        plain: Any = blocks(2 * ranks, Plain)
        reference = Reference(plain)
        stages = [PipelineStage(modules[v], v, 2 * ranks, CPU, dw_builder=modules[v].builder) for v in mine]
        schedule = ScheduleRRFP(stages, 4, loss_fn, split=split, hint=LastMicrobatchFirst if split else None)
        for number in range(2):
            x, y = batch(number, 8)
            schedule.step(*((x,) if me == 0 else ()), **only(me == ranks - 1, target=y))
            if number == 0:  # torch infers shapes with a backward, whose work is queued too
                for v in mine:
                    modules[v].zero_grad()
                continue
            reference.run(((part,) for part in x.chunk(4)), y.chunk(4))
            for v in mine:
                own, other = modules[v].weight.grad, plain[v].weight.grad
                assert torch.allclose(own, other, rtol=0, atol=1e-12), (split, v)
        schedule.close()
