"""Sharded parameters on a mesh of two replicas by two members; every function runs on each of the four ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import rrfp
from rrfp.compute.gradients.norm import combined_norm, local_norm
from rrfp.compute.gradients.process_groups import check_replicas, check_sharded, global_ranks, replica_group
from rrfp.compute.gradients.reducer import GradientReducer
from rrfp.compute.lanes.thread import ThreadLane
from rrfp.errors import ConfigError, StageError
from rrfp.model.mesh import Mesh

RANKS = 4


@cache
def meshes() -> DeviceMesh:
    """Replicas and members; one stage."""
    return init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp"))


@cache
def place() -> rrfp.Topology:
    return rrfp.Topology.from_mesh(meshes())


@cache
def like() -> dist.ProcessGroup:
    """This rank and its like in the other replica."""
    return replica_group(place(), global_ranks(place(), meshes()))


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def model() -> nn.Sequential:
    """The same weights on all ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 10), nn.GELU(), nn.Linear(10, 8)).double()


def sharded() -> nn.Module:
    """That model under tensor and sequence parallelism; its norm gets gradients that are partial sums."""
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1), use_local_output=True),
    }
    return parallelize_module(model(), meshes()["tp"], plan)


def backward(module: nn.Module, replica: int, *, is_sharded: bool) -> None:
    """Add the gradients of a replica's batch, without a product that is the same on both."""
    batch = drawn(2, 4, 8, seed=replica)
    if not is_sharded:
        module(batch).square().sum().backward()
        return
    output = module(batch.chunk(2, 1)[place().member])
    output.square().sum().backward()


def reduce_once(module: nn.Module) -> None:
    """Sum over the two replicas."""

    async def run() -> None:
        reducer.start()
        await reducer.join()
        reducer.open(True)
        await reducer.reduce(0)
        reducer.close()

    reducer = GradientReducer({0: module}, like, ThreadLane(), replica=place().replica)
    asyncio.run(run())


def whole(gradient: Tensor | None) -> Tensor:
    """All of a gradient, on every rank."""
    assert isinstance(gradient, DTensor)
    return gradient.full_tensor()


def norm_of_all(modules: Mapping[int, nn.Module], norm_type: float = 2.0, **options: Any) -> float:
    """What the ranks answer for, together."""
    shares: list[Any] = [None] * RANKS
    own = local_norm(modules, norm_type, topology=place(), ranks=global_ranks(place(), meshes()), **options)
    dist.all_gather_object(shares, own)
    return combined_norm(shares, norm_type)


def refusal(module: nn.Module, topology: rrfp.Topology) -> str:
    with pytest.raises(ConfigError) as refused:
        check_sharded({3: module}, topology, range(RANKS))
    return str(refused.value)


