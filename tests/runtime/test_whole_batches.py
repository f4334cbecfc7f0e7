"""Whole batches in place of lists: cut along dimension 0, weighted by rows, and refused where that means nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from graphs.graph_models import model
from runtime.ranks import ThreadedRanks
from runtime.toys import TOLERANCE, WIDTH, expect, largest_difference, loss_fn, stages
from torch import Tensor, nn

import rrfp
from rrfp.errors import ConfigError
from rrfp.model.tasks import Mode
from rrfp.runtime.steps.plan import StepPlanner, StepRequest


class Pair(NamedTuple):
    """A whole batch of two tensors."""

    x: Tensor
    y: Tensor


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Seen(nn.Module):
    """Remembers what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls.append((args, kwargs))
        return torch.zeros(1)


def calls(inputs: Any, **arguments: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """What the first stage is called with, by microbatch."""
    seen = Seen()
    with rrfp.local([seen], hint="gpipe") as pipe:
        pipe.evaluate(inputs, **arguments)
    return seen.calls


@pytest.mark.parametrize("call", ["step", "evaluate"])
@pytest.mark.parametrize("count", [1, 4, 5])
def test_a_cut_batch_equals_its_pieces_in_lists_with_their_rows_as_weights(call: str, count: int) -> None:
    x, y = rows(10), rows(10, seed=1)
    pieces = [piece.shape[0] for piece in x.tensor_split(count)]
    results, models = [], [stages(2), stages(2)]
    for modules, batch in zip(
        models,
        (
            {"inputs": x, "targets": y, "microbatches": count},
            {"inputs": [*x.tensor_split(count)], "targets": [*y.tensor_split(count)], "weights": pieces},
        ),
        strict=True,
    ):
        with rrfp.local(modules, loss_fn=loss_fn, deterministic=True) as pipe:
            results.append(getattr(pipe, call)(**batch))
    assert results[0].losses == results[1].losses
    assert results[0].loss == pytest.approx(results[1].loss, rel=TOLERANCE)
    if call == "step":
        assert largest_difference(*models) < TOLERANCE


def test_a_batch_that_does_not_divide_has_the_mean_loss_of_the_whole() -> None:
    x, y = rows(10), rows(10, seed=1)
    actual, whole = stages(2, dropout=0.0), stages(2, dropout=0.0)
    with rrfp.local(actual, loss_fn=loss_fn) as pipe:
        result = pipe.step(x, y, microbatches=4)
    loss = loss_fn(nn.Sequential(*whole)(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    assert result.microbatches == 4
    assert result.loss == pytest.approx(loss.item(), rel=TOLERANCE)
    assert largest_difference(actual, whole) < TOLERANCE


def test_own_weights_and_a_sum_are_left_alone() -> None:
    x, y = rows(5), rows(5, seed=1)
    for options, arguments in (({}, {"weights": [1.0, 1.0]}), ({"reduction": "sum"}, {})):
        with rrfp.local(stages(1, dropout=0.0), loss_fn=loss_fn, **options) as pipe:  # type: ignore[arg-type]
            result = pipe.step(x, y, microbatches=2, **arguments)  # type: ignore[arg-type]
        assert result.loss == pytest.approx(sum(result.losses) / (1 if options else 2))


def test_each_rank_cuts_what_it_has() -> None:
    x, y = rows(7), rows(7, seed=1)

    def body(rank: int, pipe: Any) -> Any:
        batch = ({"inputs": x}, {}, {"targets": y})[rank]
        return pipe.step(**batch, microbatches=3).loss

    modules, whole = stages(3, dropout=0.0), stages(3, dropout=0.0)
    losses = [outcome.value for outcome in ThreadedRanks(modules, body).join()]
    assert losses == pytest.approx([loss_fn(nn.Sequential(*whole)(x), y).item()] * 3)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_a_replica_counts_by_its_microbatches_whether_it_cuts_or_not(count: int) -> None:
    plan = StepPlanner(is_shared=True).plan(StepRequest(Mode.TRAIN, rows(7), rows(7), microbatches=count))
    assert plan.total_weight == pytest.approx(count)


def test_dicts_and_tuples_are_cut_entry_by_entry() -> None:
    x, mask = rows(6), rows(6, seed=1)
    halves = [(x[:3], mask[:3]), (x[3:], mask[3:])]

    def equal(actual: Any, expected: Any) -> bool:
        return all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))

    by_name = calls({"x": x, "mask": mask, "cache": None}, microbatches=2)
    for (args, kwargs), half in zip(by_name, halves, strict=True):
        assert (args, list(kwargs), kwargs.pop("cache")) == ((), ["x", "mask", "cache"], None)
        assert equal(kwargs.values(), half)
    for (args, _), half in zip(calls(Pair(x, mask), microbatches=2), halves, strict=True):
        assert type(args[0]) is Pair
        assert equal(args[0], half)
    thirds = calls((x, {"deep": (mask,)}), microbatches=3)
    assert equal([call[0][0] for call in thirds], x.tensor_split(3))
    assert equal([call[0][1]["deep"][0] for call in thirds], mask.tensor_split(3))


@pytest.mark.parametrize("keys", ["all", "stage"])
def test_keyword_arguments_are_cut_too(keys: str) -> None:
    x, mask = rows(4), rows(4, seed=1)
    kwargs: Any = {"mask": mask} if keys == "all" else {0: {"mask": mask}}
    own = calls(x, kwargs=kwargs, microbatches=2)
    assert [call[1]["mask"].shape[0] for call in own] == [2, 2]
    assert torch.equal(torch.cat([call[1]["mask"] for call in own]), mask)


def test_a_tuple_of_m_microbatches_that_are_no_tensors_stays_a_list() -> None:
    x = rows(4)
    own = calls(({"x": x[:3]}, {"x": x[3:]}), microbatches=2)
    assert [call[1]["x"].shape[0] for call in own] == [3, 1]


def test_the_inputs_and_losses_of_a_graph_are_cut_by_part() -> None:
    own = model("several_losses")
    whole: dict[str, Any] = {
        field: {part: torch.cat(list(each)) for part, each in getattr(own, field).items()}
        for field in ("inputs", "targets")
    }
    with rrfp.local(own.by_stage(), graph=own.graph, loss_fn=own.loss_fn, deterministic=True) as pipe:
        assert pipe.step(**whole, microbatches=4).losses == pipe.step(own.inputs, own.targets).losses


X = rows(4)
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"inputs": rows(3), "targets": rows(3)},
        "inputs has 3 rows (dimension 0), must have one or more for each of 4 microbatches",
    ),
    ({"targets": rows(5)}, "inputs has 4 rows (dimension 0) and targets 5: must be the same, as whole batches"),
    ({"inputs": {"x": X, "y": [1, 2]}}, "inputs['y'] is of type list, must be a tensor or None in a whole batch"),
    ({"inputs": (X, (X, "a"))}, "inputs[1][1] is of type str, must be a tensor or None"),
    ({"inputs": Pair(X, torch.zeros(()))}, "inputs.y is a scalar, which cannot be cut along dimension 0"),
    ({"inputs": {"x": None}, "targets": None}, "a whole batch must hold a tensor, to be cut into 4 microbatches"),
    (
        {"inputs": torch.nested.nested_tensor([X, X], layout=torch.jagged)},
        "inputs is a nested tensor, which cannot be cut",
    ),
    ({"inputs": X.to_sparse()}, "inputs is a tensor of layout torch.sparse_coo, which cannot be cut"),
    ({"inputs": (X,) * 4}, "must be list(inputs) if each is a microbatch, or list(zip(*(x.tensor_split(4) for x in "),
    ({"targets": [X[:2], X[2:]]}, "differs between arguments (microbatches: 4, inputs: 4, targets: 2)"),
    ({"microbatches": 0}, "microbatches is 0, must be a whole number 1..1000000"),
    ({"microbatches": 2.0}, "microbatches is 2.0, must be a whole number"),
    ({"kwargs": {"mask": rows(5)}}, "inputs has 4 rows (dimension 0) and kwargs['mask'] 5"),
    (
        {"inputs": {"x": torch.ones(WIDTH, requires_grad=True) * X}},
        "inputs['x'] was computed with gradients (MulBackward0), must be detached in a whole batch: its microbatches",
    ),
]


def test_what_was_computed_with_gradients_may_be_evaluated_and_a_leaf_gets_its_gradient() -> None:
    leaf = X.clone().requires_grad_()
    with rrfp.local(stages(1), loss_fn=loss_fn) as pipe:
        known = pipe.evaluate(2 * leaf, X, microbatches=4).loss
        assert known == pipe.evaluate(2 * X, X, microbatches=4).loss
        pipe.step(leaf, X, microbatches=4)
        assert leaf.grad is not None
        pipe.step(2 * leaf, X, microbatches=1)


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_what_cannot_be_cut_is_named(change: dict[str, Any], message: str) -> None:
    modules, reference = stages(1), stages(1)
    with rrfp.local(modules, loss_fn=loss_fn) as pipe:
        with pytest.raises(ConfigError) as caught:
            pipe.step(**{"inputs": X, "targets": X, "microbatches": 4, **change})
        assert message in str(caught.value)
        pipe.step([X], [X])
    batch: Any = type("Batch", (), {"inputs": [X], "targets": [X]})
    expect(reference, batch)
    assert largest_difference(modules, reference) < TOLERANCE
