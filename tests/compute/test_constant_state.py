"""State that tasks may write, or make, where results must not depend on the order of microbatches."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from compute.stage_driver import rows, total
from compute.written_state import IN_ORDER, ORDER, Checkpointed, Stage, assign, grow, run, write, write_data
from torch import Tensor, nn

from rrfp import Batch
from rrfp.compute.torch_stage import TorchStage
from rrfp.errors import StageError
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Mode, StepId, Task


def test_fixed_statistics_may_be_checkpointed() -> None:
    run(Checkpointed(nn.BatchNorm1d(4).eval()))
    run(Checkpointed(nn.BatchNorm1d(4, track_running_stats=False)))


def test_with_one_microbatch_there_is_one_order() -> None:
    run(Checkpointed(nn.BatchNorm1d(4)), "F0 B0", steps=2)
    run(Stage(assign), "F0 B0", steps=2)


def test_where_forwards_run_in_order_they_may_change_any_buffer() -> None:
    for act in (assign, write, write_data, grow):
        run(nn.Sequential(Stage(act), nn.BatchNorm1d(4)), IN_ORDER, steps=2)


def test_a_buffer_that_is_made_anew_with_the_same_values_is_a_constant() -> None:
    def again(module: Any, x: Tensor) -> None:
        module.state = torch.arange(4.0)

    run(Stage(again, torch.arange(4.0)), steps=2)


class Lazy(nn.Module):
    """Makes its mask when it first needs one."""

    def __init__(self, *, is_declared: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        if is_declared:
            self.register_buffer("mask", None)

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "mask", None) is None:
            self.register_buffer("mask", torch.ones(4, 4).tril(), persistent=False)
        output: Tensor = self.layer(x) @ self.get_buffer("mask")
        return output


@pytest.mark.parametrize("is_declared", [False, True])
def test_a_constant_that_is_made_when_it_is_first_needed_is_none_of_these(
    is_declared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning says for what it is taken, unless it was made by the microbatch that makes it in one process."""
    caplog.set_level(logging.WARNING)
    run(Lazy(is_declared=is_declared), IN_ORDER, steps=2)
    assert caplog.messages == []
    run(Lazy(is_declared=is_declared), ORDER, steps=2)
    assert caplog.messages == [
        "Lazy on virtual stage 0 made its buffer 'mask' in F1@0, out of microbatch order: deterministic=True takes it "
        "for a constant; if it depends on the microbatch, make it before the first step"
    ]


def test_what_the_caller_writes_between_steps_is_the_callers() -> None:
    module = Stage(lambda *_: None)
    program = TorchStage({0: module}, TaskGraph.chain(1), loss_fn=total, in_order={(Kind.B, 0)})
    for number in range(2):
        program.open(StepId(number, Mode.TRAIN, 2), Batch(rows(), rows(), None, (1.0, 1.0)))
        for m in (1, 0):
            program.forward(Task(Kind.F, m, 0), ())
        for m in (0, 1):
            program.backward(Task(Kind.B, m, 0), ())
        with torch.no_grad():
            module.layer.weight.mul_(0.5)
            assign(module, torch.ones(3, 4))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_of_every_kind_can_be_watched() -> None:
    buffers = {
        "brief": torch.ones(2, dtype=torch.bfloat16),
        "flags": torch.ones(2, dtype=torch.bool),
        "turns": torch.ones(2, dtype=torch.complex64).conj(),
        "eighth": torch.ones(2).to(torch.float8_e4m3fn),
        "rows": torch.eye(2).to_sparse(),
        "none": torch.ones(0),
        "one": torch.tensor(1),
        "wide": torch.ones(1).expand(5),
        "meta": torch.ones(2, device="meta"),
        "ragged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "mirrored": torch.ones(1, dtype=torch.complex64).conj().imag,
    }
    module = Stage(lambda *_: None)
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer)
    with torch.inference_mode():
        module.register_buffer("inferred", torch.ones(2))
    run(module, steps=2)

    def turn(one: nn.Module, _: object) -> None:
        one.get_buffer("turns").mul_(2)

    module.register_forward_pre_hook(turn)
    with pytest.raises(StageError, match="writes its buffer 'turns'"):
        run(module)
