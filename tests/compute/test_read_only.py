"""Received tensors are read-only: a module that writes into one is found and named."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from compute.stage_driver import FORWARD_2, TRAIN_2, Run, build, rows, total, train
from torch import Tensor, nn

from rrfp import Batch, StageProgram
from rrfp.compute.mailbox import Mailbox, run_task
from rrfp.compute.payload import Payload
from rrfp.compute.split import backward
from rrfp.compute.torch_stage import TorchStage
from rrfp.errors import StageError
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Mode, StepId, Task
from rrfp.model.visits import Visits


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


# What a task returned.


class Acting(StageProgram):
    """Virtual stage 1 of 3: returns the tensors that it is given, and does something in a task."""

    def __init__(self) -> None:
        self.output, self.gradient = torch.zeros(2), torch.zeros(2)
        self.act: Any = lambda: None

    def open(self, step: StepId, batch: Batch) -> None: ...

    def forward(self, task: Task, inputs: tuple[Payload, ...]) -> Payload:
        self.act()
        return Payload.pack({"x": self.output})

    def backward(self, task: Task, grads: tuple[Payload, ...]) -> tuple[Payload, ...]:
        self.act()
        return (Payload((None, self.gradient)),)

    def weight(self, task: Task) -> None:
        self.act()


class Lane:
    """Runs tasks of `Acting` on what arrives."""

    def __init__(self, mode: Mode) -> None:
        self.program, self.mailbox = Acting(), Mailbox(TaskGraph.chain(3, split=True), 1)
        self.mailbox.open(Visits(4), mode)

    def run(self, task: str, act: Any = lambda: None) -> None:
        kind, m, v = Task.parse(task)
        self.mailbox.put_forward(Task(Kind.F, m, v - 1), Payload.pack(1))
        self.mailbox.unpack(Task(Kind.B, m, v + 1), (), {"parts": [[v, 0]]})
        self.program.act = act
        run_task(self.program, self.mailbox, Task(kind, m, v))

    def drop(self, task: str) -> None:
        self.mailbox.drop(Task.parse(task))


def test_a_write_while_the_message_is_copied_is_found_at_the_end_of_the_task() -> None:
    """The copy has ended before the task that writes has, and torch counts the write in between."""
    lane = Lane(Mode.FORWARD)
    lane.run("F0@1")

    def act() -> None:
        lane.drop("F0@1")
        lane.program.output.add_(1)

    with pytest.raises(StageError, match=r"Acting on virtual stage 1 wrote in F1@1 into tensor \['x'\] that it had"):
        lane.run("F1@1", act)


@pytest.mark.parametrize("task", ["F2@1", "B1@1", "W1@1"])
def test_every_task_is_looked_at(task: str) -> None:
    lane = Lane(Mode.TRAIN)
    lane.run("F0@1")
    lane.run("F1@1")
    with pytest.raises(StageError, match=rf"wrote in {task} into tensor \['x'\] that it had returned in F0@1, "):
        lane.run(task, lambda: lane.program.output.add_(1))


def test_outputs_that_no_one_reads_any_more_may_be_written() -> None:
    lane = Lane(Mode.FORWARD)
    lane.run("F0@1")
    lane.drop("F0@1")
    lane.program.output = torch.ones(2)
    first = lane.mailbox._forward.get(Task(Kind.F, 0, 1))
    assert first is None
    lane.run("F1@1")
    kept = lane.program.output
    lane.drop("F1@1")
    lane.program.output = torch.ones(2)
    lane.run("F2@1")
    lane.run("F3@1", lambda: kept.add_(1))


def test_in_training_that_is_so_from_its_own_backward_on() -> None:
    lane = Lane(Mode.TRAIN)
    lane.run("F0@1")
    lane.run("B0@1", lambda: lane.program.output.add_(1))
    lane.run("W0@1", lambda: lane.program.output.add_(1))
    lane.program.output = torch.ones(2)
    lane.run("F1@1")
    lane.drop("F1@1")  # sent, but a reader on the rank may have saved it
    lane.program.gradient = torch.ones(2)
    with pytest.raises(StageError, match="returned in F1@1"):
        lane.run("F2@1", lambda: lane.program.output.add_(1))


def test_a_gradient_that_is_written_after_it_was_returned_is_found() -> None:
    lane = Lane(Mode.TRAIN)
    lane.run("F0@1")
    lane.run("B0@1")
    with pytest.raises(StageError, match=r"wrote in W0@1 into tensor \[1\] of the input gradients"):
        lane.run("W0@1", lambda: lane.program.gradient.add_(1))


def test_writes_between_steps_are_the_callers() -> None:
    lane = Lane(Mode.TRAIN)
    lane.run("F0@1")
    lane.program.output.add_(1)
    lane.mailbox.open(Visits(4), Mode.TRAIN)
    lane.run("F0@1")


def test_a_watched_output_is_freed_when_it_was_sent() -> None:
    lane = Lane(Mode.TRAIN)
    lane.program.output = torch.ones(1 << 20)
    memory = weakref.ref(lane.program.output.untyped_storage())
    lane.run("F0@1")
    lane.mailbox.drop(Task(Kind.F, 0, 1))
    lane.program.output = torch.ones(2)
    assert memory() is None


def test_what_a_split_backward_keeps_must_not_be_written_before_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Workspace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.space = torch.zeros(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.space.copy_(x)
            output: Tensor = self.linear(self.space)
            return output

    monkeypatch.setattr(backward, "MIN_FLOPS", 0)
    program = TorchStage({0: Workspace()}, TaskGraph.chain(1, split=True), loss_fn=total)
    program.open(TRAIN_2, Batch(rows(), rows(), None, (1.0, 1.0)))
    program.forward(Task(Kind.F, 0, 0), ())
    program.backward(Task(Kind.B, 0, 0), ())
    program.forward(Task(Kind.F, 1, 0), ())
    with pytest.raises(StageError, match=r"Workspace on virtual stage 0 saved .* was written between B and W"):
        program.weight(Task(Kind.W, 0, 0))


def test_the_public_split_backward_notices_such_a_write_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward, "MIN_FLOPS", 0)
    module, x = nn.Linear(4, 4), torch.ones(3, 4, requires_grad=True)
    saved = x * 2
    output = module(saved)
    left = backward.SplitBackward(module, 3).run([output], [torch.ones_like(output)], [x])
    assert left is not None
    saved.detach().zero_()
    with pytest.raises(StageError, match="Linear on virtual stage 3 saved for its backward was written between B and"):
        left.add_to_gradients()
    assert module.weight.grad is None
