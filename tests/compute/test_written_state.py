"""State that tasks write where results must not depend on the order of microbatches: what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compute.stage_driver import rows, total
from compute.written_state import (
    IN_ORDER,
    ORDER,
    SPLIT,
    Checkpointed,
    Stage,
    assign,
    drop,
    grow,
    normalise,
    run,
    write,
    write_data,
)
from torch import Tensor, nn

from rrfp import Batch
from rrfp.compute.torch_stage import TorchStage
from rrfp.errors import StageError
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Mode, StepId, Task


@pytest.mark.parametrize("mode", [Mode.TRAIN, Mode.FORWARD])
@pytest.mark.parametrize(
    ("act", "verb"),
    [
        (assign, "replaces"),
        (write, "writes"),
        (write_data, "writes"),
        (normalise, "writes"),
        (drop, "drops"),
        (grow, "replaces"),
    ],
)
def test_a_buffer_that_a_forward_changes_is_refused_by_name(act: Any, verb: str, mode: Mode) -> None:
    module = nn.Sequential(nn.Identity(), Stage(act))
    order = ORDER if mode is Mode.TRAIN else "F1 F0 F2"
    message = (
        rf"^Sequential on virtual stage 0 {verb} its buffer '1\.state' \(of Stage\) in forward, so its result depends"
    )
    with pytest.raises(StageError, match=message):
        run(module, order, mode=mode)
    run(nn.Sequential(nn.Identity(), Stage(act if act is not drop else write)), order, mode=mode, deterministic=False)


def test_the_message_says_what_to_do() -> None:
    with pytest.raises(StageError, match=r"a constant must be made before the first step, as large as it will be"):
        run(Stage(grow))
    with pytest.raises(StageError, match=r"keep its buffers as they are \(eval mode\), or write them between steps"):
        run(Stage(write))


def test_a_buffer_in_the_loss_is_noticed_too() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Stage(assign)

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return total(self.inner(output), target)

    with pytest.raises(StageError, match=r"^Linear on virtual stage 0 replaces its buffer 'loss_fn\.inner\.state'"):
        run(nn.Linear(4, 4), loss_fn=Loss())

    class Model(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.loss_fn = Stage(lambda *_: None)

    with pytest.raises(StageError, match=r"^Model on virtual stage 0 replaces its buffer 'loss_fn_\.inner\.state'"):
        run(Model(), loss_fn=Loss())


def test_a_write_that_begins_later_is_noticed() -> None:
    """Uncounted ones only where a submodule has changed its mode since the last look."""

    def late(module: Any, x: Tensor) -> None:
        module.calls = getattr(module, "calls", 0) + 1
        if module.calls > 4:
            assign(module, x)

    with pytest.raises(StageError, match="replaces its buffer"):
        run(Stage(late), steps=2)

    module = Stage(lambda module, x: write_data(module, x) if module.training else None).eval()
    program = TorchStage({0: module}, TaskGraph.chain(1), loss_fn=total, in_order={(Kind.B, 0)})
    for number, training in enumerate((False, True)):
        module.train(training)
        program.open(StepId(number, Mode.TRAIN, 2), Batch(rows(), rows(), None, (1.0, 1.0)))
        if training:
            with pytest.raises(StageError, match="writes its buffer"):
                program.forward(Task(Kind.F, 1, 0), ())
        else:
            program.forward(Task(Kind.F, 1, 0), ())


# Backward.


@pytest.mark.parametrize("order", [ORDER, IN_ORDER])
@pytest.mark.parametrize("reentrant", [False, True])
def test_statistics_that_are_written_again_in_backward_are_refused(reentrant: bool, order: str) -> None:
    """Although its forwards run in order, backwards are anywhere among them."""
    message = r"writes its buffer 'inner\.\w+' \(of BatchNorm1d\) in backward, .*: keep this submodule out of it"
    with pytest.raises(StageError, match=message):
        run(Checkpointed(nn.BatchNorm1d(4), reentrant=reentrant), order)


def test_so_are_those_that_torch_does_not_count() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.norm = nn.BatchNorm1d(4, track_running_stats=True)  # so that forwards run in order
            self.norm.eval()

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.batch_norm(x, self.get_buffer("mean"), torch.ones(4), training=True)

    with pytest.raises(StageError, match=r"writes its buffer 'inner\.mean' \(of Norm\) in backward"):
        run(Checkpointed(Norm()), IN_ORDER)


def test_a_buffer_that_a_backward_hook_writes_is_refused() -> None:
    module = Stage(lambda *_: None)
    module.layer.weight.register_hook(lambda grad: module.state.add_(grad.mean(0)) * 0 + grad)  # type: ignore[no-untyped-call]
    with pytest.raises(StageError, match=r"^Stage on virtual stage 0 writes its buffer 'state' .* in backward"):
        run(module)


# Parameters.


def write_parameter(module: Any, x: Tensor) -> None:
    module.layer.weight.mul_(1.01)


def replace_parameter(module: Any, x: Tensor) -> None:
    module.layer.weight = nn.Parameter(module.layer.weight * 1.01)


@pytest.mark.parametrize("norm", [nn.Identity(), nn.BatchNorm1d(4)], ids=["free", "ordered"])
@pytest.mark.parametrize(("act", "verb"), [(write_parameter, "writes"), (replace_parameter, "replaces")])
def test_a_parameter_that_a_forward_changes_is_refused(act: Any, verb: str, norm: nn.Module) -> None:
    """Also where forwards run in order: backwards between them read it."""
    message = rf"{verb} its parameter '0\.layer\.weight' \(of Linear\) in forward, .*; write parameters between steps"
    with pytest.raises(StageError, match=message):
        run(nn.Sequential(Stage(act), norm), IN_ORDER)


@pytest.mark.parametrize("order", [ORDER, SPLIT])
def test_an_optimizer_inside_backward_is_refused(order: str) -> None:
    layer = nn.Linear(4, 4)

    def descend(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad

    layer.weight.register_post_accumulate_grad_hook(descend)  # type: ignore[no-untyped-call]
    with pytest.raises(StageError, match=r"writes its parameter 'weight' \(of Linear\) in backward"):
        run(layer, order)
