"""`StepSnapshot`: a step that is computed again begins with the buffers and gradients that the first try began with."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from rrfp.pipeline.lost_rank.step_snapshot import StepSnapshot


class Carries(nn.Module):
    """Has buffers of every kind: written in place, replaced, dropped, and made in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("written", torch.zeros(3))
        self.register_buffer("unsaved", torch.zeros(3), persistent=False)
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("dropped", torch.ones(2))
        self.register_buffer("absent", None)
        self.written: Tensor
        self.unsaved: Tensor
        self.replaced: Tensor
        self.dropped: Tensor | None
        self.absent: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        self.written.data.add_(x.detach().sum(0))
        self.unsaved += 1
        self.replaced = self.replaced + 1
        self.dropped = None
        self.absent = torch.ones(1)
        self.register_buffer("made", torch.ones(4))
        return x * self.weight + self.replaced


def test_buffers_are_put_back_in_place() -> None:
    first, second = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), Carries()
    modules: dict[int, nn.Module] = {0: first, 3: second}
    tensors = {name: buffer for module in modules.values() for name, buffer in module.named_buffers()}
    before = copy.deepcopy({v: dict(module.named_buffers()) for v, module in modules.items()})
    snapshot = StepSnapshot.take(modules)
    for _ in range(2):
        second(first(torch.randn(4, 3))).sum().backward()
    assert {name for name, _ in second.named_buffers()} == {"written", "unsaved", "replaced", "absent", "made"}
    snapshot.restore()
    for v, module in modules.items():
        found = dict(module.named_buffers())
        assert found.keys() == before[v].keys()
        for name, buffer in found.items():
            assert torch.equal(buffer, before[v][name]), name
            assert buffer is tensors[name]
    assert second.absent is None
    second(first(torch.randn(4, 3)))  # which makes one again
    assert torch.equal(second.unsaved, torch.ones(3))


def test_a_second_try_has_the_gradients_and_statistics_of_a_first_one() -> None:
    module, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double(), torch.randn(4, 3).double()
    alone = copy.deepcopy(module)
    snapshot = StepSnapshot.take({0: module})
    module(2 * x).sum().backward()
    snapshot.restore()
    for each in (module, alone):
        each(x).square().sum().backward()
    for ours, theirs in zip(module.parameters(), alone.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
    assert all(map(torch.equal, module.buffers(), alone.buffers()))


@pytest.mark.parametrize("is_none", [True, False])
def test_gradients_that_were_zeroed_are_zeroed_anew(is_none: bool) -> None:
    module = nn.Linear(3, 3)
    module(torch.ones(1, 3)).sum().backward()
    module.zero_grad(set_to_none=is_none)
    snapshot = StepSnapshot.take({0: module})
    assert snapshot.cannot is None
    module(torch.ones(1, 3)).sum().backward()
    written = [parameter.grad for parameter in module.parameters()]
    snapshot.restore()
    for parameter, gradient in zip(module.parameters(), written, strict=True):
        if is_none:
            assert parameter.grad is None
        else:
            assert parameter.grad is not None
            assert not parameter.grad.any()
            assert parameter.grad is not gradient  # a collective may still write into that one


def test_gradients_of_an_earlier_step_cannot_be_had_back() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1](torch.ones(1, 3)).sum().backward()
    assert StepSnapshot.take({2: module}).cannot == (
        "parameter '1.weight' of virtual stage 2 had a gradient of an earlier step, to which this step has added its "
        "own"
    )
