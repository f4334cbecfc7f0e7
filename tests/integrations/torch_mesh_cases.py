"""`ScheduleRRFP` with data and tensor parallelism inside its stages: four ranks, 2 x 2; every function is a case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from integrations.torch_parts import CPU, Rank, Reference, WeightsLast, batch, blocks, difference, held, loss_fn
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import rrfp
from rrfp.errors import ConfigError
from rrfp.integrations.torch import ScheduleRRFP

M = 4


def mesh_of(inner: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", inner))


def replica_rank(two_by_two: DeviceMesh, wrap: Callable[[nn.Module], nn.Module], **options: Any) -> Rank:
    return Rank(2, M, group=two_by_two["pp"].get_group(), wrap=wrap, **options)


def train(rank: Rank, mesh: DeviceMesh, steps: int, **arguments: Any) -> None:
    """Train replicas on batches of their own; the reference has the mean over both."""
    replica = mesh["dp"].get_local_rank()
    for number in range(steps):
        batches = [batch(10 * number + each, 2 * M) for each in range(2)]
        x, y = batches[replica]
        losses: list[Any] = []
        args, kwargs = rank.arguments(x, y, losses)
        rank.schedule.step(*args, **kwargs, **arguments)
        for each, (inputs, targets) in enumerate(batches):
            rank.reference.run(((part,) for part in inputs.chunk(M)), targets.chunk(M), scales=False)
            if each == replica and rank.is_last:
                assert [loss.item() for loss in losses] == [loss.item() for loss in rank.reference.losses]
        for module in rank.reference.modules:
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter.grad.div_(2 * M)
        assert rank.error() < 1e-12, rank.error()
        rank.zero_grad()


class ShallowFirst(WeightsLast):
    @staticmethod
    def key(task: rrfp.Task) -> int:
        return task.virtual_stage


class DeepFirst(WeightsLast):
    @staticmethod
    def key(task: rrfp.Task) -> int:
        return -task.virtual_stage


def other_orders(mesh: DeviceMesh) -> dict[str, Any]:
    """Options with which the stages of a rank are done in another order on each replica."""
    return {"split": True, "hint": (ShallowFirst, DeepFirst)[mesh["dp"].get_local_rank()]}


def sharded(mesh: DeviceMesh, **options: Any) -> Callable[[nn.Module], nn.Module]:
    def wrap(module: nn.Module) -> nn.Module:
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False, **options)
        return module

    return wrap


def fsdp() -> None:
    """Gathered once and reduced once a step, in looped and V placement; replicas have orders of their own."""
    mesh = mesh_of("dp")
    for vee in (False, True):
        rank = replica_rank(mesh, sharded(mesh), vee=vee)
        train(rank, mesh, 3)
        rank.schedule.close()


def fsdp_whose_replicas_end_stages_in_other_orders() -> None:
    mesh = mesh_of("dp")
    rank = replica_rank(mesh, sharded(mesh), **other_orders(mesh))
    train(rank, mesh, 2)
    rank.schedule.close()


def fsdp_of_checkpointed_modules() -> None:
    mesh = mesh_of("dp")
    rank = replica_rank(mesh, lambda module: sharded(mesh)(checkpoint_wrapper(module)))
    train(rank, mesh, 2)
    rank.schedule.close()


def fsdp_of_parts_and_the_whole() -> None:
    """``reshard_after_forward`` left out: FSDP2 frees no parameters of the outermost module; of its parts it would."""
    mesh = mesh_of("dp")

    def wrap(module: nn.Module) -> nn.Module:
        for part in module.children():
            fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(module, mesh=mesh["dp"])
        return module

    rank = replica_rank(mesh, wrap)
    train(rank, mesh, 2)
    rank.schedule.close()


def gradients_reduced_after_several_steps() -> None:
    """``finalize_gradients=False`` keeps FSDP2's gradients as they are; the next step reduces the sum of both."""
    mesh = mesh_of("dp")
    rank = replica_rank(mesh, sharded(mesh))
    replica = mesh["dp"].get_local_rank()
    for number in range(2):
        batches = [batch(10 * number + each, 2 * M) for each in range(2)]
        args, kwargs = rank.arguments(*batches[replica], [])
        rank.schedule.step(*args, **kwargs, finalize_gradients=number == 1)
        for inputs, targets in batches:
            rank.reference.run(((part,) for part in inputs.chunk(M)), targets.chunk(M), scales=False)
    for module in rank.reference.modules:
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(2 * M)
    assert rank.error() < 1e-12, rank.error()
    rank.schedule.close()


def resharding_is_refused() -> None:
    mesh = mesh_of("dp")

    def wrap(module: nn.Module) -> nn.Module:
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=True)
        return module

    with pytest.raises(ConfigError, match="reshard_after_forward is True on the stage's module, must be False: every"):
        replica_rank(mesh, wrap)

    def wrap_part(module: nn.Module) -> nn.Module:
        fully_shard(module.get_submodule("up"), mesh=mesh["dp"])
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
        return module

    with pytest.raises(ConfigError, match="reshard_after_forward is True on 'up'"):
        replica_rank(mesh, wrap_part)


def wrappers_below_the_stages_module_are_refused() -> None:
    mesh = mesh_of("dp")

    def shard_part(module: nn.Module) -> nn.Module:
        fully_shard(module.get_submodule("up"), mesh=mesh["dp"], reshard_after_forward=False)
        return module

    def replicate_part(module: nn.Module) -> nn.Module:
        module.add_module("up", DistributedDataParallel(module.get_submodule("up"), process_group=mesh.get_group("dp")))
        return module

    with pytest.raises(ConfigError, match="fully_shard is applied to 'up', must be applied to the stage's module too"):
        replica_rank(mesh, shard_part)
    with pytest.raises(ConfigError, match="DistributedDataParallel is applied to 'up', must be"):
        replica_rank(mesh, replicate_part)


