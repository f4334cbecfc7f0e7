"""A mesh of named dims: every rank has one place, in whatever order the dims are, and what cannot work is refused."""

from __future__ import annotations

from itertools import permutations, product

import pytest
from batches import examples
from hypothesis import given
from hypothesis import strategies as st

from rrfp import Topology
from rrfp.errors import ConfigError
from rrfp.model.mesh import Mesh, MeshPosition

NAMES = ("pp", "dp", "tp", "cp")


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Up to five dims in any order; of what is coordinated some must be and some need not."""
    others = draw(st.lists(st.sampled_from(["dp", "dp_shard", "tp", "cp"]), unique=True))
    names = draw(st.permutations(["pp", *others]))
    coordinate = draw(st.sampled_from([("tp", "cp"), ("cp", "tp", "dp_shard"), ("tp", "cp", "ep")]))
    sizes = [draw(st.integers(1, 3 if place == 0 else 2)) for place in range(len(names))]
    return Mesh(tuple(zip(names, sizes, strict=True)), coordinate)


@pytest.mark.parametrize("order", list(permutations(NAMES)), ids=" ".join)
@pytest.mark.parametrize("coordinate", [("tp", "cp"), ("cp", "tp", "dp")])
def test_ranks_and_places_are_one_to_one_in_any_order_of_dims(
    order: tuple[str, ...], coordinate: tuple[str, ...]
) -> None:
    for sizes in product((1, 2, 3), (1, 2), (1, 2), (1, 2)):
        mesh = Mesh(tuple(zip(order, sizes, strict=True)), coordinate)
        places = [mesh.place_of(rank) for rank in range(mesh.size)]
        assert [mesh.rank(place) for place in places] == list(range(mesh.size))
        assert set(places) == {
            MeshPosition(*at) for at in product(range(mesh.stages), range(mesh.replicas), range(mesh.members))
        }
        assert mesh.stages * mesh.replicas * mesh.members == mesh.size


@examples(100)
@given(meshes())
def test_a_place_is_what_the_coordinates_say(mesh: Mesh) -> None:
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        index = 0
        for name, size in mesh.dims:
            assert 0 <= at[name] < size
            index = index * size + at[name]
        assert index == rank
        assert mesh.place_of(rank).stage == at["pp"]


@examples(100)
@given(meshes())
def test_a_group_differs_in_coordinated_dims_only_and_a_replica_in_the_others(mesh: Mesh) -> None:
    places = [mesh.place_of(rank) for rank in range(mesh.size)]
    coordinates = [mesh.coordinates(rank).items() for rank in range(mesh.size)]
    for one, other in product(range(mesh.size), repeat=2):
        here, there = places[one], places[other]
        differ = {name for name, _ in coordinates[one] - coordinates[other]}
        assert (here[:2] == there[:2]) == (not differ - set(mesh.coordinate))
        assert (here[::2] == there[::2]) == (not differ - set(mesh.replicated))


@examples(100)
@given(meshes())
def test_a_leader_has_the_lowest_rank_of_its_group_and_all_members_see_the_same_group(mesh: Mesh) -> None:
    for rank in range(mesh.size):
        place = Topology.at(rank, mesh)
        assert place.rank == rank
        assert place.leader == min(place.group)
        assert list(place.group) == sorted(place.group)
        assert place.group[place.member] == rank
        assert Topology.at(place.group[-1], mesh).group == place.group


@examples(100)
@given(meshes())
def test_tensors_travel_between_ranks_that_differ_in_the_stage_only(mesh: Mesh) -> None:
    for rank in range(mesh.size):
        place = Topology.at(rank, mesh)
        for stage in range(mesh.stages):
            other = mesh.coordinates(place.rank_of(stage))
            assert other == {**mesh.coordinates(rank), "pp": stage}


def test_coordinated_dims_make_one_group_and_the_rest_replicas() -> None:
    mesh = Mesh((("dp_replicate", 2), ("pp", 3), ("dp_shard", 2), ("tp", 4)), ("tp", "dp_shard"))
    assert (mesh.stages, mesh.members, mesh.replicas, mesh.size) == (3, 8, 2, 48)
    assert mesh.replicated == ("dp_replicate",)
    assert Mesh(mesh.dims, ("tp",)).replicated == ("dp_replicate", "dp_shard")
    # The second dp_shard, third tp of stage 1: rank 24 begins the second replica, 8 a stage.
    assert mesh.place_of(24 + 8 + 4 + 2) == MeshPosition(1, 1, 6)


@pytest.mark.parametrize(
    ("dims", "coordinate", "rank", "name"),
    [
        ((("pp", 4),), ("tp",), 2, "stage 2"),
        ((("pp", 2), ("tp", 1), ("dp", 1)), ("tp",), 1, "stage 1"),
        ((("pp", 2), ("dp", 2), ("tp", 2)), ("tp",), 5, "stage 1, dp 0, tp 1 (rank 5)"),
        ((("tp", 2), ("pp", 2), ("cp", 1)), ("tp",), 3, "stage 1, tp 1 (rank 3)"),
    ],
)
def test_a_rank_is_called_by_its_stage_and_where_that_has_several_by_its_coordinates(
    dims: tuple[tuple[str, int], ...], coordinate: tuple[str, ...], rank: int, name: str
) -> None:
    mesh = Mesh(dims, coordinate)
    assert mesh.name(rank) == name
    place = Topology.at(rank, mesh)
    assert (place.name, place.name_of(rank)) == (name, name)


@pytest.mark.parametrize(
    ("dims", "coordinate", "message"),
    [
        (
            (("pp", 2), ("cp", 2), ("tp", 2)),
            ("tp",),
            "mesh dim 'cp' has size 2 and its collectives run inside a task, in the order of the tasks: coordinate is "
            "('tp',), must be ('tp', 'cp')",
        ),
        (
            (("pp", 2), ("tp", 2)),
            (),
            "mesh dim 'tp' has size 2 and its collectives run inside a task, in the order of the tasks: coordinate is "
            "(), must be ('tp',)",
        ),
        (
            (("pp", 2), ("x", 2)),
            ("tp",),
            "mesh dim 'x' is neither pp, a replicated one (dp...) nor coordinated: if collectives over it run inside a "
            "task, coordinate must be ('tp', 'x')",
        ),
        ((("tp", 2),), ("tp",), "mesh has the dims tp, must have one named 'pp'"),
        ((("pp", 2), ("tp", 2)), ("tq",), "coordinate has 'tq', must be dims of the mesh: pp, tp"),
        ((), ("tp",), "mesh has the dims none, must have one named 'pp'"),
        ((("pp", 2), ("pp", 2)), ("tp",), "mesh has the dims pp, pp, must have each once"),
        ((("pp", 2), ("tp", 0)), ("tp",), "mesh dim 'tp' is 0, must be a whole number >= 1"),
        ((("pp", 2), ("tp", 2.0)), ("tp",), "mesh dim 'tp' is 2.0, must be a whole number >= 1"),
        ((("pp", True),), ("tp",), "mesh dim 'pp' is True, must be a whole number >= 1"),
        ((("pp", 2),), ("tp", "pp"), "coordinate is ('tp', 'pp'), must not have 'pp'"),
    ],
)
def test_a_mesh_that_cannot_work_is_refused_with_the_reason(
    dims: tuple[tuple[str, int], ...], coordinate: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Mesh(dims, coordinate)
    assert str(caught.value) == message


def test_a_dim_of_size_one_needs_no_coordination() -> None:
    mesh = Mesh((("pp", 2), ("cp", 1), ("x", 1)), ())
    assert (mesh.members, mesh.replicas) == (1, 1)


@pytest.mark.parametrize(
    ("dims", "coordinate", "expected"),
    [
        ((("pp", 2), ("tp", 2)), ("tp",), False),
        ((("pp", 2), ("dp", 2), ("tp", 2)), ("tp",), False),
        ((("pp", 2), ("dp_shard", 2)), ("dp_shard",), True),
        ((("pp", 2), ("dp_shard", 1), ("tp", 2)), ("tp", "dp_shard"), False),
    ],
)
def test_ranks_of_a_group_have_their_own_data_where_a_replicated_dim_is_coordinated(
    dims: tuple[tuple[str, int], ...], coordinate: tuple[str, ...], expected: bool
) -> None:
    assert Mesh(dims, coordinate).coordinates_replicas is expected


@pytest.mark.parametrize("order", list(permutations(("pp", "dp", "dp_in", "tp"))), ids=" ".join)
def test_gradients_are_summed_over_replicas_and_reduced_dims(order: tuple[str, ...]) -> None:
    sizes = {"pp": 2, "dp": 2, "dp_in": 3, "tp": 2}
    dims = tuple((name, sizes[name]) for name in order)
    mesh = Mesh(dims, ("tp", "dp_in"), ("dp_in",))
    plain = Mesh(dims, ("tp", "dp_in"))
    assert (mesh.summands, mesh.replicas, mesh.members) == (6, 2, 6)
    assert plain.summands == plain.replicas
    for rank in range(mesh.size):
        at, alike = mesh.coordinates(rank), mesh.counterparts(rank)
        assert alike.index(rank) == mesh.summand_of(rank)
        assert {(mesh.coordinates(r)["pp"], mesh.coordinates(r)["tp"]) for r in alike} == {(at["pp"], at["tp"])}
        assert len(alike) == len(set(alike)) == 6
        assert mesh.is_first(rank) == (at["tp"] == 0)
        # Whoever sums the gradients: checkpoints keep what belongs to a rank with data of its own.
        assert plain.data_rank_of(rank) == mesh.data_rank_of(rank) == mesh.summand_of(rank)
        assert plain.summand_of(rank) == plain.place_of(rank).replica == at["dp"]
        assert plain.is_first(rank) == (plain.place_of(rank).member == 0)


@pytest.mark.parametrize(
    ("coordinate", "reduce", "text"),
    [
        (("tp", "dp"), ("tp",), "reduce has 'tp', must be dims of the mesh that begin with 'dp'"),
        (
            ("tp",),
            ("dp",),
            "reduce has 'dp', which is not coordinated, so gradients are summed over it in any case: leave it out, or "
            "if collectives over it run inside a task, coordinate must be ('tp', 'dp')",
        ),
    ],
)
def test_only_a_coordinated_replicated_dim_is_reduced(
    coordinate: tuple[str, ...], reduce: tuple[str, ...], text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Mesh((("pp", 2), ("dp", 2), ("tp", 2)), coordinate, reduce)
    assert str(caught.value) == text
