"""B and W apart give bitwise the gradients of one backward, whatever order the microbatches' Bs come in."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rrfp.compute.split.autograd_graph import AutogradGraph
from rrfp.compute.split.backward import input_gradients, nodes_of
from rrfp.compute.split.pending_weights import PendingWeights

MICROBATCHES = 3


class Twice(nn.Module):
    """One linear layer used twice, with something between."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.linear(x)))  # type: ignore[no-any-return]


class Tied(nn.Module):
    """The head is the embedding's table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.body(self.table(_integers(x))), self.table.weight)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.attention(x, x, x)[0]
        return mixed


class SelfMade(nn.Module):
    """Parameters in places where no rule looks: left of a product, in an addition, scaled, and as the whole output."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(6, 6))
        self.shift = nn.Parameter(torch.randn(8))
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (self.left @ x.reshape(6, 8)) @ (2 * self.weight) + self.shift, self.shift


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))
        self.outer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(checkpoint(self.inner, x, use_reentrant=False))  # type: ignore[no-any-return]


class LowPrecision(nn.Module):
    """Under autocast one cast copy of the weight serves both uses."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = Twice()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.twice(x)  # type: ignore[no-any-return]


class Sum(nn.Module):
    """The gradient of both parameters, and of the input, is one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(2, 3, 8)), nn.Parameter(torch.randn(2, 3, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.left + self.right)


class ManyUses(nn.Module):
    """A weight used as it is and through views: more than two terms, whose order decides the bits of their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        looked = self.table(_integers(x) % 8).mean(-1) + x
        looked = functional.linear(looked, self.table.weight)
        return functional.linear(looked + self.table(_integers(x + 1) % 8).mean(-1), self.table.weight)


class Views(nn.Module):
    """Outputs are views of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.linear(x).chunk(3, dim=-1)  # type: ignore[no-any-return]


def _integers(x: Tensor) -> Tensor:
    return (x * 7).long().abs() % 11


def _frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    module[1].weight.requires_grad_(False)
    module[0].bias.requires_grad_(False)
    return module


#: Name: (module, how many operators are deferred; None: any number).
MODULES: dict[str, tuple[Callable[[], nn.Module], int | None]] = {
    "linear": (lambda: nn.Linear(8, 5), 1),
    "linear without bias": (lambda: nn.Linear(8, 5, bias=False), 1),
    "a stack": (lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8)), 2),
    "dropout": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8)), 2),
    "one layer twice": (Twice, 2),
    "tied": (Tied, 3),
    "frozen": (_frozen, 2),
    "attention": (Attention, None),
    "self-made": (SelfMade, 0),
    "checkpointed": (Checkpointed, 1),
    "low precision": (LowPrecision, 2),
    "views": (Views, 1),
    "one gradient for two parameters": (Sum, 0),
    "many uses": (ManyUses, 0),
    "sparse": (lambda: _Indices(nn.Embedding(11, 8, sparse=True)), 1),
    "sparse bag": (lambda: _Indices(nn.EmbeddingBag(11, 8, sparse=True)), 1),
    "convolution": (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.Conv1d(4, 2, 2, bias=False)), 2),
    "transposed": (lambda: nn.ConvTranspose1d(3, 4, 3, groups=1), 1),
    "recurrent": (lambda: nn.Sequential(nn.GRU(8, 8), _First()), None),
    "transformer layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), None),
    "no parameters": (nn.ReLU, 0),
}


class _Indices(nn.Module):
    """A sparse table, and a layer behind it."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.linear = table, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x[0] * self.linear(self.table(_integers(x[0]))).mean()  # type: ignore[no-any-return]


class _First(nn.Module):
    def forward(self, pair: Any) -> Tensor:
        first: Tensor = pair[0]
        return first


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
    pending: dict[int, PendingWeights] = {}
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


def test_reentrant_checkpointing_is_named_as_an_obstacle() -> None:
    linear = nn.Linear(8, 8)
    output = checkpoint(linear, torch.randn(2, 8, requires_grad=True), use_reentrant=True)
    obstacle = AutogradGraph.walk(nodes_of([output])).obstacle()
    assert obstacle is not None
    assert "reentrant" in obstacle
    assert AutogradGraph.walk(nodes_of([linear(torch.randn(2, 8))])).obstacle() is None
