"""Modules of replicas that reduce once for each forward and backward, or whose gradients are sparse, are refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import rrfp
from rrfp.errors import ConfigError


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """Four ranks of which three do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


@pytest.mark.parametrize("coordinate", [("tp",), ("tp", "dp")])
def test_a_stage_in_ddp_is_refused_with_or_without_coordination(coordinate: tuple[str, ...]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), process_group=mesh["dp"].get_group())
    with pytest.raises(
        ConfigError, match=r"the submodule '1' of virtual stage 0 is in DistributedDataParallel.* dp dim"
    ):
        rrfp.Pipeline(nn.Sequential(nn.ReLU(), wrapped), mesh=mesh, coordinate=coordinate, loss_fn=mean)
    with pytest.raises(ConfigError, match="the module of virtual stage 0 is in DistributedDataParallel"):
        rrfp.Pipeline(wrapped, mesh=mesh, coordinate=coordinate, loss_fn=mean, split=True)


def test_ddp_is_refused_in_one_process_and_in_its_composed_form() -> None:
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="the module of virtual stage 1 is in DistributedDataParallel"):
        rrfp.local([nn.Linear(2, 2), wrapped], loss_fn=mean)
    with pytest.raises(ConfigError, match="the module of virtual stage 0 is in DistributedDataParallel"):
        rrfp.local([replicate(nn.Linear(2, 2)), nn.Linear(2, 2)], loss_fn=mean)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("coordinate", [("tp",), ("tp", "dp")])
def test_a_stage_in_fsdp1_is_refused(coordinate: tuple[str, ...], split: bool) -> None:
    """It hooks one backward for each forward: with several microbatches in flight its gradients are wrong."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    sharded = FullyShardedDataParallel(nn.Linear(2, 2), device_mesh=mesh["dp"], device_id=torch.device("cpu"))
    with pytest.raises(
        ConfigError, match=r"the submodule '1' of virtual stage 0 is in FullyShardedDataParallel.*fully_shard"
    ):
        rrfp.Pipeline(nn.Sequential(nn.ReLU(), sharded), mesh=mesh, coordinate=coordinate, loss_fn=mean, split=split)
    with pytest.raises(ConfigError, match="the module of virtual stage 0 is in FullyShardedDataParallel"):
        rrfp.local([sharded, nn.Linear(2, 2)], loss_fn=mean, split=split)


def test_a_sparse_table_of_replicas_is_refused_at_any_depth_and_named_by_its_part() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    tables = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.EmbeddingBag(3, 2, sparse=True)))
    message = r"the submodule '1.0' of virtual stage 0 has sparse=True.*: gradients are summed over replicas as dense"
    with pytest.raises(ConfigError, match=message):
        rrfp.Pipeline(tables, mesh=mesh, loss_fn=mean)
    graph = rrfp.Graph()
    graph.part("lm", stages=[0, 1], reads={"words": graph.part("words", stages=[0])})
    parts = {"words": nn.Embedding(3, 2, sparse=True), "lm": nn.Linear(2, 2)}
    with pytest.raises(ConfigError, match="the module of part 'words' has sparse=True"):
        rrfp.Pipeline(parts, graph=graph, mesh=mesh, loss_fn=mean)
    tables.requires_grad_(False)
    rrfp.Pipeline(tables, mesh=mesh, loss_fn=mean)
    rrfp.Pipeline(nn.Embedding(3, 2), mesh=mesh, loss_fn=mean)
