"""The hints of our own research through the real runtime: the order by sizes, and the defaults."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from runtime.toys import TOLERANCE, data, expect, largest_difference, loss_fn, stages

import rrfp
from rrfp.core.tasks import Kind, Mode
from rrfp.hints.pyramid import pyramids
from rrfp.runtime.batching import plan_step


@pytest.mark.parametrize("hint", ["slot-aware-pyramid", "bfw-pyramid"])
def test_pyramids_change_the_order_and_neither_gradients_nor_losses(hint: str) -> None:
    actual, expected, batch = stages(3), stages(3), data(7)
    sizes = [3.0, 1.0, 4.0, 1.5, 5.0, 9.0, 2.0]
    with rrfp.local(actual, loss_fn=loss_fn, hint=hint, split=True, limit="1f1b").blocking() as pipe:
        result = pipe.step(batch.inputs, batch.targets, sizes=sizes)
    wanted = expect(expected, batch)
    assert largest_difference(actual, expected) < TOLERANCE
    assert result.losses == pytest.approx(wanted.losses, rel=TOLERANCE)
    assert all(held <= most for held, most in zip(result.peak_held, (3, 2, 1), strict=True))
    forwards = [span.task for span in result.trace.tasks if span.stage == 0 and span.task.kind is Kind.F]
    assert [task.microbatch for task in forwards] == pyramids(sizes, 12)


def test_a_size_may_be_a_number_of_numpy_or_a_tensor() -> None:
    sizes: Any = [7, 1.5, np.int64(3), torch.tensor(4), 0]
    plan = plan_step(0, Mode.TRAIN, "mean", sizes=sizes)
    assert plan.sizes == (7.0, 1.5, 3.0, 4.0, 0.0)


@pytest.mark.parametrize("size", [-1, math.nan, math.inf, None, "many", torch.ones(2)])
def test_another_size_is_refused_by_its_microbatch(size: Any) -> None:
    with pytest.raises(rrfp.ConfigError, match=r"^sizes\[1\] is .*, must be a finite number >= 0$"):
        plan_step(0, Mode.TRAIN, "mean", sizes=[1, size])


def test_the_defaults_run_a_step_without_sizes() -> None:
    actual, expected, batch = stages(3), stages(3), data(7)
    with rrfp.local(actual, loss_fn=loss_fn).blocking() as pipe:
        result = pipe.step(batch.inputs, batch.targets)
    wanted = expect(expected, batch)
    assert largest_difference(actual, expected) < TOLERANCE
    assert result.losses == pytest.approx(wanted.losses, rel=TOLERANCE)