def ddp() -> None:
    """One sum over replicas a step and stage, in the same order on both, whichever stage is done first."""
    mesh = mesh_of("dp")
    for options in ({}, {"vee": True, **other_orders(mesh)}):
        rank = replica_rank(
            mesh, lambda module: DistributedDataParallel(module, process_group=mesh.get_group("dp")), **options
        )
        train(rank, mesh, 3)
        rank.schedule.close()


# Tensor parallelism: collectives inside tasks.

PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def tensor_parallel_stages() -> None:
    """The ranks of a stage run tasks in the same order; messages are ordinary tensors."""
    mesh = mesh_of("tp")

    def wrap(module: nn.Module) -> nn.Module:
        return parallelize_module(module, mesh["tp"], PLAN)

    for options in ({}, {"split": True}):
        rank = replica_rank(mesh, wrap, mesh=mesh, **options)
        rank.steps(2, exact=False)
        rank.schedule.close()


class Sharded(nn.Module):
    """Takes and returns DTensors that are sharded over the sequence."""

    def __init__(self, mesh: DeviceMesh, block: nn.Module) -> None:
        super().__init__()
        self.mesh = mesh
        self.block = block
        for name, parameter in list(block.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            replicated = distribute_tensor(parameter.detach(), mesh, [Replicate()])
            block.get_submodule(owner).register_parameter(leaf, nn.Parameter(replicated))

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            x = distribute_tensor(x, self.mesh, [Shard(1)])
        output: Tensor = self.block(x)
        return output


def sharded_loss(output: Tensor, target: Tensor) -> Tensor:
    assert isinstance(output, DTensor)
    return loss_fn(output.full_tensor(), target)


def dtensors_between_stages() -> None:
    """``get_mesh`` finds the mesh of a received DTensor; shards travel, each to its own counterpart."""
    mesh = mesh_of("tp")
    tp, pp = mesh["tp"], mesh["pp"]
    asked: list[Any] = []

    def get_mesh(mesh_dim_names: tuple[str, ...], mesh_layout: Any) -> DeviceMesh:
        asked.append(mesh_dim_names)
        return tp

    rank, virtual = pp.get_local_rank(), 4
    mine = held(rank, 2, 2, False)
    modules = {v: Sharded(tp, block) for v, block in enumerate(blocks(virtual)) if v in mine}
    reference = Reference(blocks(virtual))
    stages = [PipelineStage(modules[v], v, virtual, CPU, group=pp.get_group(), get_mesh=get_mesh) for v in mine]
    schedule = ScheduleRRFP.configured(coordinate=("tp",))(stages, M, sharded_loss, mesh=mesh)
    for number in range(2):
        x, y = (part.repeat(1, 2, 1)[:, :4] for part in batch(number, 2 * M))
        losses: list[Any] = []
        given: dict[str, Any] = {"target": y, "losses": losses} if virtual - 1 in mine else {}
        schedule.step(*((x,) if rank == 0 else ()), **given, return_outputs=False)
        reference.run(((part,) for part in x.chunk(M)), y.chunk(M))
        for v in mine:
            for own, other in zip(modules[v].parameters(), reference.modules[v].parameters(), strict=True):
                assert difference(own.grad, other.grad) < 1e-12
            modules[v].zero_grad()
            reference.modules[v].zero_grad()
        if losses:
            assert all(abs(a.item() - b.item()) < 1e-12 for a, b in zip(losses, reference.losses, strict=True))
    assert asked
    schedule.close()


def tensor_parallel_stages_without_a_mesh_are_refused() -> None:
    mesh = mesh_of("tp")
    with pytest.raises(ConfigError, match=r"parameter 'up.weight' is a DTensor .*: pass mesh="):
        replica_rank(mesh, lambda module: parallelize_module(module, mesh["tp"], PLAN))


def synchronised_batch_norm_needs_one_order() -> None:
    """Refused by its type: each replica would bring statistics of another microbatch."""
    mesh = mesh_of("dp")
    text = r"stage \d: 'norm' is a SyncBatchNorm over the ranks \[%s\], so tasks have collectives, .*: pass mesh="
    for group, ranks, options in (
        (mesh.get_group("dp"), r"\d, \d", {}),
        (mesh.get_group("dp"), r"\d, \d", {"mesh": mesh}),
        (None, "0, 1, 2, 3", {"mesh": mesh, "coordinate": ("dp",)}),
    ):

        def wrap(module: nn.Module, group: Any = group) -> nn.Module:
            module.add_module("norm", nn.SyncBatchNorm(4, process_group=group))
            return module

        with pytest.raises(ConfigError, match=text % ranks):
            replica_rank(mesh, wrap, **options)

    def within(module: nn.Module) -> nn.Module:
        module.add_module("norm", nn.SyncBatchNorm(4, process_group=mesh.get_group("dp")))
        return module

    replica_rank(mesh, within, mesh=mesh, coordinate=("dp",)).schedule.close()


def dtensors_over_a_dim_that_is_not_coordinated_are_refused() -> None:
    mesh = mesh_of("dp")

    def wrap(module: nn.Module) -> nn.Module:
        return parallelize_module(module, mesh["dp"], PLAN)

    with pytest.raises(ConfigError, match=r"parameter 'up.weight' is a DTensor over the ranks .* and coordinate= with"):
        replica_rank(mesh, wrap, mesh=mesh)


def four_stages() -> None:
    rank = Rank(1, 6)
    rank.steps(2)
    rank.schedule.close()
