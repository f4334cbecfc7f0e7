"""What `TorchStage` refuses, keeps, frees and reports."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from compute.stage_driver import Run, build, shared, train
from torch import Tensor, nn

from rrfp.compute.base import Batch
from rrfp.compute.payload import Payload
from rrfp.compute.torch_stage import TorchStage
from rrfp.core.graph import Graph
from rrfp.core.tasks import Kind, Mode, StepId, Task
from rrfp.errors import ConfigError, StageError


def total(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).sum()


TRAIN_2 = StepId(0, Mode.TRAIN, 2)
FORWARD_2 = StepId(0, Mode.FORWARD, 2)


def rows(count: int = 2) -> list[Tensor]:
    return [torch.ones(3, 4) * (m + 1) for m in range(count)]


# --- what open refuses


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (Batch(None, rows(), None, (1.0, 1.0)), "inputs is missing, must be a list of 2, one for each microbatch"),
        (
            Batch(rows(3), rows(), None, (1.0, 1.0)),
            "inputs has 3 entries, must be a list of 2",
        ),
        (Batch(rows(), None, None, (1.0, 1.0)), "targets is missing, must be a list of 2, one for each microbatch"),
        (Batch(rows(), rows(1), None, (1.0, 1.0)), "targets has 1 entries, must be a list of 2"),
        (Batch(rows(), rows(), [{}], (1.0, 1.0)), "kwargs has 1 entries, must be a list of 2"),
        (Batch(rows(), rows(), None, ()), "gradient_weights has 0 entries, must be a list of 2"),
    ],
)
def test_open_names_the_field_and_the_number_of_microbatches(batch: Batch, message: str) -> None:
    programs, _ = build([nn.Linear(4, 4)], total)
    with pytest.raises(ConfigError) as raised:
        programs[0].open(TRAIN_2, batch)
    assert message in str(raised.value)


def test_lists_that_a_rank_does_not_use_may_be_absent() -> None:
    programs, _ = build([nn.Linear(4, 4) for _ in range(3)], total)
    programs[0].open(TRAIN_2, Batch(inputs=rows()))
    programs[1].open(TRAIN_2, Batch())
    programs[2].open(TRAIN_2, Batch(targets=rows(), gradient_weights=(1.0, 1.0)))


@pytest.mark.parametrize("step", [TRAIN_2, FORWARD_2])
def test_targets_without_a_loss_function_are_refused(step: StepId) -> None:
    programs, _ = build([nn.Linear(4, 4)], None)
    with pytest.raises(ConfigError, match="loss_fn is missing on the last virtual stage"):
        programs[0].open(step, Batch(rows(), rows(), None, (1.0, 1.0)))


@pytest.mark.parametrize(("guard", "name"), [(torch.no_grad, "no_grad"), (torch.inference_mode, "inference_mode")])
def test_training_without_gradients_is_refused(guard: Any, name: str) -> None:
    programs, _ = build([nn.Linear(4, 4)], total)
    with guard(), pytest.raises(ConfigError, match=rf"under torch\.{name}\(\); use evaluate"):
        programs[0].open(TRAIN_2, Batch(rows(), rows(), None, (1.0, 1.0)))


def test_modules_must_be_those_of_one_stage() -> None:
    graph = Graph.chain(2, chunks=2)
    with pytest.raises(ConfigError, match=r"modules has the virtual stages \(0, 1\).*\(0, 2\) or \(1, 3\)"):
        TorchStage({0: nn.Identity(), 1: nn.Identity()}, graph)


def test_a_split_virtual_stage_is_refused() -> None:
    with pytest.raises(ConfigError, match="virtual stage 1 is split"):
        TorchStage({1: nn.Identity()}, Graph.chain(2, split=True))


# --- what a loss function may return


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda output: output.square().mean(dim=0), r"a torch.float32 tensor of shape \(4,\), must return a scalar"),
        (lambda output: output.sum().long(), r"a torch.int64 tensor of shape \(\)"),
        (lambda output: output.sum().item(), "loss_fn returned a float, must return"),
        (lambda output: output.sum().detach(), "the loss of microbatch 1 does not require grad"),
    ],
)
def test_a_loss_that_is_none_is_named(returned: Any, message: str) -> None:
    programs, graph = build([nn.Linear(4, 4)], lambda output, _: returned(output))
    run = Run(programs, graph, TRAIN_2, Batch(rows(), rows(), None, (1.0, 1.0)))
    with pytest.raises(StageError, match=message):
        run.execute(Task(Kind.F, 1, 0))


# --- forward only


def test_forward_only_gives_losses_and_keeps_no_graph() -> None:
    programs, graph = build([nn.Linear(4, 4), nn.Linear(4, 4)], total)
    run = Run(programs, graph, FORWARD_2, Batch(rows(), rows()))
    run.finish()
    assert list(programs[1].losses()) == [0, 1]
    assert programs[1].outputs() == {}
    sent = run.done[Task(Kind.F, 0, 0)].tensors[0]
    assert not sent.requires_grad
    assert programs[0].held_bytes(0, 0) == 0


def test_forward_only_without_targets_gives_outputs() -> None:
    modules = [nn.Linear(4, 4), nn.Linear(4, 2)]
    programs, graph = build(modules, total)
    with torch.inference_mode():
        Run(programs, graph, FORWARD_2, Batch(rows()), wire=shared).finish()
    outputs = programs[1].outputs()
    assert list(outputs) == [0, 1]
    assert not outputs[0].requires_grad
    torch.testing.assert_close(outputs[1], modules[1](modules[0](rows()[1])).detach())
    assert programs[1].losses() == {}


def test_forward_only_accepts_inference_tensors() -> None:
    programs, graph = build([nn.Identity(), nn.Linear(4, 2)], total)
    with torch.inference_mode():
        inputs = rows()
        Run(programs, graph, FORWARD_2, Batch(inputs), wire=shared).finish()


def test_evaluate_leaves_the_train_flag_alone() -> None:
    modules = [nn.Linear(4, 4).train(), nn.Linear(4, 4).eval()]
    programs, graph = build(modules, total)
    Run(programs, graph, FORWARD_2, Batch(rows())).finish()
    assert [module.training for module in modules] == [True, False]


# --- received tensors are read-only


class Bump(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


def test_a_write_into_a_received_tensor_that_requires_grad_names_the_submodule() -> None:
    first = nn.Linear(4, 4)
    second = nn.Sequential(nn.Identity(), nn.Sequential(nn.ReLU(inplace=True)), nn.Linear(4, 4))
    with pytest.raises(StageError) as raised:
        train([first, second], rows(), rows(), total)
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


def test_a_keyword_given_twice_is_refused() -> None:
    programs, graph = build([nn.Identity()], total)
    run = Run(programs, graph, TRAIN_2, Batch([{"x": 1}] * 2, rows(), [{"x": 2}] * 2, (1.0, 1.0)))
    with pytest.raises(StageError, match="'x' is given twice"):
        run.execute(Task(Kind.F, 0, 0))


# --- memory


def test_held_bytes_count_each_storage_once_and_no_parameter() -> None:
    programs, graph = build([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Identity()], total)
    run = Run(programs, graph, TRAIN_2, Batch(rows(), rows(), None, (1.0, 1.0)))
    for task in [Task(Kind.F, m, v) for m in (0, 1) for v in (0, 1)]:
        run.execute(task)
    received, tanh = 3 * 4 * 4, 3 * 8 * 4
    assert [programs[1].held_bytes(m, 1) for m in (0, 1)] == [received + tanh] * 2  # Linear saved the received too
    assert programs[0].held_bytes(0, 0) == received  # the caller's input, which Linear saved


def test_backward_frees_what_forward_kept() -> None:
    kept: list[weakref.ref[Tensor]] = []

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            kept.extend((weakref.ref(x), weakref.ref(y)))
            return y.sin() + x

    programs, graph = build([nn.Linear(4, 4), Watched(), nn.Linear(4, 4)], total)
    run = Run(programs, graph, TRAIN_2, Batch(rows(), rows(), None, (1.0, 1.0)))
    gc.collect()
    gc.disable()  # reference counting alone must do it
    try:
        run.finish()
    finally:
        gc.enable()
    assert [ref() for ref in kept] == [None] * 4
    assert all(program.held_bytes(m, v) == 0 for v, program in programs.items() for m in (0, 1))


def test_a_forward_without_backward_is_freed_by_the_next_step() -> None:
    """Nothing may hold a node that holds its own output: an aborted step would stay in memory for ever."""
    kept: list[weakref.ref[Any]] = []

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            kept.append(weakref.ref(y.untyped_storage()))
            return y * 2

    programs, graph = build([Watched(), nn.Identity()], total)
    inputs = [row.requires_grad_() for row in rows()]
    batch = Batch(inputs, rows(), None, (1.0, 1.0))
    gc.collect()
    gc.disable()
    try:
        Run(programs, graph, TRAIN_2, batch).execute(Task(Kind.F, 0, 0))
        assert kept[0]() is not None
        programs[0].open(StepId(1, Mode.TRAIN, 2), batch)
        assert kept[0]() is None
    finally:
        gc.enable()


def test_an_output_that_autograd_does_not_need_is_freed_once_sent() -> None:
    programs, graph = build([nn.Linear(4, 4), nn.Identity()], total)
    run = Run(programs, graph, TRAIN_2, Batch(rows(), rows(), None, (1.0, 1.0)))
    run.execute(Task(Kind.F, 0, 0))
    storage = weakref.ref(run.done[Task(Kind.F, 0, 0)].tensors[0].untyped_storage())
    run.done[Task(Kind.F, 0, 0)] = Payload()
    assert storage() is None


def test_open_forgets_the_step_before() -> None:
    programs, graph = build([nn.Linear(4, 4), nn.Linear(4, 4)], total)
    batch = Batch(rows(), rows(), None, (1.0, 1.0))
    Run(programs, graph, TRAIN_2, batch).execute(Task(Kind.F, 0, 0))
    run = Run(programs, graph, StepId(1, Mode.TRAIN, 2), batch)
    assert programs[0].held_bytes(0, 0) == 0
    assert programs[1].losses() == {}
    run.finish()
