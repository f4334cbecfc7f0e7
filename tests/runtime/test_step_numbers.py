"""Training steps are counted apart from evaluations, and random numbers depend on the training step alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from runtime.toys import data, loss_fn, same_bits, stages
from torch import nn

import rrfp
from rrfp.model.tasks import Mode


def train(modules: Sequence[nn.Module], steps: range, evaluations: int = 0, **options: int) -> list[float | None]:
    """The losses of steps without an optimizer: dropout alone makes equal batches differ."""
    batch, losses = data(4), []
    with rrfp.local(list(modules), loss_fn=loss_fn, deterministic=True, **options).blocking() as pipe:  # type: ignore[arg-type]
        for number in steps:
            result = pipe.step(batch.inputs, batch.targets)
            assert (result.step, result.mode, result.microbatches) == (number, Mode.TRAIN, 4)
            losses.append(result.loss)
            for _ in range(evaluations):
                scored = pipe.evaluate(batch.inputs, batch.targets)
                assert (scored.step, scored.mode) == (number + 1, Mode.FORWARD)
    return losses


@pytest.mark.parametrize("evaluations", [1, 3])
def test_evaluations_between_training_steps_change_nothing(evaluations: int) -> None:
    plain, evaluated = stages(2), stages(2)
    losses = train(plain, range(4))
    assert len(set(losses)) == 4, "dropout differs from step to step"
    assert train(evaluated, range(4), evaluations) == losses
    assert same_bits(plain, evaluated)


def test_a_resumed_run_draws_what_the_whole_run_would_have_drawn() -> None:
    whole, resumed = stages(2), stages(2)
    losses = train(whole, range(4), 1)
    assert [*train(resumed, range(2)), *train(resumed, range(2, 4), first_step=2)] == losses
    assert same_bits(whole, resumed)


def test_an_evaluation_draws_the_same_numbers_until_the_next_training_step() -> None:
    batch = data(4)
    with rrfp.local(stages(2), loss_fn=loss_fn).blocking() as pipe:
        before = [pipe.evaluate(batch.inputs, batch.targets).losses for _ in range(2)]
        first = pipe.step(batch.inputs, batch.targets)
        after = pipe.evaluate(batch.inputs, batch.targets).losses
    assert before == [first.losses] * 2
    assert after != first.losses
