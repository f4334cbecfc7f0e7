"""Gradients of tied copies: cut, added, put back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rrfp.compute.gradients.layout import ABSENT
from rrfp.compute.gradients.ties import Pieces, ProcessTies, Tie
from rrfp.errors import StageError

TIE = Tie("it", (0, 1, 2))


def one(parameter: nn.Parameter) -> nn.Module:
    module = nn.Module()
    module.weight = parameter
    return module


def ranks(parameters: list[nn.Parameter], most_bytes: int = 1 << 20) -> list[Any]:
    """The tied gradients of each rank; every rank has one virtual stage."""
    tied = [ProcessTies({"it": parameter}, [{v: one(parameter)}]).ranks[0] for v, parameter in enumerate(parameters)]
    for each in tied:
        each.agree([TIE], most_bytes)
    return tied


def parameter(gradient: Tensor | None, like: Tensor | None = None) -> nn.Parameter:
    shape = gradient if like is None else like
    assert shape is not None
    made = nn.Parameter(torch.zeros_like(shape))
    made.grad = gradient
    return made


def through(tied: list[Any]) -> None:
    """Sum the tie, as ranks do."""
    first, *others = tied
    total = first.add("it", {v: rank.pieces("it", v) for v, rank in enumerate(tied) if v})
    for rank in others:
        rank.put("it", total)


@pytest.mark.parametrize("most_bytes", [4, 20, 1 << 20])
@pytest.mark.parametrize(
    "shape_it", [lambda x: x, lambda x: x.t(), lambda x: x[:, ::2]], ids=["dense", "transposed", "strided"]
)
def test_all_copies_get_the_sum_in_place_however_it_lies_in_memory(shape_it: Any, most_bytes: int) -> None:
    full = [shape_it(torch.randn(4, 6)) for _ in range(3)]
    expected = (full[0] + full[1]) + full[2]
    parameters = [parameter(gradient) for gradient in full]
    through(ranks(parameters, most_bytes))
    assert all(torch.equal(each.grad, expected) for each in parameters if each.grad is not None)
    assert all(each.grad is gradient for each, gradient in zip(parameters, full, strict=True)), "the same tensors"


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,)])
def test_any_shape_travels(shape: tuple[int, ...]) -> None:
    parameters = [parameter(torch.full(shape, float(v))) for v in range(3)]
    through(ranks(parameters, 8))
    assert all(torch.equal(each.grad, torch.full(shape, 3.0)) for each in parameters if each.grad is not None)


@pytest.mark.parametrize("present", [(0,), (1,), (2,), (0, 2), (1, 2), ()])
def test_gradients_that_are_absent_count_for_nothing(present: tuple[int, ...]) -> None:
    like = torch.zeros(3)
    parameters = [parameter(torch.full((3,), 2.0**v) if v in present else None, like) for v in range(3)]
    tied = ranks(parameters)
    assert [rank.pieces("it", v).layout != ABSENT for v, rank in enumerate(tied)] == [v in present for v in range(3)]
    through(tied)
    for each in parameters:
        if not present:
            assert each.grad is None
        else:
            assert each.grad is not None
            assert each.grad.tolist() == [sum(2.0**v for v in present)] * 3


def test_what_was_summed_is_zero_everywhere_but_on_the_first_copy_when_the_next_step_begins() -> None:
    parameters = [parameter(torch.ones(2)) for _ in range(3)]
    tied = ranks(parameters)
    for _ in range(2):  # nothing is added in the second step
        through(tied)
        assert [each.grad.tolist() for each in parameters if each.grad is not None] == [[3.0, 3.0]] * 3
        for rank in tied:
            rank.open()
        assert [each.grad.tolist() for each in parameters if each.grad is not None] == [[3.0] * 2, [0.0] * 2, [0.0] * 2]


def test_gradients_of_several_dtypes_or_sizes_are_refused() -> None:
    parameters = [parameter(torch.ones(2)) for _ in range(3)]
    first = ranks(parameters)[0]
    others = {v: Pieces(first.pieces("it", 0).layout, True, (torch.ones(2),)) for v in (1, 2)}
    for odd in (Pieces(others[1].layout + 1, True, (torch.ones(2),)), Pieces(others[1].layout, True, (torch.ones(3),))):
        with pytest.raises(StageError, match="tie 'it' has gradients of different dtypes or placements"):
            first.add("it", {**others, 2: odd})


def test_a_sparse_gradient_is_refused_by_name() -> None:
    weight = parameter(torch.ones(2, 2).to_sparse(), torch.zeros(2, 2))
    with pytest.raises(StageError, match=r"tie 'it' on virtual stage 1 has a gradient of layout torch.sparse_coo"):
        ranks([parameter(torch.ones(2, 2)), weight, parameter(torch.ones(2, 2))])[1].pieces("it", 1)


@pytest.fixture
def alone(tmp_path: Any) -> Iterator[None]:
    """This process is a job of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_of_sharded_gradients_this_ranks_parts_are_added(alone: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (1,))

    def sharded(value: float) -> DTensor:
        return DTensor.from_local(torch.full((2, 3), value), mesh, [Shard(0)], run_check=False)

    parameters = [nn.Parameter(sharded(0.0)) for _ in range(3)]
    parameters[0].grad, parameters[2].grad = sharded(1.0), sharded(2.0)
    tied = ranks(parameters, 8)
    settings = [ProcessTies({"it": p}, [{0: one(p)}]).ranks[0] for p in parameters]
    for rank in settings:
        rank.read()
    assert settings[0].settings == settings[1].settings
    assert "S(0)" in settings[0].settings[0].kind
    through(tied)
    for each in parameters:
        assert isinstance(each.grad, DTensor)
        assert each.grad.placements == (Shard(0),)
        assert torch.equal(each.grad.to_local(), torch.full((2, 3), 3.0))


@pytest.mark.parametrize("is_named", [False, True])
def test_an_object_is_a_guest_on_all_virtual_stages_but_its_first(is_named: bool) -> None:
    weight = nn.Parameter(torch.zeros(2))
    ties = {"it": weight} if is_named else {}
    (tied,) = ProcessTies(ties, [{v: one(weight) for v in (5, 1, 3)}]).ranks
    tied.read()
    assert [(copy.virtual_stage, copy.is_guest) for copy in tied.settings] == [(1, False), (3, True), (5, True)]
