"""The place of a process: out of torchrun's environment, or out of a real ``DeviceMesh``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from rrfp import Topology
from rrfp.errors import ConfigError
from rrfp.model.mesh import Mesh


def environment(rank: int, world: int, **others: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), **others}


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        act()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# torchrun's environment.


def test_what_is_no_environment_and_no_list_of_dims_is_refused() -> None:
    wrong: Any = 3
    assert refusal(lambda: Topology.from_env(wrong)).startswith("environ is 3, must be a dict such as os.environ")
    by_dims: Any = {"environ": environment(0, 2), "dims": {"pp": 2}}
    others: list[dict[str, Any]] = [{"coordinate": 3}, {"reduce": 3}]
    for wrong_dims in others:
        assert "is 3, must be a list of names of" in refusal(partial(Topology.from_env, **by_dims, **wrong_dims))
    assert refusal(lambda: Topology.from_mesh(wrong)) == "mesh is of type int, must be a torch.distributed DeviceMesh"


@pytest.mark.parametrize("order", [("pp", "dp", "tp"), ("dp", "pp", "tp"), ("tp", "dp", "pp")])
def test_every_rank_finds_its_place_in_the_environment(order: tuple[str, ...]) -> None:
    sizes = {"pp": 3, "dp": 2, "tp": 2}
    dims = {name: sizes[name] for name in order}
    mesh = Mesh(tuple(dims.items()))
    for rank in range(12):
        place = Topology.from_env(environment(rank, 12, TORCHELASTIC_RUN_ID="job"), dims=dims)
        assert place == replace(Topology.at(rank, mesh, "job"), local_world_size=12)
        assert place.rank == rank
        assert (place.stages, place.replicas, place.members, place.world) == (3, 2, 2, 12)
        assert place.single_host


def test_without_pp_the_pipeline_has_what_is_left_and_is_the_slowest() -> None:
    place = Topology.from_env(environment(7, 12), dims={"dp": 2, "tp": 2})
    assert place.mesh.dims == (("pp", 3), ("dp", 2), ("tp", 2))
    assert (place.stage, place.replica, place.member) == (1, 1, 1)


def test_without_dims_a_stage_has_one_rank() -> None:
    place = Topology.from_env(environment(2, 4))
    assert (place.stage, place.stages, place.world, place.group, place.name) == (2, 4, 4, (2,), "stage 2")


def test_one_name_to_coordinate_may_come_alone() -> None:
    place = Topology.from_env(environment(1, 4), dims={"pp": 2, "cp": 2}, coordinate="cp")
    assert (place.members, place.mesh.coordinate) == (2, ("cp",))


@pytest.mark.parametrize(
    ("world", "dims", "message"),
    [
        (6, {"pp": 2, "dp": 2, "tp": 2}, "WORLD_SIZE is 6, must be pp 2 x dp 2 x tp 2 = 8"),
        (16, {"tp": 2, "pp": 2, "dp": 2}, "WORLD_SIZE is 16, must be tp 2 x pp 2 x dp 2 = 8"),
        (6, {"dp": 2, "tp": 2}, "WORLD_SIZE is 6, must be a multiple of dp 2 x tp 2 = 4"),
        (3, {"tp": 4}, "WORLD_SIZE is 3, must be a multiple of tp 4 = 4"),
        (4, {"tp": 0}, "mesh dim 'tp' is 0, must be a whole number >= 1"),
        (4, {"pp": 2, "tp": "2"}, "mesh dim 'tp' is '2', must be a whole number >= 1"),
    ],
)
def test_a_wrong_world_size_is_one_line_with_the_arithmetic(world: int, dims: Any, message: str) -> None:
    assert refusal(lambda: Topology.from_env(environment(0, world), dims=dims)) == message


def test_a_mesh_in_the_environment_that_asks_for_too_little_is_refused_with_the_reason() -> None:
    message = refusal(lambda: Topology.from_env(environment(0, 8), dims={"pp": 2, "ep": 4}))
    assert message.startswith("mesh dim 'ep' has size 4 and its collectives run inside a task")
    assert message.endswith("coordinate is ('tp',), must be ('tp', 'ep')")


@pytest.mark.parametrize("dims", [None, {"pp": 2, "tp": 2}])
def test_a_rank_outside_the_job_is_refused(dims: dict[str, int] | None) -> None:
    assert "must be below WORLD_SIZE, which is 4" in refusal(lambda: Topology.from_env(environment(4, 4), dims=dims))


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ({"stage": 2}, "stage is 2, must be a whole number 0..1"),
        ({"replica": 3}, "replica is 3, must be a whole number 0..2"),
        ({"member": -1}, "member is -1, must be a whole number 0..3"),
        ({"stages": 3}, "stages is 3, must be the mesh's: 2"),
    ],
)
def test_a_place_outside_its_mesh_is_refused(at: Any, message: str) -> None:
    place = Topology.at(0, Mesh((("pp", 2), ("dp", 3), ("tp", 4))))
    assert refusal(lambda: replace(place, **at)) == message


# A DeviceMesh.


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes this process rank ``rank`` of ``world``, with a process group that moves nothing."""

    def join(rank: int, world: int, **environ: str) -> None:
        for name, text in environment(rank, world, TORCHELASTIC_RUN_ID="job", **environ).items():
            monkeypatch.setenv(name, text)
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())

    yield join
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("names", [("pp", "dp", "tp"), ("dp", "tp", "pp")])
def test_a_device_mesh_tells_the_same_as_the_environment(job: Callable[..., None], names: tuple[str, ...]) -> None:
    for rank in range(8):
        job(rank, 8, TORCHELASTIC_RESTART_COUNT="3")
        place = Topology.from_mesh(init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names))
        assert place == Topology.from_env(dims=dict.fromkeys(names, 2))
        assert (place.rank, place.restart, place.run_id, place.single_host) == (rank, 3, "job", True)


