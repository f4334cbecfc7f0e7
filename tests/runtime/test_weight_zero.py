"""Microbatches of weight 0: padding, answers without tokens. Nothing of them is in losses or gradients."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from runtime.ranks import ThreadedRanks
from runtime.toys import WIDTH, Bomb, Ones, data, largest_difference, same_bits, stages
from torch import Tensor, nn

import rrfp
from rrfp.compute.split import backward as split_backward
from rrfp.model.mesh import Mesh
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.testing.reference import reference

TOLERANCE = 1e-12
#: Two of five microbatches have no tokens; the last one's activations are no numbers either.
WEIGHTS = [2.0, 0.0, 1.0, 3.0, 0.0]
EMPTY = [m for m, weight in enumerate(WEIGHTS) if weight == 0]


@pytest.fixture(autouse=True)
def everything_is_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of these sizes would not be."""
    monkeypatch.setattr(split_backward, "MIN_FLOPS", 0.0)


def per_token(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """A mean over the tokens of a mask: 0 / 0 where it is empty, and so is its gradient."""
    values, mask = target
    return ((output - values).square() * mask).sum() / mask.sum()


def batch() -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    drawn = data(len(WEIGHTS), ragged=False)
    drawn.inputs[-1][0, 0] = math.nan
    masks = [torch.zeros(2, WIDTH) if weight == 0 else torch.ones(2, WIDTH) for weight in WEIGHTS]
    return drawn.inputs, list(zip(drawn.targets, masks, strict=True))


def without(values: Sequence[Any]) -> list[Any]:
    return [value for m, value in enumerate(values) if m not in EMPTY]


def plain_loop(modules: Sequence[nn.Module], factors: Mapping[int, float]) -> float:
    """Autograd alone, over the microbatches that have a factor; adds gradients and returns the loss."""
    inputs, targets = batch()
    total = 0.0
    for m, factor in factors.items():
        loss = factor * per_token(nn.Sequential(*modules)(inputs[m]), targets[m])
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_they_are_left_out_of_loss_and_gradients(count: int, split: bool, deterministic: bool, reduction: Any) -> None:
    ours, theirs, plain = (stages(count, dropout=0.0) for _ in range(3))
    options: Any = {"loss_fn": per_token, "reduction": reduction}
    with rrfp.local(ours, split=split, deterministic=deterministic, **options).blocking() as pipe:
        results = [pipe.step(*batch(), weights=WEIGHTS) for _ in range(2)]
    normaliser = sum(WEIGHTS) if reduction == "mean" else 1.0
    for result in results:
        wanted = reference(theirs, *batch(), weights=WEIGHTS, **options)
        loss = plain_loop(plain, {m: WEIGHTS[m] / normaliser for m in range(len(WEIGHTS)) if m not in EMPTY})
        assert result.loss == wanted.loss == pytest.approx(loss, rel=TOLERANCE)
        assert [m for m, one in enumerate(result.losses) if math.isnan(one)] == EMPTY, "each tells its own"
    assert largest_difference(ours, plain) < TOLERANCE
    assert not deterministic or same_bits(ours, theirs)


def test_where_all_have_weight_0_a_sum_is_0_and_there_are_no_gradients() -> None:
    ours, theirs = stages(2), stages(2)
    options: Any = {"loss_fn": per_token, "reduction": "sum"}
    with rrfp.local(ours, **options).blocking() as pipe:
        assert pipe.step(*batch(), weights=[0.0] * len(WEIGHTS)).loss == 0.0
    assert reference(theirs, *batch(), weights=[0.0] * len(WEIGHTS), **options).loss == 0.0
    assert all(p.grad is None for module in (*ours, *theirs) for p in module.parameters())


def test_an_evaluation_leaves_them_out_too() -> None:
    modules = stages(2, dropout=0.0)
    with rrfp.local(modules, loss_fn=per_token).blocking() as pipe:
        result = pipe.evaluate(*batch(), weights=WEIGHTS)
    inputs, targets = (without(values) for values in batch())
    with torch.no_grad():
        wanted = reference(modules, inputs, targets, loss_fn=per_token, weights=without(WEIGHTS))
    assert result.loss == wanted.loss


class Given(Ones):
    """Losses of the test's choice."""

    def __init__(self, given: Mapping[int, float]) -> None:
        self._given = given

    def losses(self) -> Mapping[int, float]:
        return self._given


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("training", [False, True])
def test_a_replica_that_has_only_such_adds_nothing(training: bool, reduction: str) -> None:
    mesh = Mesh((("pp", 1), ("dp", 2)))
    losses = [{0: 2.0, 1: math.nan}, {0: math.nan, 1: math.inf}]

    def body(rank: int, pipe: BlockingPipeline) -> Any:
        weights = [4.0, 0.0] if rank == 0 else [0.0, 0.0]
        return pipe.step(weights=weights) if training else pipe.evaluate(weights=weights)

    outcomes = ThreadedRanks([Given(each) for each in losses], body, mesh=mesh, reduction=reduction).join()
    assert [outcome.value.loss for outcome in outcomes] == [2.0 if reduction == "mean" else 8.0] * 2


DP = Mesh((("pp", 1), ("dp", 2)), coordinate=("dp",))
TP = Mesh((("pp", 1), ("tp", 2)))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("mesh", "backwards"), [(DP, 3), (TP, 2), (Mesh((("pp", 2),)), 2)], ids=["dp", "tp", "pp"])
def test_they_are_differentiated_only_where_ranks_of_a_group_have_data_of_their_own(
    mesh: Mesh, backwards: int, split: bool
) -> None:
    """Then the weights may differ between the ranks, and each backward may hold a collective. No loss is entered."""
    ran: list[list[int]] = [[], []]
    modules: list[Any] = [nn.Sequential(stages(1)[0], Bomb(on_backward=numbers.append)) for numbers in ran]

    def loss_fn(output: Tensor, target: float) -> Tensor:
        return output.sum() * target

    def body(rank: int, pipe: BlockingPipeline) -> Any:
        return pipe.step(data(3).inputs, [1.0, math.nan, 1.0], weights=[1, 0, 2]).loss

    outcomes = ThreadedRanks(modules, body, mesh=mesh, loss_fn=loss_fn, split=split).join()
    assert [outcome.error for outcome in outcomes] == [None] * 2
    assert [len(numbers) for numbers in ran] == [backwards] * 2
    assert all(math.isfinite(outcome.value) for outcome in outcomes)
    for module in modules:
        assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


