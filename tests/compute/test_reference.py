"""The reference itself, against autograd written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rrfp.errors import ConfigError
from rrfp.testing.reference import reference


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def test_reference_differentiates_the_weighted_mean() -> None:
    modules = [nn.Linear(4, 4).double(), nn.Linear(4, 4).double()]
    inputs = [torch.randn(m + 1, 4, dtype=torch.float64) for m in range(3)]
    result = reference(modules, inputs, inputs, loss_fn=loss_fn, weights=[1, 2, 3], grad_scale=2.0)
    found = [parameter.grad for module in modules for parameter in module.parameters()]
    losses = [loss_fn(modules[1](modules[0](x)), x) for x in inputs]
    loss = (losses[0] + 2 * losses[1] + 3 * losses[2]) / 6
    expected = torch.autograd.grad(loss * 2, [parameter for module in modules for parameter in module.parameters()])
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-13, atol=1e-13)
    assert result.loss == pytest.approx(loss.item())
    assert [output.shape for output in result.outputs] == [x.shape for x in inputs]


def test_forward_only() -> None:
    module = nn.Linear(4, 4)
    inputs = [torch.ones(1, 4)]
    with torch.no_grad():
        assert reference([module], inputs, inputs, loss_fn=loss_fn).loss is not None
    assert reference([module], inputs).loss is None
    assert module.weight.grad is None


def test_lists_must_agree() -> None:
    inputs = [torch.ones(1, 4)]
    with pytest.raises(ConfigError, match="targets has 2 entries, must have 1"):
        reference([nn.Identity()], inputs, inputs * 2, loss_fn=loss_fn)
    with pytest.raises(ConfigError, match="targets is missing"):
        reference([nn.Identity()], inputs, loss_fn=loss_fn)
