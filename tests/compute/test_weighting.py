"""Weights, reductions, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rrfp.compute.loss import combine_losses, gradient_weights
from rrfp.errors import ConfigError


def test_factors() -> None:
    assert gradient_weights(None, 4) == (0.25,) * 4
    assert gradient_weights(None, 2, "sum") == (1.0, 1.0)
    assert gradient_weights([1, 3], 2) == (0.25, 0.75)
    assert gradient_weights([1, 3], 2, "sum", grad_scale=2.0) == (2.0, 6.0)
    assert gradient_weights([0, 2], 2, grad_scale=0.5) == (0.0, 0.5)


def test_loss() -> None:
    assert combine_losses([1.0, 2.0]) == 1.5
    assert combine_losses([1.0, 2.0], [1, 3]) == 1.75
    assert combine_losses([1.0, 2.0], [1, 3], "sum") == 7.0
    assert math.isnan(combine_losses([math.nan, 2.0]))


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_of_weight_0_is_left_out(loss: float) -> None:
    assert combine_losses([loss, 2.0, 4.0], [0, 1, 3]) == 3.5
    assert combine_losses([2.0, loss], [2, 0.0], "sum") == 4.0
    assert combine_losses([loss], [0.0], "sum") == 0.0


@pytest.mark.parametrize(
    ("weights", "count", "reduction", "scale", "message"),
    [
        (None, 0, "mean", 1.0, "microbatches is 0"),
        ([1.0, "two"], 2, "mean", 1.0, r"weights\[1\] is 'two', must be a finite number >= 0"),
        ([1.0], 2, "mean", 1.0, "weights has length 1, must have 2"),
        ([1.0, 1.0, 1.0], 2, "mean", 1.0, "weights has length 3, must have 2"),
        ([1.0, -1.0], 2, "sum", 1.0, r"weights\[1\] is -1.0"),
        ([math.inf], 1, "mean", 1.0, r"weights\[0\] is inf"),
        ([math.nan], 1, "sum", 1.0, r"weights\[0\] is nan"),
        ([0.0, 0.0], 2, "mean", 1.0, "weights sum to 0.0"),
        (None, 1, "median", 1.0, "reduction is 'median', must be one of: mean, sum"),
        (None, 1, "mean", math.nan, "grad_scale is nan"),
        (None, 1, "mean", "x", "grad_scale is 'x', must be a finite number"),
    ],
)
def test_refusals(weights: Any, count: int, reduction: str, scale: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gradient_weights(weights, count, reduction, scale)


def test_all_weights_zero_is_a_sum_of_zero() -> None:
    assert gradient_weights([0.0], 1, "sum") == (0.0,)
    assert combine_losses([3.0], [0.0], "sum") == 0.0
