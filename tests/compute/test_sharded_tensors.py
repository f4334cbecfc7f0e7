"""What a stage does with the tensors of tensor parallelism: on one of two ranks, where the other does not exist.

Collectives are those of torch's own stand-in for a backend, which return at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compute.stage_driver import TRAIN_2, total
from compute.written_state import Stage, assign, run
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from rrfp import AdoptedGradients, Batch
from rrfp.compute.payload import Payload, canonical
from rrfp.compute.read_only import Received
from rrfp.compute.split.backward import SplitBackward, input_gradients
from rrfp.compute.torch_stage import TorchStage
from rrfp.errors import StageError
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Task

ROWS, WIDTH, HIDDEN, FLOAT = 5, 8, 32, 4


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


@pytest.fixture
def perceptron(mesh: DeviceMesh) -> nn.Sequential:
    module = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))
    parallelize_module(module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return module


def test_a_forward_keeps_this_ranks_part_of_sharded_activations_and_no_weights(perceptron: nn.Sequential) -> None:
    stage = TorchStage({0: perceptron}, TaskGraph.chain(2))
    stage.open(TRAIN_2, Batch([torch.randn(ROWS, WIDTH)] * 2, None, None, [0.5, 0.5]))
    stage.forward(Task(Kind.F, 0, 0), ())
    assert stage.held_bytes(0, 0) == ROWS * (WIDTH + HIDDEN // 2) * FLOAT


def test_what_w_needs_is_this_ranks_part_and_of_no_collective(perceptron: nn.Sequential) -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    output = perceptron(x)
    canonical(output)
    (gradient,), pending = input_gradients([output], [torch.ones(ROWS, WIDTH)], [x], min_flops=0)
    assert gradient is not None
    assert type(gradient) is Tensor
    assert (len(pending.deferred), pending.held) == (2, [])
    # The input and the output gradient of both products.
    assert pending.num_bytes == 2 * ROWS * (WIDTH + HIDDEN // 2) * FLOAT
    pending.add_to_gradients()
    gradients = {name: parameter.grad for name, parameter in perceptron.named_parameters()}
    assert all(isinstance(grad, DTensor) for grad in gradients.values())
    assert {name: grad._local_tensor.shape for name, grad in gradients.items() if isinstance(grad, DTensor)} == {
        "0.weight": (HIDDEN // 2, WIDTH),
        "0.bias": (HIDDEN // 2,),
        "2.weight": (WIDTH, HIDDEN // 2),
        "2.bias": (WIDTH,),
    }


def test_a_module_that_reduces_its_own_gradients_is_not_split(mesh: DeviceMesh) -> None:
    module = nn.Linear(WIDTH, WIDTH)
    fully_shard(module, mesh=mesh)
    payload = Payload.pack(torch.randn(ROWS, WIDTH, requires_grad=True))
    received = Received([payload], [0], training=True)
    output = module(payload.unpack())
    with pytest.raises(StageError, match="cannot be split: fully_shard reduces its gradients"):
        SplitBackward(module, 1, "refuse").run([output], [torch.ones(ROWS, WIDTH)], received.tensors())


def test_parameters_that_are_gathered_within_tasks_are_not_written_state(mesh: DeviceMesh) -> None:
    """Such a module exchanges them for their shards, in forward and in backward; its buffers stay in place."""

    def sharded(module: nn.Module) -> Any:
        return fully_shard(module, mesh=mesh)

    run(sharded(Stage(lambda *_: None)))
    with pytest.raises(StageError, match=r"replaces its buffer '[\w.]*state'"):
        run(sharded(Stage(assign)))


def test_the_result_of_a_collective_is_waited_for_before_it_leaves(mesh: DeviceMesh) -> None:
    pending = all_reduce(torch.ones(3), "sum", mesh)
    assert isinstance(pending, AsyncCollectiveTensor)
    assert type(canonical(pending)) is Tensor


def test_a_stage_that_ends_in_a_collective_hands_over_an_ordinary_tensor(perceptron: nn.Sequential) -> None:
    bare = perceptron(torch.randn(ROWS, WIDTH))
    assert isinstance(bare, AsyncCollectiveTensor)
    canonical(bare)
    stage = TorchStage({0: perceptron}, TaskGraph.chain(2), loss_fn=total)
    stage.open(TRAIN_2, Batch([torch.randn(ROWS, WIDTH)] * 2, None, None, [0.5, 0.5]))
    output = stage.forward(Task(Kind.F, 0, 0), ())
    assert [type(tensor) for tensor in output.tensors] == [Tensor]
    assert output.tensors[0] is not None
    assert output.tensors[0].requires_grad


def test_a_sharded_tensor_cannot_leave_a_stage(mesh: DeviceMesh) -> None:
    sharded = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    with pytest.raises(StageError, match=r"output\['x'\]\[1\] is a DTensor; .*return output\['x'\]\[1\].to_local\(\)"):
        Payload.pack({"x": [torch.ones(1), sharded]})


def test_a_sharded_gradient_does_not_stay_in_received_memory(mesh: DeviceMesh) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    adopted = AdoptedGradients(module)
    received = torch.ones(2, 2)
    module.weight.grad = DTensor.from_local(received, mesh, [Shard(0)], run_check=False)
    adopted.copy_out_of(adopted.memory_of([Payload((received,))]))
    received.zero_()
    assert module.weight.grad is not None
    assert module.weight.grad._local_tensor.tolist() == [[1.0, 1.0], [1.0, 1.0]]
