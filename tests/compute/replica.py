"""One of several replicas, whose gradients tell where they are from."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from runtime.recording_lane import RecordingLane
from torch import Tensor, nn

from rrfp.compute.gradients.reducer import GradientReducer

REPLICAS = 3


class Weights(nn.Module):
    """Parameters w0, w1, ... in float64."""

    w0: nn.Parameter
    w1: nn.Parameter
    w2: nn.Parameter

    def __init__(self, *shapes: Sequence[int]) -> None:
        super().__init__()
        for index, shape in enumerate(shapes):
            self.register_parameter(f"w{index}", nn.Parameter(torch.zeros(*shape, dtype=torch.float64)))


def of_rank(parameter: Tensor, rank: int, step: int = 0) -> Tensor:
    """A gradient that tells where it is from."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(parameter.shape, dtype=torch.float64, generator=generator)


def of_all(parameter: Tensor, *steps: int) -> Tensor:
    """What they sum to."""
    total = torch.zeros_like(parameter, requires_grad=False)
    for step in steps or (0,):
        for rank in range(REPLICAS):
            total += of_rank(parameter, rank, step)
    return total


class Replica:
    """A rank's chunks and what sums their gradients, on one loop.

    Args:
        rank: which replica.
        modules: its chunks by virtual stage, or the only one.
        group: of the replicas; by default all ranks.
    """

    def __init__(
        self,
        rank: int,
        modules: Mapping[int, nn.Module] | nn.Module,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        self.modules = {0: modules} if isinstance(modules, nn.Module) else dict(modules)
        self._rank = rank
        group = dist.group.WORLD if group is None else group
        assert group is not None
        self.lane = RecordingLane()
        self._reducer = GradientReducer(self.modules, lambda: group, self.lane, replica=rank, **options)
        self._runner = asyncio.Runner()
        self._runner.run(self._start())

    def step(self, number: int = 0, *, reduces: bool = True) -> None:
        """A step in which every parameter that learns gets its gradient, and all chunks end as numbered."""
        self._reducer.open(reduces)
        for module in self.modules.values():
            self.backward(module, number)
        if reduces:
            self.sum(*self.modules)

    def backward(self, module: nn.Module, number: int = 0) -> None:
        """Add the gradients of step ``number``."""
        for parameter in module.parameters():
            if parameter.requires_grad:
                gradient = of_rank(parameter, self._rank, number).to(parameter.dtype)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def sum(self, *finished: int) -> None:
        """Sum what there is; chunks are done in the order of ``finished``, a moment after one another."""
        self._runner.run(self._sum(finished))

    def open(self) -> None:
        """A step begins."""
        self._reducer.open(True)

    def leave(self, virtual_stage: int) -> None:
        """Give up on a sum that has begun, and end."""
        self._runner.run(self._leave(virtual_stage))
        self._runner.close()

    async def _start(self) -> None:
        self._reducer.start()
        await self._reducer.join()

    async def _sum(self, finished: Sequence[int]) -> None:
        summing = []
        for virtual_stage in finished:
            summing.append(asyncio.create_task(self._reducer.reduce(virtual_stage)))
            await asyncio.sleep(0.002)
        await asyncio.gather(*summing)

    async def _leave(self, virtual_stage: int) -> None:
        summing = asyncio.create_task(self._reducer.reduce(virtual_stage))
        await asyncio.sleep(0.05)
        summing.cancel()
        self._reducer.close()


def reduce_once(module: nn.Module, rank: int, **options: Any) -> None:
    """Sum what gradients there are."""
    replica = Replica(rank, module, **options)
    replica.open()
    replica.sum(0)


def assert_close(actual: Tensor | None, expected: Tensor) -> None:
    assert actual is not None
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)
