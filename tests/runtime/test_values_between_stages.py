"""Named tuples and sparse gradients through whole pipelines, as in one process."""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch
from runtime.toys import TOLERANCE, WIDTH, largest_difference
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import rrfp
from rrfp.testing.reference import reference


class Example(NamedTuple):
    x: Tensor
    scale: float


class State(NamedTuple):
    h: Tensor
    example: Example


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, example: Example) -> State:
        return State(self.linear(example.x), example)


class Last(First):
    def forward(self, state: State) -> State:  # type: ignore[override]
        return State(self.linear(state.h) * state.example.scale + state.example.x, state.example)


def loss_fn(output: State, target: Example) -> Tensor:
    return (output.h - target.x).square().mean() * target.scale


@pytest.mark.parametrize("transport", ["inproc", "zmq"])
def test_named_tuples_as_inputs_between_stages_as_outputs_and_as_targets(transport: str) -> None:
    actual = [First(), Last()]
    expected = copy.deepcopy(actual)
    batch = [Example(torch.randn(2, WIDTH, dtype=torch.float64), 1.0 + m) for m in range(3)]
    with rrfp.local(actual, loss_fn=loss_fn, transport=transport).blocking() as pipe:
        result = pipe.step(batch, batch)
        output = pipe.evaluate(batch).outputs[1]
    wanted = reference(expected, batch, batch, loss_fn=loss_fn)
    assert result.loss == pytest.approx(wanted.loss, rel=TOLERANCE)
    assert largest_difference(actual, expected) < TOLERANCE
    assert type(output) is type(wanted.outputs[1]) is State
    torch.testing.assert_close(output.h, wanted.outputs[1].h)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH).double()

    def forward(self, sequence: PackedSequence) -> PackedSequence:
        output: PackedSequence = self.lstm(sequence)[0]
        return output


def test_packed_sequences_between_stages() -> None:
    actual = [Recurrent(), Recurrent()]
    expected = copy.deepcopy(actual)
    lengths = [(3, 1), (2, 2), (4, 1)]
    batch = [pack_sequence([torch.randn(n, WIDTH, dtype=torch.float64) for n in pair]) for pair in lengths]

    def total(output: PackedSequence, target: PackedSequence) -> Tensor:
        return (output.data - target.data).square().mean()

    with rrfp.local(actual, loss_fn=total).blocking() as pipe:
        pipe.step(batch, batch)
    reference(expected, batch, batch, loss_fn=total)
    assert largest_difference(actual, expected) < TOLERANCE


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, WIDTH, dtype=torch.float64))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.weight * 2, rows


class Lookup(nn.Module):
    def forward(self, table: Tensor, rows: Tensor) -> Tensor:
        return nn.functional.embedding(rows, table, sparse=True)


@pytest.mark.parametrize("split", [False, True])
def test_the_sparse_gradient_of_a_received_table_travels_back_dense(split: bool) -> None:
    table, rows = Table(), [torch.tensor([0, 3]), torch.tensor([3])]
    with rrfp.local([table, Lookup()], loss_fn=lambda out, _: out.sum(), split=split).blocking() as pipe:
        pipe.step(rows, rows)
    assert table.weight.grad is not None
    assert table.weight.grad.sum(1).tolist() == [WIDTH * x for x in (1.0, 0.0, 0.0, 2.0, 0.0)]


class Measured(Tensor):
    """A tensor with a unit."""

    unit: str


@pytest.mark.parametrize("transport", ["inproc", "shm"])
def test_a_class_derived_from_tensor_is_refused_by_its_name_and_the_modules(transport: str) -> None:
    class Measuring(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"x": x, "length": x.norm().as_subclass(Measured)}

    batch = [torch.ones(2, WIDTH)]
    message = rf"Measuring on virtual stage 0: output\['length'\] is a {__name__}\.Measured, a class derived from torch"
    with (
        pytest.raises(rrfp.PipelineAborted, match=message),
        rrfp.local([Measuring(), nn.Identity()], transport=transport).blocking() as pipe,
    ):
        pipe.evaluate(batch)


def test_the_callers_inputs_and_the_last_output_may_be_of_any_class() -> None:
    class Plain(nn.Module):
        def forward(self, x: Measured) -> Tensor:
            assert type(x) is Measured
            return x.as_subclass(Tensor)

    class Last(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.as_subclass(Measured)

    with rrfp.local([Plain(), Last()]).blocking() as pipe:
        (output,) = pipe.evaluate([torch.ones(2).as_subclass(Measured)]).outputs.values()
    assert type(output) is Measured
