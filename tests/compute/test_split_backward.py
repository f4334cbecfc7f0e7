"""B and W apart give bitwise the gradients of one backward, whatever order the microbatches' Bs come in."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from compute.split_models import MODULES
from torch import Tensor, nn

from rrfp.compute.split.backward import input_gradients

MICROBATCHES = 3


def outputs(module: nn.Module, x: Tensor) -> list[Tensor]:
    """The outputs that require grad."""
    torch.manual_seed(7)
    result = module(x)
    return [one for one in (result if isinstance(result, tuple) else (result,)) if one.requires_grad]


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, 3, 8, generator=generator) for _ in range(MICROBATCHES)]


def upstream(roots: list[Tensor], m: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + m)
    return [torch.randn(root.shape, generator=generator).to(root.dtype) for root in roots]


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.is_sparse and b.is_sparse:  # entry by entry: indices may repeat
        return torch.equal(a._indices(), b._indices()) and torch.equal(a._values(), b._values())
    return torch.equal(a, b)


def same(ours: list[Tensor | None], theirs: list[Tensor | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and _equal(a, b))
        for a, b in zip(ours, theirs, strict=True)
    )


def in_one_process(module: nn.Module, inputs: list[Tensor]) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Parameter and input gradients of ordinary backwards in microbatch order."""
    module.zero_grad(set_to_none=True)
    leaves = [x.clone().requires_grad_() for x in inputs]
    for m, leaf in enumerate(leaves):
        roots = outputs(module, leaf)
        torch.autograd.backward(roots, upstream(roots, m))
    return gradients(module), [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("name", MODULES)
def test_split_gradients_are_bitwise_those_of_one_backward(name: str) -> None:
    torch.manual_seed(0)
    make, operators = MODULES[name]
    module, inputs = make(), batches()
    expected, expected_inputs = in_one_process(module, inputs)
    module.zero_grad(set_to_none=True)
    pending: dict[int, Any] = {}
    found_inputs: dict[int, Tensor | None] = {}
    order = list(range(MICROBATCHES))
    random.Random(1).shuffle(order)
    assert order != sorted(order)
    for m in order:
        leaf = inputs[m].clone().requires_grad_()
        roots = outputs(module, leaf)
        torch.manual_seed(7)
        (found_inputs[m],), pending[m] = input_gradients(roots, upstream(roots, m), [leaf], min_flops=0)
        assert gradients(module) == [None] * len(gradients(module)), "B leaves parameters alone"
    if operators is not None:
        assert {len(one.deferred) for one in pending.values()} == {operators}
    for m in range(MICROBATCHES):
        pending[m].add_to_gradients()
        assert pending[m].num_bytes == 0
    assert same(gradients(module), expected)
    assert same([found_inputs[m] for m in range(MICROBATCHES)], expected_inputs)


@pytest.mark.parametrize("name", ["a stack", "tied", "views"])
def test_a_first_stage_whose_inputs_need_no_gradient_still_defers(name: str) -> None:
    torch.manual_seed(0)
    module, inputs = MODULES[name][0](), batches()
    roots = outputs(module, inputs[0])
    grads = upstream(roots, 0)
    torch.autograd.backward(roots, grads)
    expected = gradients(module)
    module.zero_grad(set_to_none=True)
    roots = outputs(module, inputs[0])
    found, pending = input_gradients(roots, grads, [], min_flops=0)
    assert found == ()
    assert pending.deferred
    pending.add_to_gradients()
    assert same(gradients(module), expected)


def test_small_products_are_formed_at_once_and_held() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 512))
    roots = outputs(module, torch.randn(2, 8))
    _, pending = input_gradients(roots, upstream(roots, 0), [], min_flops=10_000)
    assert len(pending.deferred) == 1
    assert {id(node.variable) for node, _ in pending.held} == {id(p) for p in module[0].parameters()}


def test_what_waits_for_w_is_inputs_and_output_gradients_and_no_copy() -> None:
    module = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    x = torch.randn(64, 256, requires_grad=True)
    roots = outputs(module, x)
    _, pending = input_gradients(roots, upstream(roots, 0), [x], min_flops=0)
    assert pending.num_bytes == 2 * 4 * x.numel() * 4


def test_a_hook_on_a_parameter_runs_once_and_counts() -> None:
    module = nn.Linear(8, 8)
    seen: list[str] = []
    after: list[str] = []

    def double(gradient: Tensor) -> Tensor:
        seen.append("weight")
        return gradient * 2

    module.weight.register_hook(double)  # type: ignore[no-untyped-call]
    module.bias.register_post_accumulate_grad_hook(lambda _: after.append("bias"))  # type: ignore[no-untyped-call]
    x = torch.randn(4, 8)
    expected, _ = in_one_process(module, [x])
    seen.clear()
    after.clear()
    module.zero_grad(set_to_none=True)
    roots = outputs(module, x)
    _, pending = input_gradients(roots, upstream(roots, 0), [], min_flops=0)
    assert (seen, after) == (["weight"], [])
    pending.add_to_gradients()
    assert (seen, after) == (["weight"], ["bias"])
    assert same(gradients(module), expected)


def test_a_gradient_that_a_parameter_already_has_is_added_to() -> None:
    module = nn.Linear(8, 8)
    x = torch.randn(4, 8)
    before = [torch.ones_like(parameter) for parameter in module.parameters()]
    for parameter, kept in zip(module.parameters(), before, strict=True):
        parameter.grad = kept
    roots = outputs(module, x)
    _, pending = input_gradients(roots, upstream(roots, 0), [], min_flops=0)
    pending.add_to_gradients()
    for parameter, kept in zip(module.parameters(), before, strict=True):
        assert parameter.grad is kept
        assert not torch.equal(kept, torch.ones_like(kept))


@pytest.mark.parametrize(("weight", "bias"), list(itertools.product([False, True], repeat=2)))
def test_frozen_parameters_get_no_gradient(weight: bool, bias: bool) -> None:
    module = nn.Linear(8, 8)
    module.weight.requires_grad_(weight)
    module.bias.requires_grad_(bias)
    x = torch.randn(4, 8, requires_grad=True)
    roots = outputs(module, x)
    (found,), pending = input_gradients(roots, upstream(roots, 0), [x], min_flops=0)
    pending.add_to_gradients()
    assert found is not None
    assert (module.weight.grad is not None, module.bias.grad is not None) == (weight, bias)
