"""Gradients and losses of `TorchStage`, in any order of tasks, against the one-process reference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from batches import examples
from compute.stage_driver import (
    Choose,
    Run,
    assert_same_gradients,
    gradients,
    in_order,
    shared,
    shuffled,
    train,
    travelled,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rrfp import Batch
from rrfp.compute.payload import Payload
from rrfp.compute.split import backward as split_backward
from rrfp.compute.torch_stage import TorchStage
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Placement
from rrfp.model.tasks import Mode, StepId, Task
from rrfp.testing.reference import reference

WIDTH = 6
Wire = Callable[[Payload], Payload]


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def layer(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64, **options), nn.Tanh())


def batch(count: int, rows: Callable[[int], int] = lambda m: 3) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(7)
    shapes = [(rows(m), WIDTH) for m in range(count)]
    made = [torch.randn(2, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [pair[0] for pair in made], [pair[1] for pair in made]


def check(modules: Sequence[nn.Module], inputs: Sequence[Any], targets: Sequence[Any], **options: Any) -> None:
    """The pipeline's losses and gradients are the reference's, whether backward is split or not."""
    loss_fn = options.pop("loss_fn", squared_error)
    choose, stages, wire = (options.pop(name, default) for name, default in OWN_OPTIONS.items())
    twins = copy.deepcopy(list(modules))
    expected = reference(twins, inputs, targets, loss_fn=loss_fn, **options)
    others = copy.deepcopy(list(modules))
    for split, trained in ((False, modules), (True, others)):
        losses = train(
            trained, inputs, targets, loss_fn, choose=choose, stages=stages, split=split, wire=wire, **options
        )
        assert list(losses) == list(range(len(inputs)))
        assert tuple(losses.values()) == pytest.approx(expected.losses, rel=1e-12)
        assert_same_gradients(gradients(trained), gradients(twins))


@pytest.fixture(autouse=True)
def everything_is_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of these sizes would not be."""
    monkeypatch.setattr(split_backward, "MIN_FLOPS", 0.0)


OWN_OPTIONS: dict[str, Any] = {"choose": in_order, "stages": None, "wire": travelled}


def drawn(data: st.DataObject) -> Choose:
    def choose(ready: Sequence[Task]) -> Task:
        return ready[data.draw(st.integers(0, len(ready) - 1))]

    return choose


@examples(40)
@given(st.data(), st.sampled_from([1, 3, 5]), st.sampled_from([1, 2, 4]), st.sampled_from([travelled, shared]))
def test_gradients_in_any_order(data: st.DataObject, count: int, stages: int, wire: Wire) -> None:
    torch.manual_seed(0)
    check([layer() for _ in range(stages)], *batch(count), choose=drawn(data), wire=wire)


@pytest.mark.parametrize("wire", [travelled, shared])
def test_several_chunks_on_a_stage(wire: Wire) -> None:
    check([layer() for _ in range(6)], *batch(5), choose=shuffled(1), stages=2, wire=wire)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_token_weights_over_ragged_microbatches(reduction: str) -> None:
    inputs, targets = batch(6, rows=lambda m: 1 + m % 4)
    weights = [float(len(rows)) for rows in inputs]
    check([layer(), layer()], inputs, targets, weights=weights, reduction=reduction, choose=shuffled(2))


def test_two_steps_accumulate() -> None:
    modules = [layer(), layer()]
    twins = copy.deepcopy(modules)
    inputs, targets = batch(4)
    for step in range(2):
        train(modules, inputs, targets, squared_error, step=step, choose=shuffled(step))
        reference(twins, inputs, targets, loss_fn=squared_error, step=step)
    assert_same_gradients(gradients(modules), gradients(twins))


