"""Gradients and losses of whole pipelines against the one-process reference."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from batches import examples
from hypothesis import given
from hypothesis import strategies as st
from runtime.toys import TOLERANCE, data, expect, largest_difference, loss_fn, stages
from torch import nn
from transports.reordering import reordered

import rrfp
from rrfp.transports.inproc import InprocTransport

POLICIES: list[dict[str, Any]] = [
    *({"hint": name} for name in ("bf", "fb", "b-priority", "f-priority", "gpipe", "1f1b")),
    *({"hint": "bfw", "split": split} for split in (False, True)),
    *({"strict": name} for name in ("gpipe", "1f1b")),
]


@pytest.mark.every_other
@pytest.mark.parametrize("reduction", ["mean", "sum", "tokens"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_gradients_of_accumulated_steps_are_the_references(count: int, policy: dict[str, Any], reduction: str) -> None:
    """Two steps of every M into the same gradients, with dropout and ragged microbatches."""
    actual, expected = stages(count), stages(count)
    how: Any = {"reduction": "sum" if reduction == "sum" else "mean"}
    number = 0
    with rrfp.local(actual, loss_fn=loss_fn, **how, **policy).blocking() as pipe:
        for microbatches in (1, 3, 8):
            for module in (*actual, *expected):
                module.zero_grad()
            for _ in range(2):
                batch = data(microbatches, seed=number)
                weights = batch.lengths if reduction == "tokens" else None
                result = pipe.step(batch.inputs, batch.targets, weights=weights)
                wanted = expect(expected, batch, weights=weights, step=number, **how)
                assert result.losses == pytest.approx(wanted.losses, rel=TOLERANCE)
                assert result.loss == pytest.approx(wanted.loss, rel=TOLERANCE)
                number += 1
            assert largest_difference(actual, expected) < TOLERANCE


@pytest.mark.parametrize("limit", [1, 2, "1f1b", "2n"])
def test_gradients_do_not_depend_on_the_limit_and_the_limit_is_kept(limit: int | str) -> None:
    actual, expected, batch = stages(3), stages(3), data(7)
    with rrfp.local(actual, loss_fn=loss_fn, limit=limit, hint="f-priority").blocking() as pipe:
        result = pipe.step(batch.inputs, batch.targets, grad_scale=2.0)
    expect(expected, batch, grad_scale=2.0)
    assert largest_difference(actual, expected) < TOLERANCE
    allowed = {1: (1, 1, 1), 2: (2, 2, 2), "1f1b": (3, 2, 1), "2n": (6, 6, 6)}[limit]
    assert all(held <= most for held, most in zip(result.peak_held, allowed, strict=True))


def test_dropout_follows_torchs_seed_where_seed_is_none() -> None:
    """As if that seed had been passed: numbers that torch has drawn since do not matter."""

    def losses(torch_seed: int, **options: Any) -> list[float]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_seed)
            torch.rand(torch_seed)
            with rrfp.local(stages(2), loss_fn=loss_fn, **options).blocking() as pipe:
                torch.manual_seed(99)
                return list(pipe.step(data(3).inputs, data(3).targets).losses)

    assert losses(5, seed=None) == losses(6, seed=5) != losses(6, seed=None)
    assert losses(5) == losses(6) == losses(5, seed=0)


class Branching(nn.Module):
    """Takes and returns a dict with a tensor that needs no gradient; `frozen` learns nothing."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6).double().requires_grad_(not frozen)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        return {"x": self.inner(x) * mask * scale, "mask": mask}


def test_dicts_masks_frozen_stages_and_keyword_arguments_travel() -> None:
    def build() -> list[nn.Module]:
        torch.manual_seed(3)
        return [Branching(frozen=True), Branching(frozen=False), Branching(frozen=True), Branching(frozen=False)]

    def masked_loss(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
        return loss_fn(output["x"], target)

    actual, expected, batch = build(), build(), data(5)
    inputs = [{"x": x, "mask": (x > 0).double()} for x in batch.inputs]
    kwargs = [{"scale": 1.0 + m} for m in range(5)]
    with rrfp.local(actual, loss_fn=masked_loss).blocking() as pipe:
        pipe.step(inputs, batch.targets, kwargs=kwargs)
    rrfp_grads = [p.grad for module in actual for p in module.parameters()]
    from rrfp.testing.reference import reference

    reference(expected, inputs, batch.targets, loss_fn=masked_loss, kwargs=kwargs)
    for grad, wanted in zip(rrfp_grads, (p.grad for module in expected for p in module.parameters()), strict=True):
        if wanted is None:
            assert grad is None
        else:
            torch.testing.assert_close(grad, wanted, rtol=TOLERANCE, atol=TOLERANCE)


@examples(40)
@given(
    choices=st.lists(st.integers(0, 11), min_size=1, max_size=60),
    count=st.sampled_from([2, 3, 4]),
    microbatches=st.integers(1, 5),
    policy=st.sampled_from(POLICIES),
    limit=st.sampled_from([None, 1, "1f1b"]),
)
def test_any_order_of_arrival_gives_the_same_gradients(
    choices: list[int], count: int, microbatches: int, policy: dict[str, Any], limit: Any
) -> None:
    """Messages overtake each other by what hypothesis draws, for two steps and an evaluation in between."""
    drawn = iter(choices * 200)
    actual, expected = stages(count), stages(count)
    if limit is not None and "strict" not in policy:
        policy = {**policy, "limit": limit}
    transport = reordered(InprocTransport, lambda among: next(drawn, 0) % among)
    with rrfp.local(actual, loss_fn=loss_fn, transport=transport, **policy).blocking() as pipe:
        for number in (0, 1):
            batch = data(microbatches, seed=number)
            pipe.step(batch.inputs, batch.targets)
            expect(expected, batch, step=number)
            if number == 0:
                pipe.evaluate(batch.inputs, batch.targets)
    assert largest_difference(actual, expected) < TOLERANCE


def test_many_steps_in_a_row_with_messages_that_run_ahead() -> None:
    """A message of the next step may be there before the last one has ended here: it is kept, not forgotten."""
    choices = random.Random(5)
    actual, expected = stages(4), stages(4)
    transport = reordered(InprocTransport, choices.randrange)
    with rrfp.local(actual, loss_fn=loss_fn, transport=transport).blocking() as pipe:
        for number in range(30):
            batch = data(2, seed=number)
            pipe.step(batch.inputs, batch.targets)
            expect(expected, batch, step=number)
    assert largest_difference(actual, expected) < 10 * TOLERANCE
