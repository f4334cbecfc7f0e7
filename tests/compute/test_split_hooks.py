"""Hooks see and change the same gradients, as often, whether a backward is split or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rrfp.compute.payload import Payload
from rrfp.compute.read_only import Received
from rrfp.compute.split.backward import MIN_FLOPS, SplitBackward, input_gradients
from rrfp.errors import StageError

WIDTH, MICROBATCHES = 6, 2

#: What multiplies: (activation, weight of WIDTH x WIDTH, bias).
OPERATORS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mm": lambda x, w, _: x @ w,
    "addmm": lambda x, w, b: torch.addmm(b, x, w),
    "linear": lambda x, w, b: functional.linear(x, w, b),
    "linear of a batch": lambda x, w, b: functional.linear(x[None], w, b)[0],
    "linear without bias": lambda x, w, _: functional.linear(x, w),
    "convolution": lambda x, w, b: functional.conv1d(x[..., None], w.view(WIDTH, WIDTH, 1), b)[..., 0],
    "embedding": lambda x, w, _: functional.embedding((x.detach() * 7).long().abs() % WIDTH, w).sum(1) + x,
}

#: From a parameter's shape to its weight.
VIEWS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "t": ((WIDTH, WIDTH), lambda w: w.t()),
    "transpose": ((WIDTH, WIDTH), lambda w: w.transpose(0, 1)),
    "permute": ((WIDTH, WIDTH), lambda w: w.permute(1, 0)),
    "view": ((WIDTH * WIDTH,), lambda w: w.view(WIDTH, WIDTH)),
    "cast": ((WIDTH, WIDTH), lambda w: w.to(torch.float64).to(torch.float32)),
    "cast and view": ((WIDTH * WIDTH,), lambda w: w.to(torch.float64).view(WIDTH, WIDTH).to(torch.float32)),
}

PLACES = ("input", "view", "output", "second output", "parameter")


class Seen:
    """Hooks tensors, and keeps what the hooks are called with."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[Any, ...]] = Counter()
        self.retained: list[Tensor] = []

    def tensor(self, tensor: Tensor) -> None:
        tensor.register_hook(self._scale)  # type: ignore[no-untyped-call]

    def node_before(self, tensor: Tensor) -> None:
        assert tensor.grad_fn is not None
        tensor.grad_fn.register_prehook(lambda gradients: tuple(map(self._scale, gradients)))

    def node_after(self, tensor: Tensor) -> None:
        assert tensor.grad_fn is not None
        tensor.grad_fn.register_hook(lambda sent, _: tuple(None if one is None else self._scale(one) for one in sent))

    def multi(self, tensor: Tensor) -> None:
        register_multi_grad_hook([tensor], lambda gradients: self._count(*gradients))

    def retain(self, tensor: Tensor) -> None:
        tensor.retain_grad()
        self.retained.append(tensor)

    def both(self, tensor: Tensor) -> None:
        self.node_before(tensor)
        self.tensor(tensor)

    def _scale(self, gradient: Tensor) -> Tensor:
        self._count(gradient)
        return gradient * 1.7

    def _count(self, gradient: Tensor | None) -> None:
        assert gradient is not None
        self.calls[tuple(gradient.detach().double().flatten().tolist())] += 1

    def told(self) -> tuple[Any, ...]:
        return self.calls, [None if one.grad is None else one.grad.tolist() for one in self.retained]


KINDS = ("tensor", "node_before", "node_after", "multi", "retain", "both")


