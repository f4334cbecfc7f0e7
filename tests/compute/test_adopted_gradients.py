"""The memory of `.grad` is nobody else's: neither a received gradient's nor that of an input gradient to be sent."""

from __future__ import annotations

import copy

import torch
from compute.stage_driver import Run, assert_same_gradients, build, gradients, shared, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rrfp import Batch
from rrfp.compute.payload import Payload
from rrfp.compute.torch_stage import TorchStage
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Mode, StepId, Task
from rrfp.testing.reference import reference

ROWS, WIDTH = 3, 4


class Table(nn.Module):
    """Puts out a parameter as it is, up to its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.ones(ROWS * WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.rows.view(ROWS, WIDTH)


class TableThatIsNotSplit(Table):
    """Reentrant checkpointing differentiates as a whole."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y: Tensor = checkpoint(torch.tanh, x.detach().requires_grad_(), use_reentrant=True)
        return y, self.rows.view(ROWS, WIDTH)


class Product(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y


class Shifted(nn.Module):
    """Input and parameter are reached by views of one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(ROWS * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x.view(-1, 2) + self.shift.view(-1, 2)) * 2


def batches(count: int) -> list[Tensor]:
    return [torch.full((ROWS, WIDTH), float(m + 1)) for m in range(count)]


def error(output: Tensor, target: Tensor) -> Tensor:
    return (output.view(target.shape) - target).square().sum()


def test_a_received_gradient_is_not_adopted() -> None:
    delivered: list[Tensor] = []

    def recorded(payload: Payload) -> Payload:
        delivered.extend(tensor for tensor in payload.tensors if tensor is not None)
        return payload

    modules = [Table(), Product()]
    train(modules, batches(3), batches(3), error, wire=recorded)
    (grad,) = gradients(modules)
    assert grad is not None
    assert grad.untyped_storage().data_ptr() not in {tensor.untyped_storage().data_ptr() for tensor in delivered}


def test_a_received_gradient_is_not_adopted_by_a_module_that_cannot_be_split() -> None:
    """All Bs run before the first W, so a later B would add to the gradient that the first one received."""
    program = TorchStage({0: TableThatIsNotSplit()}, TaskGraph.chain(2, split=True))
    program.open(StepId(0, Mode.TRAIN, 2), Batch(batches(2)))
    received = [torch.ones(ROWS, WIDTH) for _ in range(2)]
    for m in range(2):
        program.forward(Task(Kind.F, m, 0), ())
    for m in range(2):
        program.backward(Task(Kind.B, m, 0), (Payload((torch.ones(ROWS, WIDTH), received[m])),))
    for m in range(2):
        program.weight(Task(Kind.W, m, 0))
    assert torch.equal(received[0], torch.ones(ROWS, WIDTH))


def test_an_input_gradient_stays_as_it_is_while_it_waits_to_be_sent() -> None:
    """Later microbatches run their Bs on the last stage before the first stage reads the gradient of the first one."""
    modules = [nn.Linear(WIDTH, WIDTH), Shifted()]
    twins = copy.deepcopy(modules)
    reference(twins, batches(3), batches(3), loss_fn=error, reduction="sum")
    programs, graph = build(modules, error)
    run = Run(programs, graph, StepId(0, Mode.TRAIN, 3), Batch(batches(3), batches(3), None, (1.0,) * 3), wire=shared)
    run.finish(lambda ready: min(ready, key=lambda task: (task.kind is Kind.B, -task.virtual_stage, task.microbatch)))
    assert_same_gradients(gradients(modules), gradients(twins))