# The warning about losses that are no numbers.


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "the loss of microbatch" in message]


@pytest.mark.parametrize("training", [True, False])
def test_the_first_loss_that_is_no_number_is_told_once(caplog: pytest.LogCaptureFixture, training: bool) -> None:
    caplog.set_level(logging.WARNING)

    def loss_fn(output: Tensor, target: float) -> Tensor:
        return output.sum() * target

    modules, inputs = stages(2), data(3).inputs
    with rrfp.local(modules, loss_fn=loss_fn).blocking() as pipe:
        call = pipe.step if training else pipe.evaluate
        call(inputs, [1.0, math.nan, 1.0], weights=[1, 0, 1])
        assert warnings_of(caplog) == []
        assert math.isnan(call(inputs, [1.0, 1.0, math.nan]).loss or 0.0)
        call(inputs, [math.inf, math.inf, 1.0])
    step = "training step 1" if training else "an evaluation before step 0"
    assert warnings_of(caplog) == [f"stage 1: the loss of microbatch 2 is nan in {step}; later losses are not checked"]


def test_it_is_told_by_one_rank(caplog: pytest.LogCaptureFixture) -> None:
    """The leader of the last stage; a replica tells of its own microbatches, and says where it is."""
    caplog.set_level(logging.WARNING)
    mesh = Mesh((("dp", 2), ("pp", 2), ("tp", 2)))
    losses = [{}, {}, {0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0}, {}, {}, {0: 1.0, 1: math.inf}, {0: 1.0, 1: math.inf}]

    def body(rank: int, pipe: BlockingPipeline) -> Any:
        return pipe.step(microbatches=2)

    outcomes = ThreadedRanks([Given(each) for each in losses], body, mesh=mesh).join()
    assert [outcome.error for outcome in outcomes] == [None] * 8
    assert warnings_of(caplog) == [
        "stage 1, dp 1, tp 0 (rank 6): the loss of microbatch 1 is inf in training step 0; later losses are not checked"
    ]
