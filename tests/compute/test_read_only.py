"""Received tensors are read-only: a module that writes into one is found and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compute.stage_driver import FORWARD_2, TRAIN_2, Run, build, rows, total, train
from torch import Tensor, nn

from rrfp.compute.payload import Payload
from rrfp.compute.program import Batch
from rrfp.core.tasks import Kind, Mode, StepId, Task
from rrfp.errors import StageError


class Bump(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


@pytest.mark.parametrize("split", [False, True])
def test_a_write_into_a_received_tensor_that_requires_grad_names_the_submodule(split: bool) -> None:
    first = nn.Linear(4, 4)
    second = nn.Sequential(nn.Identity(), nn.Sequential(nn.ReLU(inplace=True)), nn.Linear(4, 4))
    with pytest.raises(StageError) as raised:
        train([first, second], rows(), rows(), total, split=split)
    assert str(raised.value).startswith(
        "Sequential on virtual stage 1 wrote in place into a received tensor, in its submodule '1.0' (ReLU); "
    )
    assert "x = x.clone()" in str(raised.value)


@pytest.mark.parametrize("mode", list(Mode))
def test_a_write_into_a_received_tensor_without_grad_names_the_tensor(mode: Mode) -> None:
    class Counter(nn.Module):
        def forward(self, x: Tensor, info: dict[str, Tensor]) -> Tensor:
            info["count"].add_(1)
            return x

    class Start(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return x, {"count": torch.zeros(1, dtype=torch.int64)}

    programs, graph = build([Start(), Counter()], total)
    run = Run(programs, graph, StepId(0, mode, 2), Batch(rows(), rows(), None, (1.0, 1.0)))
    with pytest.raises(StageError) as raised:
        run.finish()
    assert (
        "Counter on virtual stage 1 wrote into tensor [1]['count'] received from virtual stage 0 in its forward; "
        in str(raised.value)
    )


def test_suspect_submodules_are_listed() -> None:
    programs, graph = build([nn.Identity(), nn.Sequential(nn.ReLU(inplace=True))], total)
    run = Run(programs, graph, FORWARD_2, Batch(rows()))
    with pytest.raises(StageError, match=r"the tensor received .* submodules with inplace=True: '0' \(ReLU\)"):
        run.finish()


def test_a_write_between_forward_and_backward_is_found() -> None:
    class Keep(nn.Module):
        kept: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.kept = x
            return x * 2

    keep = Keep()
    programs, graph = build([nn.Linear(4, 4), keep], total)
    run = Run(programs, graph, TRAIN_2, Batch(rows(), rows(), None, (1.0, 1.0)))
    for v in (0, 1):
        run.execute(Task(Kind.F, 0, v))
    keep.kept.detach().zero_()
    with pytest.raises(
        StageError, match=r"Keep on virtual stage 1 wrote into the tensor received .* after its forward"
    ):
        run.execute(Task(Kind.B, 0, 1))


def test_a_write_into_a_received_gradient_is_found() -> None:
    class Spoil(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.mul_(2)

    class Spoiler(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Spoil.apply(x)  # type: ignore[no-untyped-call,no-any-return]

    modules = [nn.Sequential(nn.Linear(4, 4), Spoiler()), nn.Linear(4, 4)]
    with pytest.raises(StageError, match="wrote into tensor \\[0\\] of the output gradients from virtual stage 1"):
        train(modules, rows(), rows(), total)


def test_other_errors_of_a_module_come_through() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        train([nn.Linear(4, 5), nn.Linear(4, 4)], rows(), rows(), total)


def test_an_own_leaf_written_to_is_not_blamed_on_the_received_tensor() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight.add_(1)

    with pytest.raises(RuntimeError, match="leaf Variable"):
        train([nn.Identity(), Own()], rows(), rows(), total)


def test_torchs_own_check_of_saved_tensors_is_kept_while_measuring() -> None:
    """Saved-tensor hooks switch it off; without it the gradient would silently be wrong."""

    class Overwrite(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            z = y * 2
            y.detach().zero_()
            return z

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train([nn.Linear(4, 4), Overwrite()], rows(1), rows(1), total)  # the first microbatch is the measured one


def test_a_missing_gradient_of_an_output_is_named() -> None:
    programs, graph = build([nn.Linear(4, 4), nn.Identity()], total)
    run = Run(programs, graph, TRAIN_2, Batch(rows(), rows(), None, (1.0, 1.0)))
    run.execute(Task(Kind.F, 0, 0))
    with pytest.raises(StageError, match="0 gradients arrived, must be one for each tensor sent: 1"):
        programs[0].backward(Task(Kind.B, 0, 0), (Payload(),))


def test_a_keyword_given_twice_is_refused() -> None:
    programs, graph = build([nn.Identity()], total)
    run = Run(programs, graph, TRAIN_2, Batch([{"x": 1}] * 2, rows(), [{"x": 2}] * 2, (1.0, 1.0)))
    with pytest.raises(StageError, match="'x' is given twice"):
        run.execute(Task(Kind.F, 0, 0))
