"""A model whose parts form a graph computes the gradients of one process, whatever hint and limit order its tasks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs.graph_models import MODELS, Model, model

import rrfp
from rrfp.testing.reference import reference

HINTS = ["bf", "fb", "b-priority", "f-priority", "bfw", "slot-aware", "slot-aware-pyramid", "bfw-pyramid"]


@pytest.fixture(autouse=True)
def in_float64() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def expected(name: str) -> tuple[Model, float]:
    alone = model(name)
    result = reference(
        alone.modules, alone.inputs, alone.targets, loss_fn=alone.loss_fn, graph=alone.graph, visits=alone.visits
    )
    assert result.loss is not None
    return alone, result.loss


def run(name: str, **options: Any) -> tuple[Model, rrfp.StepResult]:
    own = model(name)
    with rrfp.local(own.by_stage(), graph=own.graph, loss_fn=own.loss_fn, **options).blocking() as pipe:
        return own, pipe.step(own.inputs, own.targets, visits=own.visits)


def assert_same(own: Model, alone: Model, tolerance: float) -> None:
    wanted = alone.gradients()
    for name, gradient in own.gradients().items():
        other = wanted[name]
        assert (gradient is None) == (other is None), name
        if gradient is not None and other is not None:
            assert torch.allclose(gradient, other, rtol=0, atol=tolerance) if tolerance else gradient.equal(other), name


def is_equal(output: Any, other: Any) -> bool:
    if isinstance(output, torch.Tensor):
        return output.equal(other)
    return output.keys() == other.keys() and all(is_equal(output[part], other[part]) for part in output)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("hint", HINTS)
@pytest.mark.parametrize("name", list(MODELS))
def test_gradients_are_those_of_one_process(name: str, hint: str, split: bool) -> None:
    alone, loss = expected(name)
    own, result = run(name, hint=hint, split=split, limit=1)
    assert result.loss == pytest.approx(loss, rel=1e-12)
    assert_same(own, alone, 1e-12)


@pytest.mark.parametrize("limit", [1, 2, 3, "n", "2n", rrfp.Limit(bytes=1), rrfp.Limit(bytes=2000)])
@pytest.mark.parametrize("name", list(MODELS))
def test_every_limit_down_to_the_smallest_gives_them(name: str, limit: Any) -> None:
    alone, _ = expected(name)
    own, _ = run(name, limit=limit)
    assert_same(own, alone, 1e-12)


@pytest.mark.parametrize("name", ["two_sources", "diamond"])
def test_the_memory_of_1f1b_gives_them_where_a_stage_has_one_module(name: str) -> None:
    own, _ = run(name, limit="1f1b")
    assert_same(own, expected(name)[0], 1e-12)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("limit", [1, 3])
@pytest.mark.parametrize("name", list(MODELS))
def test_a_deterministic_step_gives_them_bitwise(name: str, limit: int, split: bool) -> None:
    alone, loss = expected(name)
    own, result = run(name, deterministic=True, limit=limit, split=split)
    assert result.loss == loss
    assert_same(own, alone, 0.0)


@pytest.mark.parametrize("name", list(MODELS))
def test_an_evaluation_gives_the_losses_and_outputs_of_one_process(name: str) -> None:
    alone, own = model(name), model(name)
    with torch.no_grad():
        wanted = reference(
            alone.modules, alone.inputs, alone.targets, loss_fn=alone.loss_fn, graph=alone.graph, visits=alone.visits
        )
    with rrfp.local(own.by_stage(), graph=own.graph, loss_fn=own.loss_fn, limit=1).blocking() as pipe:
        result = pipe.evaluate(own.inputs, own.targets, visits=own.visits, return_outputs=True)
        again = pipe.evaluate(own.inputs, own.targets)  # the next step visits everything
        pipe.step(own.inputs, own.targets, visits=own.visits)
    assert result.losses == wanted.losses
    assert all(is_equal(result.outputs[m], output) for m, output in enumerate(wanted.outputs))
    if own.visits is not None:
        assert again.losses != wanted.losses
    assert_same(own, expected(name)[0], 1e-12)
