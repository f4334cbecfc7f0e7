"""Forward only, a module in train mode writes its buffers too: in microbatch order where that was asked for."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from transports.reordering import reordered

import rrfp
from rrfp import View
from rrfp.core.ready_set import ReadySet
from rrfp.errors import PipelineAborted
from rrfp.model.tasks import Task
from rrfp.transports.inproc import InprocTransport

WIDTH, MICROBATCHES = 4, 8


class AnyReady(rrfp.Hint):
    """Picks at random."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        return self._random.choice(list(ready))


class Counting(nn.Module):
    """Writes a buffer of its own, and is no BatchNorm."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.sum()
        return x


def stages() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(2)]


def inputs() -> list[Tensor]:
    """Microbatches whose statistics are far apart, so that their order shows."""
    return [torch.randn(3 + m, WIDTH) * 3.0**m for m in range(MICROBATCHES)]


def evaluated(modules: Sequence[nn.Module], rows: Sequence[Tensor], seed: int, *, deterministic: bool) -> list[Tensor]:
    """What an evaluation in random order leaves in the buffers."""
    choices = random.Random(seed)
    pipeline = rrfp.local(
        modules,
        hint=lambda: AnyReady(seed),
        transport=reordered(InprocTransport, choices.randrange),
        deterministic=deterministic,
    )
    with pipeline.blocking() as pipe:
        pipe.evaluate(rows)
    return [buffer.clone() for module in modules for buffer in module.buffers()]


def test_statistics_that_an_evaluation_writes_are_those_of_microbatches_in_order() -> None:
    expected, rows = stages(), inputs()
    others = [copy.deepcopy(expected) for _ in range(4)]
    with torch.no_grad():
        for x in rows:
            for module in expected:
                x = module(x)
    in_order = [buffer for module in expected for buffer in module.buffers()]
    for seed, modules in enumerate(others[:3]):
        found = evaluated(modules, rows, seed, deterministic=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, in_order, strict=True))
    free = evaluated(others[3], rows, 0, deterministic=False)
    assert not all(torch.equal(ours, theirs) for ours, theirs in zip(free, in_order, strict=True)), (
        "or this shows nothing"
    )


def test_an_evaluation_that_writes_another_buffer_is_refused_by_name() -> None:
    modules = [stages()[0], nn.Sequential(nn.Linear(WIDTH, WIDTH), Counting())]
    with pytest.raises(
        PipelineAborted, match=r"Sequential on virtual stage 1 writes its buffer '1.seen' \(of Counting\) in forward"
    ):
        evaluated(modules, inputs(), 0, deterministic=True)
    evaluated(modules, inputs(), 0, deterministic=False)


def test_buffers_that_an_evaluation_leaves_alone_are_no_reason_to_refuse() -> None:
    modules = [module.eval() for module in stages()]
    before = [buffer.clone() for module in modules for buffer in module.buffers()]
    after = evaluated(modules, inputs(), 0, deterministic=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(after, before, strict=True))
