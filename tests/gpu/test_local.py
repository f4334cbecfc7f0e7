"""All stages in one process on one device: gradients, losses and outputs are the one-process reference's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu.models import DEMO, LARGE, Model, have_same_bits, loss_fn, placed, worst_difference
from torch import nn

import rrfp
from benchmarks.gpu.target import Target
from rrfp.testing.reference import reference

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

STEPS = 2
METHODS: dict[str, dict[str, Any]] = {
    "bf": {"hint": "bf"},
    "bf, depth 1": {"hint": "bf", "depth": 1},
    "bf, depth 3": {"hint": "bf", "depth": 3},
    "strict 1f1b": {"strict": "1f1b"},
    "bfw, split": {"hint": "bfw", "split": True},
    "slot-aware, chunks": {"hint": "slot-aware", "split": True, "chunks": 2},
    "zb-v, v": {"hint": "zb-v", "split": True, "chunks": 2, "placement": "v"},
}


def train(model: Model, target: Target, **options: Any) -> tuple[list[nn.Module], list[rrfp.StepResult]]:
    """The modules of all virtual stages after some steps whose gradients add up, and the results."""
    chunks, layout = options.pop("chunks", 1), options.get("placement", "looped")
    modules = model.build(target, 4 * chunks)
    parts: Any = placed(modules, 4, layout)
    with rrfp.local(parts, loss_fn=loss_fn, **target.options, **options).blocking() as pipe:
        return modules, [pipe.step(*model.batch(target, step)) for step in range(STEPS)]


def check(model: Model, target: Target, record_property: Any, **options: Any) -> None:
    modules, results = train(model, target, **options)
    expected = model.build(target, len(modules))
    wanted = model.expect(expected, target, STEPS)
    worst = worst_difference(modules, expected)
    record_property("largest relative difference of gradients", f"{worst:.2g} (at most {model.tolerance:g})")
    assert worst <= model.tolerance
    for result, want in zip(results, wanted, strict=True):
        assert result.losses == pytest.approx(want.losses, rel=model.tolerance)


@pytest.mark.parametrize("method", METHODS)
def test_the_demos_gpt(method: str, target: Target, record_property: Any) -> None:
    check(DEMO[target.name], target, record_property, **METHODS[method])


@pytest.mark.parametrize("method", ["bf", "bfw, split"])
def test_a_larger_gpt(method: str, target: Target, record_property: Any) -> None:
    check(LARGE[target.name], target, record_property, **METHODS[method])


@pytest.mark.parametrize("method", ["bf", "bfw, split"])
def test_dropout_draws_the_masks_of_the_reference_in_any_order(
    method: str, target: Target, record_property: Any
) -> None:
    model = replace(DEMO[target.name], dropout=0.3)
    check(model, target, record_property, **METHODS[method])
    silent, _ = train(DEMO[target.name], target, **METHODS[method])
    drawn, _ = train(model, target, **METHODS[method])
    assert worst_difference(drawn, silent) > 10 * model.tolerance  # otherwise nothing was dropped


@pytest.mark.usefixtures("same_bits")
def test_deterministic_gives_the_references_bits_in_any_order(target: Target) -> None:
    model = replace(DEMO[target.name], dropout=0.3)
    expected = model.build(target, 4)
    model.expect(expected, target, STEPS)
    for method in ("bf", "strict 1f1b", "bfw, split"):
        modules, _ = train(model, target, deterministic=True, **METHODS[method])
        assert have_same_bits(modules, expected), method


def test_a_caller_uses_the_outputs_of_an_evaluation_at_once_and_during_later_steps(target: Target) -> None:
    model = DEMO[target.name]
    modules = model.build(target, 4)
    inputs, _ = model.batch(target, 0)
    with torch.no_grad():
        wanted = reference(modules, inputs, step=0).outputs
    with rrfp.local(modules, loss_fn=loss_fn, **target.options).blocking() as pipe:
        outputs = pipe.evaluate(inputs, return_outputs=True).outputs
        sums = [outputs[m].double().sum() for m in range(model.microbatches)]  # issued on the caller's stream
        for step in range(STEPS):
            pipe.step(*model.batch(target, step))
    for m, want in enumerate(wanted):
        torch.testing.assert_close(sums[m], want.double().sum(), rtol=1e-3, atol=1e-2)
        torch.testing.assert_close(outputs[m], want, rtol=1e-4, atol=1e-4)


def test_a_step_sees_the_parameters_and_inputs_that_its_caller_has_only_issued(target: Target) -> None:
    """The optimizer's step and the inputs are kernels on the caller's stream when `step` is called."""
    model = DEMO[target.name]
    modules, expected = model.build(target, 4), model.build(target, 4)
    losses, wanted = [], []
    with rrfp.local(modules, loss_fn=loss_fn, **target.options).blocking() as pipe:
        optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1, momentum=0.9)
        for step in range(4):
            with target.device.current_stream().issuing():
                inputs, targets = model.batch(target, step)
                shifted = [(tokens + 1) % model.gpt.vocabulary for tokens in inputs]
            losses.append(pipe.step(shifted, targets).loss)
            with target.device.current_stream().issuing():
                optimizer.step()
                optimizer.zero_grad()
    optimizer = torch.optim.SGD([p for module in expected for p in module.parameters()], lr=0.1, momentum=0.9)
    for step in range(4):
        inputs, targets = model.batch(target, step)
        shifted = [(tokens + 1) % model.gpt.vocabulary for tokens in inputs]
        wanted.append(reference(expected, shifted, targets, loss_fn=loss_fn, step=step).loss)
        optimizer.step()
        optimizer.zero_grad()
    assert losses == pytest.approx(wanted, rel=10 * model.tolerance)
