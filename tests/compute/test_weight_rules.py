"""The rules that compute weight gradients in W, and the probe of the attributes of torch that they read."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

from rrfp.compute.split.backward import input_gradients
from rrfp.compute.split.weight_rules import RULES, rules_work


@pytest.mark.parametrize(
    "mode",
    [torch.no_grad(), torch.inference_mode(), torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16)],
    ids=["no_grad", "inference_mode", "meta device", "autocast"],
)
def test_the_probe_does_not_depend_on_the_modes_of_the_thread(mode: AbstractContextManager[None]) -> None:
    """A pipeline may be built in such a mode; the answer counts for the whole process."""
    rules_work.cache_clear()
    with mode:
        assert rules_work()


def test_the_probe_says_where_torch_has_not_what_a_rule_reads() -> None:
    rules_work.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RULES["AddmmBackward0"], "saved", ("_saved_gone",))
        assert not rules_work()
    rules_work.cache_clear()


@pytest.mark.parametrize("shape", [(0, 3, 8, 8), (2, 3, 8, 8)], ids=["an empty batch", "two images"])
def test_convolutions_are_deferred_for_any_batch(shape: tuple[int, ...]) -> None:
    layer, x = nn.Conv2d(3, 4, 3), torch.randn(shape, requires_grad=True)
    output = layer(x)
    torch.autograd.backward([output], [torch.ones_like(output)], inputs=[*layer.parameters()], retain_graph=True)
    expected = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    _, pending = input_gradients([output], [torch.ones_like(output)], [x], min_flops=0)
    assert pending.deferred
    pending.add_to_gradients()
    for parameter, gradient in zip(layer.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert gradient is not None
        assert torch.equal(parameter.grad, gradient)