def test_each_part_of_a_device_mesh_is_a_pipeline_of_its_own(job: Callable[..., None]) -> None:
    found = {}
    for rank in range(8):
        job(rank, 8)
        whole = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        found[rank] = Topology.from_mesh(whole["pp", "tp"])
    for rank, place in found.items():
        assert (place.world, place.replicas, place.stage, place.member) == (4, 1, rank // 4, rank % 2)
        assert place.run_id == ("job" if rank % 4 < 2 else "job/from-2")
        assert place.single_host
    assert len({(place.run_id, place.rank) for place in found.values()}) == 8


def test_a_part_of_a_job_on_several_hosts_is_not_taken_for_one_host(job: Callable[..., None]) -> None:
    """Two hosts with four ranks each; a part of four ranks has two on each."""
    job(5, 8, LOCAL_WORLD_SIZE="4")
    whole = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    assert not Topology.from_mesh(whole["pp", "tp"]).single_host
    assert not Topology.from_mesh(whole).single_host


def test_dims_without_names_or_with_strange_ones_are_refused(job: Callable[..., None]) -> None:
    job(0, 4)
    unnamed = init_device_mesh("cpu", (2, 2))
    assert refusal(lambda: Topology.from_mesh(unnamed)) == (
        "mesh has no mesh_dim_names, must name its dims: pp, dp, tp, ..."
    )
    strange = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
    assert "must be ('tp', 'cp')" in refusal(lambda: Topology.from_mesh(strange))
    assert Topology.from_mesh(strange, coordinate="cp").members == 2


def test_a_process_outside_the_mesh_is_told_so(job: Callable[..., None]) -> None:
    job(3, 4)
    mesh = dist.device_mesh.DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("pp", "tp"))
    assert (
        refusal(lambda: Topology.from_mesh(mesh))
        == "mesh lacks this process: every process that builds a pipeline must be in its mesh"
    )
