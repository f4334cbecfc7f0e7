"""Tables with sparse gradients: trained, split or not, and clipped; refused where gradients are added as dense."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import rrfp
from rrfp.errors import ConfigError


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 4)), nn.Linear(4, 4)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_a_sparse_table_trains_and_is_clipped_as_a_dense_one(split: bool, deterministic: bool) -> None:
    modules = stages()
    plain = nn.Sequential(*copy.deepcopy(modules))
    plain.get_submodule("0.0").sparse = False  # type: ignore[assignment]
    inputs = [torch.tensor([1, 2, 2]), torch.tensor([2, 5, 6]), torch.tensor([0, 0, 1])]
    targets = [torch.randn(3, 4) for _ in inputs]
    for x, y in zip(inputs, targets, strict=True):
        torch.autograd.backward(mean(plain(x), y) / len(inputs))
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    with rrfp.local(modules, loss_fn=mean, split=split, deterministic=deterministic).blocking() as pipe:
        pipe.step(inputs, targets)
        norm = pipe.clip_grad_norm_(0.01)
    assert norm == pytest.approx(float(expected), rel=1e-5)
    for ours, theirs in zip(nn.Sequential(*modules).parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.to_dense(), theirs.grad)
    table = next(modules[0].parameters()).grad
    assert table is not None
    assert table.is_sparse


def test_a_tied_sparse_table_is_refused() -> None:
    first, last = nn.Embedding(7, 4, sparse=True), nn.Linear(4, 7, bias=False)
    message = "the module of virtual stage 0 has sparse=True, must be sparse=False: its weight is in the tie 'table'"
    with pytest.raises(ConfigError, match=message):
        rrfp.local([first, last], loss_fn=mean, ties={"table": [first.weight, last.weight]})
    last.weight = first.weight
    with pytest.raises(ConfigError, match="must be sparse=False: its weight is in the tie 'weight@0'"):
        rrfp.local([first, last], loss_fn=mean)
    first.weight.requires_grad_(False)
    rrfp.local([first, last], loss_fn=mean)
