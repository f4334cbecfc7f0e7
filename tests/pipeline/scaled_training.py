"""A small model in float16, trained with a GradScaler in one process without RRFP, and the same through a pipeline."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from rrfp.pipeline.faces import BlockingPipeline

WIDTH, MICROBATCHES, STEPS = 8, 4, 10

#: A factor with which a gradient overflows, whatever the scale.
SPIKE = 3e38

#: Step, virtual stage and microbatch in which the gradient of one parameter overflows, and no other one does.
Spikes = Collection[tuple[int, int, int]]


class Spiky(nn.Module):
    """A layer, and a parameter whose value is 0 and whose gradient the caller can make infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.spike = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, spike: float = 0.0) -> Tensor:
        return torch.tanh(self.inner(x)) + self.spike * spike


def model(count: int) -> list[nn.Module]:
    """The same modules in every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [Spiky() for _ in range(count)]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target)


def batch(step: int, replica: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(100 * replica + step)
    inputs, targets = torch.randn(2, MICROBATCHES, 4, WIDTH, generator=generator)
    return list(inputs), list(targets)


def spikes_of(step: int, stage: int, spikes: Spikes) -> list[dict[str, float]]:
    """The keyword arguments of a virtual stage."""
    return [{"spike": SPIKE if (step, stage, m) in spikes else 0.0} for m in range(MICROBATCHES)]


def new_scaler(**options: Any) -> GradScaler:
    return GradScaler("cpu", **{"init_scale": 2.0**12, "growth_interval": 2, **options})


def parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    return [parameter for module in modules for parameter in module.parameters()]


def sgd(modules: Iterable[nn.Module]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters(modules), lr=0.1, momentum=0.5)


@dataclass
class Course:
    """How a training went: losses, scales and whether the optimizer's step was skipped, by step; and the parameters."""

    losses: list[tuple[float, ...]] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def update(self, scaler: GradScaler, step: int) -> None:
        """Update the scale, and note whether it became smaller."""
        before = scaler.get_scale()
        scaler.update()
        self.scales.append(scaler.get_scale())
        self.skipped += [step] if scaler.get_scale() < before else []

    def keep(self, modules: Iterable[nn.Module]) -> Course:
        self.values = [parameter.detach().clone() for parameter in parameters(modules)]
        return self


def expected(
    count: int,
    scaler: GradScaler,
    spikes: Spikes = (),
    *,
    accumulate: int = 1,
    max_norm: float | None = None,
    replicas: int = 1,
    dtype: torch.dtype = torch.float16,
) -> Course:
    """One process, one optimizer, plain torch."""
    modules, course = model(count), Course()
    optimizer = sgd(modules)
    for step in range(STEPS):
        losses = []
        for replica in range(replicas):
            for m, (x, target) in enumerate(zip(*batch(step, replica), strict=True)):
                with torch.autocast("cpu", dtype=dtype):
                    for stage, module in enumerate(modules):
                        x = module(x, **spikes_of(step, stage, spikes if replica == 0 else ())[m])
                    loss = loss_fn(x, target)
                scaler.scale(loss / (MICROBATCHES * replicas)).backward()  # type: ignore[no-untyped-call]
                losses.append(loss.item())
        course.losses.append(tuple(losses))
        if step % accumulate == accumulate - 1:
            if max_norm is not None:
                scaler.unscale_(optimizer)
                course.norms.append(float(nn.utils.clip_grad_norm_(parameters(modules), max_norm)))
            scaler.step(optimizer)
            course.update(scaler, step)
            optimizer.zero_grad()
    return course.keep(modules)


def trained(
    pipe: BlockingPipeline,
    modules: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: GradScaler,
    spikes: Spikes = (),
    *,
    stages: int,
    accumulate: int = 1,
    max_norm: float | None = None,
    replica: int = 0,
    dtype: torch.dtype = torch.float16,
) -> Course:
    """The same through a pipeline, on one of its ranks, which has ``modules``."""
    course = Course()
    pipe.scale(scaler)
    for step in range(STEPS):
        inputs, targets = batch(step, replica)
        kwargs = {v: spikes_of(step, v, spikes if replica == 0 else ()) for v in range(stages)}
        is_last = step % accumulate == accumulate - 1
        with torch.autocast("cpu", dtype=dtype):
            result = pipe.step(inputs, targets, kwargs=kwargs, reduce_gradients=is_last)
        course.losses.append(result.losses)
        if is_last:
            if max_norm is not None:
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
                course.norms.append(pipe.clip_grad_norm_(max_norm))
            for optimizer in optimizers:
                scaler.step(optimizer)
            course.update(scaler, step)
            for optimizer in optimizers:
                optimizer.zero_grad()
    return course.keep(modules)