class Holding(nn.Module):
    """A module with one parameter."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(value)


# Cases.


def the_sum_of_sharded_gradients_is_that_of_the_whole_model(rank: int) -> None:
    module, expected = sharded(), model()
    backward(module, place().replica, is_sharded=True)
    reduce_once(module)
    for replica in range(2):
        backward(expected, replica, is_sharded=False)
    kinds = set()
    for ours, theirs in zip(module.parameters(), expected.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor)
        kinds.add(type(ours.grad.placements[0]))
        torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=1e-12, atol=1e-12)
    assert kinds == {Partial, Shard, Replicate}


def zeros_stand_in_for_shards_and_for_partial_sums(rank: int) -> None:
    """Replica 1 has no gradients at all: it must not take a partial sum for a copy."""
    module, expected = sharded(), model()
    if place().replica == 0:
        backward(module, 0, is_sharded=True)
    reduce_once(module)
    backward(expected, 0, is_sharded=False)
    for ours, theirs in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=1e-12, atol=1e-12)


def a_gradient_may_be_placed_otherwise_than_its_parameter(rank: int) -> None:
    tensor = drawn(5, 3, seed=0)
    module = Holding(distribute_tensor(torch.zeros(5, 3, dtype=torch.float64), meshes()["tp"], [Replicate()]))
    if place().replica == 1:
        module.w.grad = distribute_tensor(tensor, meshes()["tp"], [Shard(0)])
    reduce_once(module)
    torch.testing.assert_close(whole(module.w.grad), tensor)


def a_partial_result_that_is_no_sum_is_refused(rank: int) -> None:
    module = Holding(distribute_tensor(torch.zeros(4, dtype=torch.float64), meshes()["tp"], [Replicate()]))
    module.w.grad = DTensor.from_local(torch.ones(4, dtype=torch.float64), meshes()["tp"], [Partial("max")])
    with pytest.raises(StageError, match=r"parameter 'w' of virtual stage 0 has a gradient placed as Partial\(max\)"):
        reduce_once(module)


def replicas_that_place_a_gradient_differently_are_refused(rank: int) -> None:
    module = Holding(distribute_tensor(torch.zeros(4, dtype=torch.float64), meshes()["tp"], [Replicate()]))
    placement = Replicate() if place().replica else Shard(0)
    module.w.grad = distribute_tensor(torch.ones(4, dtype=torch.float64), meshes()["tp"], [placement])
    with pytest.raises(StageError, match="'w' of virtual stage 0 has gradients of different dtypes or placements"):
        reduce_once(module)


def the_norm_counts_every_element_once(rank: int) -> None:
    module, expected = (
        nn.Sequential(sharded(), nn.Linear(8, 8).double()),
        nn.Sequential(model(), nn.Linear(8, 8).double()),
    )
    with torch.no_grad():  # the last layer is not sharded: it is the same on both members
        for ours, theirs in zip(module[1].parameters(), expected[1].parameters(), strict=True):
            ours.grad = drawn(*theirs.shape, seed=1)
            theirs.grad = ours.grad.clone()
    backward(module[0], 0, is_sharded=True)
    backward(expected[0], 0, is_sharded=False)
    for norm_type in (2.0, 1.0, 3.5, float("inf")):
        wanted = nn.utils.get_total_norm([p.grad for p in expected.parameters() if p.grad is not None], norm_type)
        assert norm_of_all({0: module}, norm_type) == pytest.approx(float(wanted), rel=1e-13)
    without = [p.grad for p in expected[0].parameters() if p.grad is not None]
    skipped = norm_of_all({0: module}, skip=list(module[1].parameters()))
    assert skipped == pytest.approx(float(nn.utils.get_total_norm(without)), rel=1e-13)


def a_shard_smaller_than_the_group_leaves_ranks_with_nothing(rank: int) -> None:
    module = Holding(distribute_tensor(torch.zeros(1, dtype=torch.float64), meshes()["tp"], [Shard(0)]))
    module.w.grad = distribute_tensor(torch.full((1,), -3.0, dtype=torch.float64), meshes()["tp"], [Shard(0)])
    assert norm_of_all({0: module}) == 3.0
    assert norm_of_all({0: module}, float("inf")) == 3.0


def what_is_sharded_over_a_part_of_the_group_counts_once(rank: int) -> None:
    """Both dims are coordinated, as for FSDP inside the tasks; the parameter's mesh has one of them."""
    both = rrfp.Topology.from_mesh(meshes(), ("tp", "dp"))
    module = Holding(distribute_tensor(torch.zeros(4, dtype=torch.float64), meshes()["tp"], [Shard(0)]))
    module.w.grad = distribute_tensor(torch.ones(4, dtype=torch.float64), meshes()["tp"], [Shard(0)])
    shares: list[Any] = [None] * RANKS
    dist.all_gather_object(shares, local_norm({0: module}, topology=both))
    assert combined_norm(shares) == 2.0


def a_mesh_that_is_not_coordinated_is_refused(rank: int) -> None:
    data = Holding(distribute_tensor(torch.zeros(4), meshes()["dp"], [Shard(0)]))
    check_sharded({3: data}, rrfp.Topology.from_mesh(meshes(), ("tp", "dp")), range(RANKS))
    assert refusal(data, place()) == (
        f"parameter 'w' of virtual stage 3 is a DTensor over the ranks {[rank % 2, rank % 2 + 2]}, and its collectives "
        "run inside tasks: coordinate is ('tp',), must be ('tp', 'dp')"
    )
    tensor = Holding(distribute_tensor(torch.zeros(4), meshes()["tp"], [Shard(0)]))
    check_sharded({3: tensor}, place(), range(RANKS))
    deep = rrfp.Topology.at(rank, Mesh((("pp", 4),)))
    assert "these ranks are of several stages: the DTensor's mesh must not have the dim 'pp'" in refusal(tensor, deep)
    small = rrfp.Topology.at(rank % 2, Mesh((("pp", 2),)))
    with pytest.raises(ConfigError, match=r"but the topology has no ranks \[2, 3\]|several stages"):
        check_sharded({3: tensor}, small, range(2))


def groups_of_replicas_need_ranks_that_fit(rank: int) -> None:
    turned = rrfp.Topology.at(RANKS - 1 - rank, Mesh((("dp", 2), ("pp", 2))))
    with pytest.raises(ConfigError, match=rf"this is rank {3 - rank} of 4, torch.distributed says rank {rank} of 4"):
        check_replicas(turned, range(RANKS))
    group = replica_group(rrfp.Topology.at(rank, Mesh((("pp", 2), ("dp", 2)))), range(RANKS))
    assert dist.get_process_group_ranks(group) == [rank - rank % 2, rank - rank % 2 + 1]
