"""What `TorchStage` refuses, keeps, frees and reports."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from compute.stage_driver import FORWARD_2, TRAIN_2, Run, build, rows, shared, total
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rrfp import Batch
from rrfp.compute.payload import Payload
from rrfp.compute.torch_stage import TorchStage
from rrfp.errors import ConfigError, StageError
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Mode, StepId, Task
from rrfp.testing.reference import reference

# --- what open refuses


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            Batch(None, rows(), None, (1.0, 1.0)),
            "inputs is missing, must be a list of 2 on the rank of the first virtual stage, one for each microbatch",
        ),
        (
            Batch(rows(3), rows(), None, (1.0, 1.0)),
            "inputs has length 3, must be a list of 2",
        ),
        (
            Batch(rows(), None, None, (1.0, 1.0)),
            "targets is missing, must be a list of 2 on the rank that computes the loss, one for each microbatch",
        ),
        (Batch(rows(), rows(1), None, (1.0, 1.0)), "targets has length 1, must be a list of 2"),
        (Batch(rows(), rows(), [{}], (1.0, 1.0)), "kwargs has length 1, must be a list of 2"),
        (Batch(rows(), rows(), None, ()), "gradient_weights has length 0, must be a list of 2"),
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
    with pytest.raises(ConfigError, match="loss_fn is missing on the rank that computes the loss"):
        programs[0].open(step, Batch(rows(), rows(), None, (1.0, 1.0)))


@pytest.mark.parametrize(("guard", "name"), [(torch.no_grad, "no_grad"), (torch.inference_mode, "inference_mode")])
def test_training_without_gradients_is_refused(guard: Any, name: str) -> None:
    programs, _ = build([nn.Linear(4, 4)], total)
    with guard(), pytest.raises(ConfigError, match=rf"under torch\.{name}\(\); use evaluate"):
        programs[0].open(TRAIN_2, Batch(rows(), rows(), None, (1.0, 1.0)))


def test_modules_must_be_those_of_one_stage() -> None:
    graph = TaskGraph.chain(2, chunks=2)
    with pytest.raises(ConfigError, match=r"modules has the virtual stages \(0, 1\).*\(0, 2\) or \(1, 3\)"):
        TorchStage({0: nn.Identity(), 1: nn.Identity()}, graph)


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=True)  # type: ignore[no-any-return]


def test_a_module_that_cannot_be_split_is_refused_by_name_where_that_was_asked_for() -> None:
    graph = TaskGraph.chain(1, split=True)
    program = TorchStage({0: nn.Sequential(nn.Linear(4, 4), Reentrant())}, graph, loss_fn=total, unsplittable="refuse")
    program.open(TRAIN_2, Batch(rows(), rows(), None, (1.0, 1.0)))
    program.forward(Task(Kind.F, 0, 0), ())
    with pytest.raises(StageError, match="Sequential on virtual stage 0 cannot be split: it uses reentrant"):
        program.backward(Task(Kind.B, 0, 0), ())
    with pytest.raises(ConfigError, match="unsplittable is 'maybe', must be one of: whole, refuse"):
        TorchStage({0: nn.Identity()}, graph, unsplittable="maybe")  # type: ignore[arg-type]


def test_a_module_that_cannot_be_split_runs_its_whole_backward_in_b(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(nn.Linear(4, 4), Reentrant())
    twin = copy.deepcopy(module)
    program = TorchStage({0: module}, TaskGraph.chain(1, split=True), loss_fn=total)
    inputs = rows()
    program.open(TRAIN_2, Batch(inputs, inputs, None, (1.0, 1.0)))
    for m in range(2):
        program.forward(Task(Kind.F, m, 0), ())
        program.backward(Task(Kind.B, m, 0), ())
    expected = reference([twin], inputs, inputs, loss_fn=total, reduction="sum")
    assert list(program.losses().values()) == list(expected.losses)
    for m in range(2):
        program.weight(Task(Kind.W, m, 0))
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
    warnings = [record.message for record in caplog.records if "is not split" in record.message]
    assert len(warnings) == 1, "said once"


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
    """Nothing may hold a node that holds its own output: an aborted step would stay in memory forever."""
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