class Twice(nn.Module):
    """An operator used twice with one view of its weight; one place is hooked."""

    def __init__(self, operator: str, view: str, place: str, hook: Callable[[Tensor], None], *, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        shape, self._view = VIEWS[view]
        self._operator, self._place, self._hook, self._inside = OPERATORS[operator], place, hook, inside
        self.weight, self.bias = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(WIDTH))
        if place == "parameter":
            hook(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        if self._inside:
            result: Tensor = checkpoint(self._run, x, use_reentrant=False)
            return result
        return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        hidden = self._at("input", torch.tanh(x) if x.requires_grad else x)
        weight = self._at("view", self._view(self.weight))
        between = torch.tanh(self._at("output", self._operator(hidden, weight, self.bias)))
        # Doubled, since at the root of a backward torch calls no hook of several tensors.
        return 2 * self._at("second output", self._operator(between, weight, self.bias))

    def _at(self, place: str, tensor: Tensor) -> Tensor:
        if place == self._place and tensor.requires_grad:
            self._hook(tensor)
        return tensor


def twice(operator: str, view: str, place: str, kind: str, *, inside: bool = False) -> Callable[[Seen], nn.Module]:
    return lambda seen: Twice(operator, view, place, getattr(seen, kind), inside=inside)


Outcome = tuple[list[Any], list[Any], tuple[Any, ...]]


def outcome(
    make: Callable[[Seen], nn.Module], *, split: bool, learns: bool = True, min_flops: float = 0, rows: int = 5
) -> Outcome:
    """Gradients of the parameters and of the inputs, and what hooks saw."""
    seen = Seen()
    module = make(seen)
    generator = torch.Generator().manual_seed(3)
    leaves, waiting = [], []
    for _ in range(MICROBATCHES):
        leaf = torch.randn(rows, WIDTH, generator=generator).requires_grad_(learns)
        leaves.append(leaf)
        output = module(leaf)
        gradient = torch.randn(output.shape, generator=generator)
        if not split:
            output.backward(gradient)
            continue
        inputs = [leaf] if learns else []
        found, pending = input_gradients([output], [gradient], inputs, min_flops=min_flops)
        for one, its in zip(inputs, found, strict=True):
            one.grad = its
        waiting.append(pending)
    for pending in waiting:
        pending.add_to_gradients()
    return (
        [None if p.grad is None else p.grad.tolist() for p in module.parameters()],
        [None if leaf.grad is None else leaf.grad.tolist() for leaf in leaves],
        seen.told(),
    )


def check(make: Callable[[Seen], nn.Module], **options: Any) -> None:
    expected = outcome(make, split=False, **{name: value for name, value in options.items() if name != "min_flops"})
    assert outcome(make, split=True, **options) == expected
    calls, retained = expected[2]
    assert calls or retained or not options.get("learns", True), "no hook ran"


@pytest.mark.parametrize(("operator", "kind"), list(product(OPERATORS, KINDS)))
def test_a_hook_anywhere_around_an_operator(operator: str, kind: str) -> None:
    for place in PLACES:
        if place == "parameter" and kind != "tensor":
            continue  # a leaf has no grad_fn
        for learns, inside in ((True, False), (False, False), (True, True)):
            check(twice(operator, "t", place, kind, inside=inside), learns=learns)


@pytest.mark.parametrize(("view", "kind"), list(product(VIEWS, KINDS)))
def test_a_hook_on_what_stands_between_a_weight_and_its_operators(view: str, kind: str) -> None:
    for operator in ("addmm", "linear", "convolution", "embedding"):
        check(twice(operator, view, "view", kind))


class Layers(nn.Module):
    """Layers above the threshold of deferral."""

    def __init__(self, place: str, hook: Callable[[Tensor], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, 384), nn.Linear(384, 384)
        self._place, self._hook = place, hook

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        weight = self.second.weight.t()
        output = torch.addmm(self.second.bias, hidden, weight)
        self._hook({"input": hidden, "view": weight, "output": output}[self._place])
        return 2 * output


@pytest.mark.parametrize(("place", "kind"), list(product(("input", "view", "output"), KINDS)))
def test_a_hook_around_a_layer_that_is_deferred_by_default(place: str, kind: str) -> None:
    check(lambda seen: Layers(place, getattr(seen, kind)), min_flops=MIN_FLOPS, rows=128)


def test_those_layers_are_deferred_where_no_node_is_hooked() -> None:
    for kind in ("tensor", "multi", "retain"):
        output = Layers("output", getattr(Seen(), kind))(torch.randn(128, WIDTH))
        _, pending = input_gradients([output], [torch.ones_like(output)], [])
        assert [one.node.name() for one in pending.deferred] == ["AddmmBackward0"]


def test_a_hook_of_several_tensors_that_counts_a_parameter_prevents_the_split() -> None:
    """Such a hook raises in autograd.grad, which B is."""
    module = nn.Linear(WIDTH, WIDTH)
    calls: list[list[bool]] = []
    output = module(torch.ones(2, WIDTH))
    register_multi_grad_hook([output, module.weight], lambda found: calls.append([one is not None for one in found]))
    output = output * 2
    received = Received([Payload.pack(torch.ones(2, WIDTH))], [2], training=True)
    with pytest.raises(StageError, match=r"Linear on virtual stage 3 cannot be split: .*\(register_multi_grad_hook\)"):
        SplitBackward(module, 3, "refuse").run([output], [torch.ones(2, WIDTH)], received.tensors())
    assert SplitBackward(module, 3).run([output], [torch.ones(2, WIDTH)], received.tensors()) is None
    assert calls == [[True, True]]
    assert module.weight.grad is not None


def test_hooks_of_accumulate_nodes_and_after_accumulation_run_in_w() -> None:
    """On deferred and on held parameters, and once where a tensor hook ran in B."""

    def make(seen: Seen) -> nn.Module:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Embedding(3, 2))
        for parameter in module.parameters():
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            node.register_prehook(lambda gradients: tuple(map(seen._scale, gradients)))  # type: ignore[union-attr]
            nodes.append(node)
            parameter.register_post_accumulate_grad_hook(lambda one: seen._count(one.grad))  # type: ignore[no-untyped-call]
        for index in (0, 1):
            seen.tensor(module[index].get_parameter("bias"))
        return module[:2]

    nodes: list[Any] = []  # or torch would make new ones
    check(make)


def test_module_hooks() -> None:
    def make(seen: Seen) -> nn.Module:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        for layer in (module[0], module[2]):
            layer.register_full_backward_pre_hook(lambda _, given: tuple(map(seen._scale, given)))
            layer.register_full_backward_hook(lambda _, sent, given: seen._count(given[0]))  # type: ignore[index]
        return module

    check(make)


def test_a_view_made_before_the_forward_keeps_its_hook() -> None:
    class Early(nn.Module):
        def __init__(self, seen: Seen) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.turned = self.weight.t()
            seen.tensor(self.turned)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.turned) @ self.turned

    check(Early)


def test_a_checkpoint_around_a_convolution_is_recomputed_once() -> None:
    runs: list[int] = []

    class Inner(nn.Conv1d):
        def forward(self, x: Tensor) -> Tensor:
            runs.append(1)
            return super().forward(x)

    module = Inner(4, 4, 3)
    x = torch.randn(2, 4, 8, requires_grad=True)
    output = checkpoint(module, x, use_reentrant=False)
    input_gradients([output], [torch.ones_like(output)], [x], min_flops=0)
    assert len(runs) == 2
