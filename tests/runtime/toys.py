"""Small models, batches and the comparison with the one-process reference."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import rrfp
from rrfp.model.placement import Layout, Placement
from rrfp.testing.reference import ReferenceResult, reference

WIDTH = 6
TOLERANCE = 1e-12


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def stages(count: int, *, dropout: float = 0.25, seed: int = 0) -> list[nn.Module]:
    """The same modules for the same seed, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)).double() for _ in range(count)]


def placed(modules: Sequence[nn.Module], count: int, layout: Layout = "looped") -> list[list[nn.Module]]:
    """The modules of a model, in order, as chunks of ``count`` stages."""
    placement = Placement(count, len(modules) // count, layout)
    return [[modules[v] for v in placement.virtual_stages(stage)] for stage in range(count)]


@dataclass
class Data:
    """Microbatches of different lengths, and the lengths."""

    inputs: list[Tensor]
    targets: list[Tensor]
    lengths: list[float]


def data(microbatches: int, *, seed: int = 0, ragged: bool = True) -> Data:
    generator = torch.Generator().manual_seed(seed)
    lengths = [1 + (3 * m + seed) % 5 if ragged else 2 for m in range(microbatches)]

    def draw() -> list[Tensor]:
        return [torch.randn(n, WIDTH, dtype=torch.float64, generator=generator) for n in lengths]

    return Data(draw(), draw(), [float(n) for n in lengths])


def expect(modules: Sequence[nn.Module], batch: Data, **options: Any) -> ReferenceResult:
    return reference(modules, batch.inputs, batch.targets, loss_fn=loss_fn, **options)


def same_bits(actual: Sequence[nn.Module], expected: Sequence[nn.Module]) -> bool:
    """Whether all gradients are equal to the last bit."""
    return all(
        left.grad is not None and right.grad is not None and torch.equal(left.grad, right.grad)
        for ours, theirs in zip(actual, expected, strict=True)
        for left, right in zip(ours.parameters(), theirs.parameters(), strict=True)
    )


def largest_difference(actual: Sequence[nn.Module], expected: Sequence[nn.Module]) -> float:
    """Between the gradients of two lists of modules."""
    pairs = [
        pair
        for left, right in zip(actual, expected, strict=True)
        for pair in zip(left.parameters(), right.parameters(), strict=True)
    ]
    assert pairs
    differences = []
    for left, right in pairs:
        assert left.grad is not None
        assert right.grad is not None
        differences.append((left.grad - right.grad).abs().max().item())
    return max(differences)


class Bomb(nn.Module):
    """Passes its input on, and does something terrible in one forward or backward.

    Args:
        on_forward: called with the number of the forward.
        on_backward: called with the number of the backward.
    """

    def __init__(self, on_forward: Any = None, on_backward: Any = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self._on_forward, self._on_backward = on_forward, on_backward
        self._forwards = self._backwards = 0

    def forward(self, x: Tensor) -> Tensor:
        number, self._forwards = self._forwards, self._forwards + 1
        if self._on_forward is not None:
            self._on_forward(number)
        output = x * self.scale
        if output.requires_grad and self._on_backward is not None:
            output.register_hook(self._explode)  # type: ignore[no-untyped-call]
        return output

    def _explode(self, grad: Tensor) -> None:
        number, self._backwards = self._backwards, self._backwards + 1
        self._on_backward(number)


class Ones(rrfp.StageProgram):
    """Computes nothing: outputs and gradients are ones, and there are no losses."""

    def open(self, step: Any, batch: rrfp.Batch) -> None: ...

    def forward(self, task: rrfp.Task, inputs: tuple[rrfp.Payload, ...]) -> rrfp.Payload:
        return rrfp.Payload.pack(torch.ones(1))

    def backward(self, task: rrfp.Task, grads: tuple[rrfp.Payload, ...]) -> tuple[rrfp.Payload, ...]:
        return (rrfp.Payload((torch.ones(1),)),) if task.virtual_stage else ()


class Trap(Exception):
    """What the tests raise."""


class Hold:
    """A call that lasts until it is let go; says when it began."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.release = threading.Event()

    def __call__(self, number: int) -> None:
        if number == 0:
            self.begun.set()
            self.release.wait(50)


def fail_at(wanted: int, error: BaseException) -> Any:
    def check(number: int) -> None:
        if number == wanted:
            raise error

    return check
