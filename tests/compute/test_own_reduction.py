"""Modules that reduce their own gradients are refused, or not split, by name."""

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
from rrfp.compute.own_reduction import reduction_of_its_own
from rrfp.compute.process_groups import check_sharded
from rrfp.compute.split_backward import SplitBackward
from rrfp.core.mesh import Mesh
from rrfp.errors import ConfigError, StageError


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


def test_fsdp_is_not_split() -> None:
    module = nn.Sequential(nn.ReLU(), FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")))
    assert "FullyShardedDataParallel" in (reduction_of_its_own(module) or "")
    assert reduction_of_its_own(nn.Sequential(nn.Linear(2, 2))) is None
    output = nn.Linear(2, 2)(torch.ones(1, 2))
    with pytest.raises(StageError, match="virtual stage 0 cannot be split: FullyShardedDataParallel"):
        SplitBackward(module, 0, "refuse").run([output], [torch.ones(1, 2)], None)  # type: ignore[arg-type]


def test_fsdp_over_ranks_that_are_not_coordinated_is_refused() -> None:
    modules = {0: nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")))}
    place = rrfp.Topology.at(0, Mesh((("pp", 1), ("dp", 4))))
    with pytest.raises(
        ConfigError,
        match=r"submodule '0' of virtual stage 0 is in FullyShardedDataParallel over the ranks \[0, 1, 2, 3\].*"
        r"coordinate is \('tp',\), must be \('tp', 'dp'\)",
    ):
        check_sharded(modules, place, range(4))
    check_sharded(modules, rrfp.Topology.at(0, Mesh((("pp", 1), ("dp", 4)), ("tp", "dp"))), range(4))
