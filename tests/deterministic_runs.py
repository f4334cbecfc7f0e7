"""Training the same model in one process and in a pipeline whose timing is drawn from a seed.

Time is virtual: tasks take random times, messages random latencies, so orders differ wildly between seeds and not
between runs of one seed. What runs in the tasks are real modules.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import rrfp
from rrfp import Hint, View
from rrfp.core.ready_set import ReadySet
from rrfp.model.tasks import Task
from rrfp.testing.clock import SimulatedTransport, TimerLane, run_virtual
from rrfp.testing.reference import reference
from rrfp.transports.base import Message, MessageKind

T = TypeVar("T")

WIDTH, STEPS, MICROBATCHES, STAGES = 16, 5, 6, 2


class Block(nn.Module):
    """A transformer's feed-forward half."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.narrow(nn.functional.gelu(self.wide(self.norm(x))))
        dropped: Tensor = self.drop(hidden)
        return x + dropped


class AnyReady(Hint):
    """Takes a random ready task."""

    wants_split = True

    def __init__(self) -> None:
        self._random = random.Random(5)

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        return self._random.choice(list(ready))


class JitterLane(TimerLane):
    """Every task takes a random time."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def enqueue(self, call: Callable[[], T]) -> Any:
        def timed() -> T:
            self.spend(self._random.expovariate(1.0))
            return call()

        future: Any = super().enqueue(timed)
        return future


def model(parts: int) -> list[nn.Module]:
    torch.manual_seed(0)
    modules: list[nn.Module] = [nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH)) for _ in range(parts)]
    modules[0] = nn.Sequential(nn.Embedding(20, WIDTH), modules[0])
    return modules


def batch(step: int) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """Ragged microbatches and their lengths."""
    generator = torch.Generator().manual_seed(100 + step)
    lengths = [1 + (5 * m + step) % 4 for m in range(MICROBATCHES)]
    inputs = [torch.randint(0, 20, (2, length), generator=generator) for length in lengths]
    targets = [torch.randn(2, length, WIDTH, generator=generator) for length in lengths]
    return inputs, targets, [float(length) for length in lengths]


def train_in_one_process(modules: Sequence[nn.Module], loss_fn: Any = nn.functional.mse_loss) -> list[float | None]:
    optimizer = sgd([*modules, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])])
    losses = []
    for step in range(STEPS):
        inputs, targets, lengths = batch(step)
        optimizer.zero_grad()
        result = reference(modules, inputs, targets, loss_fn=loss_fn, weights=lengths, step=step)
        losses.append(result.loss)
        optimizer.step()
    return losses


def train_in_a_pipeline(modules: Sequence[nn.Module], layout: str, seed: int, **options: Any) -> list[float | None]:
    """Two stages; the modules, in model order, are their chunks."""
    jitter = random.Random(seed)

    def latency(stage: int, peer: int, message: Message) -> float:
        return jitter.expovariate(0.5) if message.kind is MessageKind.OUTPUT else 0.0

    async def main() -> list[float | None]:
        options.setdefault("loss_fn", nn.functional.mse_loss)
        optimizer = sgd([*modules, *([options["loss_fn"]] if isinstance(options["loss_fn"], nn.Module) else [])])
        pipeline = rrfp.local(
            parts(modules, layout),
            loop="caller",
            transport=partial(SimulatedTransport, latency=latency),
            lane=lambda stage: JitterLane(1000 * seed + stage),
            placement=layout,  # type: ignore[arg-type]
            stall_after=1e6,
            **{"deterministic": True, **options},
        )
        losses = []
        async with pipeline as pipe:
            for step in range(STEPS):
                inputs, targets, lengths = batch(step)
                optimizer.zero_grad()
                result = await pipe.step(inputs, targets, weights=lengths, sizes=lengths)
                losses.append(result.loss)
                optimizer.step()
        return losses

    return run_virtual(main())


def parts(modules: Sequence[nn.Module], layout: str) -> list[list[nn.Module]]:
    if len(modules) == STAGES:
        return [[module] for module in modules]
    first, second = ((0, 3), (1, 2)) if layout == "v" else ((0, 2), (1, 3))
    return [[modules[v] for v in first], [modules[v] for v in second]]


def sgd(modules: Sequence[nn.Module]) -> torch.optim.Optimizer:
    parameters = dict.fromkeys(p for module in modules for p in module.parameters())
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def tensors(modules: Sequence[nn.Module]) -> list[Tensor]:
    """Parameters and their last gradients."""
    parameters = [p for module in modules for p in module.parameters()]
    return [*(p.detach() for p in parameters), *(p.grad for p in parameters if p.grad is not None)]


def assert_bitwise(ours: Sequence[nn.Module], theirs: Sequence[nn.Module]) -> None:
    pairs = list(zip(tensors(ours), tensors(theirs), strict=True))
    assert pairs
    assert all(torch.equal(a, b) for a, b in pairs)