class Nested(nn.Module):
    """Passes dicts, tuples, lists, plain numbers, integer tensors, and one unused output."""

    def __init__(self, *, last: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.aside = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.last = last

    def forward(self, hidden: Tensor, extra: tuple[Any, ...], scale: float, bias: Tensor | None = None) -> Any:
        ids, (other,) = extra
        hidden = self.linear(hidden)[:, ids] * scale + other
        if bias is not None:
            hidden = hidden + bias
        if self.last:
            return hidden
        return {"hidden": hidden, "extra": (ids.flip(0), [other * 2]), "scale": scale + 0.5, "bias": self.aside(other)}


def test_nested_structures_with_plain_values_and_integers() -> None:
    inputs, targets = batch(4)
    nested = [(rows, (torch.arange(WIDTH), [rows.cos()]), 0.5) for rows in inputs]
    check([Nested(), Nested(), Nested(last=True)], nested, targets, choose=shuffled(3))


def test_dicts_and_kwargs() -> None:
    inputs, targets = batch(3)
    given = [{"hidden": rows, "extra": (torch.arange(WIDTH), [rows.sin()])} for rows in inputs]
    check([Nested(last=True)], given, targets, kwargs=[{"scale": float(m)} for m in range(3)])


class Sections(nn.Module):
    """Emits its input itself, a view of it, one result twice, a parameter's view, a constant, and an unused result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.offset = nn.Parameter(torch.linspace(0, 1, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.linear(x)
        return x, x[1:], y, y, self.offset.view(1, WIDTH), x.new_ones(WIDTH), y.sin()


class Joined(nn.Module):
    def forward(self, x: Tensor, view: Tensor, y: Tensor, z: Tensor, offset: Tensor, one: Tensor, _: Tensor) -> Tensor:
        return (x + y * 3 + z.square() + offset * one)[1:] * view


@pytest.mark.parametrize("is_direct", [True, False], ids=["engine", "public functions"])
@pytest.mark.parametrize("wire", [travelled, shared])
def test_outputs_that_are_inputs_views_duplicates_or_parameters(
    wire: Wire, is_direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_direct:  # as in a torch without the private name
        monkeypatch.setattr("rrfp.compute.split.autograd_graph._run_engine", None)
    inputs, targets = batch(4)
    modules = [layer(), Sections(), Joined()]
    check(modules, inputs, [rows[1:] for rows in targets], choose=shuffled(4), wire=wire)


def test_pass_through_of_everything() -> None:
    check([layer(), nn.Identity(), nn.Identity(), layer()], *batch(3), choose=shuffled(5), wire=shared)


def test_duplicate_of_an_input() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    class Product(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x * y.exp()

    check([layer(), Twice(), Product()], *batch(2), wire=shared)


def test_outputs_of_one_operator_are_told_apart() -> None:
    """`chunk` makes views by one node with several outputs."""

    class Halves(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return x.chunk(2, dim=-1)

    class Cross(nn.Module):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return torch.cat([left * right, right.exp()], dim=-1)

    check([layer(), Halves(), Cross(), layer()], *batch(3), choose=shuffled(11))


def test_frozen_parameters_and_unused_parameters() -> None:
    modules = [layer(), layer(), layer()]
    for parameter in modules[1].parameters():
        parameter.requires_grad_(False)
    modules[2].register_parameter("unused", nn.Parameter(torch.zeros(2, dtype=torch.float64)))
    check(modules, *batch(3), choose=shuffled(6))


def test_frozen_first_stages_send_no_gradient() -> None:
    modules = [layer(), layer(), layer()]
    for module in modules[:2]:
        module.requires_grad_(False)
    check(modules, *batch(3), choose=shuffled(7))
    assert gradients(modules)[:4] == [None] * 4


def test_nothing_requires_grad() -> None:
    modules = [layer().requires_grad_(False), layer().requires_grad_(False)]
    check(modules, *batch(2))
    assert gradients(modules) == [None] * 4


def test_integer_inputs_and_classes() -> None:
    ids = [torch.randint(0, 9, (2, 3 + m), generator=torch.Generator().manual_seed(m)) for m in range(3)]
    modules = [nn.Embedding(9, WIDTH, dtype=torch.float64), layer(), nn.Linear(WIDTH, 9, dtype=torch.float64)]

    def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    check(modules, ids, ids, loss_fn=loss_fn, choose=shuffled(8))


def test_checkpointed_modules() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(layer(), nn.Dropout(0.5), layer())

        def forward(self, x: Tensor) -> Any:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    check([layer(), Checkpointed(), layer()], *batch(4), choose=shuffled(9))


def test_dropout_masks_do_not_depend_on_order() -> None:
    modules = [nn.Sequential(layer(), nn.Dropout(0.5)) for _ in range(3)]
    before = torch.default_generator.get_state()
    for seed in range(3):
        for module in modules:
            module.zero_grad()
        check(modules, *batch(5), choose=shuffled(seed), step=4)
    assert torch.equal(torch.default_generator.get_state(), before)


def test_a_graph_with_two_paths() -> None:
    """Virtual stages 1 and 2 both read 0; 3 reads both, positional arguments in graph order."""

    class Fork(nn.Module):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return left - right * 2

    graph = TaskGraph(Placement(4), edges=((0, 1), (0, 2), (1, 3), (2, 3)))
    modules = [layer(), layer(), layer(), Fork()]
    twins = copy.deepcopy(modules)
    programs = {v: TorchStage({v: module}, graph, loss_fn=squared_error) for v, module in enumerate(modules)}
    inputs, targets = batch(3)
    run = Run(programs, graph, StepId(0, Mode.TRAIN, 3), Batch(inputs, targets, None, (1.0,) * 3), wire=shared)
    run.finish(shuffled(10))
    for x, y in zip(inputs, targets, strict=True):
        trunk = twins[0](x)
        squared_error(twins[3](twins[1](trunk), twins[2](trunk)), y).backward()  # type: ignore[no-untyped-call]
    assert_same_gradients(gradients(modules), gradients(twins))
