"""Stages whose modules are checkpointed or traced, and modes of the caller."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from integrations.torch_parts import CPU, WIDTH, Block, Rank, batch, blocks, loss_fn, only
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.utils.checkpoint import checkpoint

from rrfp.integrations.torch import ScheduleRRFP


class Checkpointed(Block):
    """Recomputes its forward in the backward."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        output: Tensor = checkpoint(super().forward, x, scale, use_reentrant=False)
        return output


def activation_checkpointing() -> None:
    for split in (False, True):
        rank = Rank(2, 4, make=Checkpointed, split=split)
        rank.steps(2)
        rank.schedule.close()


def traced_stages() -> None:
    """Stages of ``pipeline()`` with a keyword that only the first stage gets from the caller."""
    ranks, me = dist.get_world_size(), dist.get_rank()

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(blocks(ranks))

        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            x = x * scale
            for part in self.parts:
                x = part(x)
            return x

    model, reference = Scaled(), Scaled()
    split_spec = {f"parts.{v}": SplitPoint.BEGINNING for v in range(1, ranks)}
    traced = pipeline(model, (torch.randn(2, WIDTH),), {"scale": torch.rand(2, 1)}, split_spec=split_spec)
    stage = traced.build_stage(me, CPU)
    schedule = ScheduleRRFP(stage, 4, loss_fn)
    for number in range(3):
        x, y = (part[:, 0] for part in batch(number, 8))
        scale = torch.rand(8, 1, generator=torch.Generator().manual_seed(number))
        losses: list[Any] = []
        args = (x,) if me == 0 else ()
        output = schedule.step(*args, **only(me == 0, scale=scale), **only(me == ranks - 1, target=y, losses=losses))
        expected = [reference(p, scale=s) for p, s in zip(x.chunk(4), scale.chunk(4), strict=True)]
        loss = [loss_fn(o, t) for o, t in zip(expected, y.chunk(4), strict=True)]
        torch.autograd.backward(sum(loss[1:], loss[0]) / 4)
        if me == ranks - 1:
            assert torch.equal(output, torch.cat(expected))
            assert [each.item() for each in losses] == [each.item() for each in loss]
        for name, parameter in stage.submod.named_parameters():
            other = reference.get_parameter(name).grad
            assert parameter.grad is not None
            assert other is not None
            assert torch.allclose(parameter.grad, other, rtol=0, atol=1e-12)
        stage.submod.zero_grad()
        reference.zero_grad()
    schedule.close()


def modes_of_the_caller_hold_in_tasks() -> None:
    """autocast and hooks for saved tensors, which torch keeps for each thread, act on the stages as they would."""
    rank = Rank(1, 2)
    x, y = batch(0, 4)
    losses: list[Any] = []
    args, kwargs = rank.arguments(x, y, losses)
    threads: set[str] = set()

    def pack(tensor: Tensor) -> Tensor:
        threads.add(threading.current_thread().name)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        rank.schedule.step(*args, **kwargs)
    rank.reference.run(((part,) for part in x.chunk(2)), y.chunk(2))
    assert rank.error() < 1e-12
    assert any(name.startswith("rrfp-lane") for name in threads), threads
    rank.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = rank.schedule.eval(*args)
        with torch.no_grad():
            rank.reference.modules[0].eval()
            expected = x
            for module in rank.reference.modules:
                expected = torch.cat([module(part) for part in expected.chunk(2)])
    if rank.is_last:
        assert torch.equal(output, expected)
    rank.schedule.close()
